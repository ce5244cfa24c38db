"""MLP-Mixer (Tolstikhin et al. 2021, arXiv:2105.01601) with timm's conventions, in Flax NNX."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from structinit_jax.attention_init import AttentionInit, TokenMixingSite
from structinit_jax.models import layers
from structinit_jax.models.layers import Key


def _variant(patch_size: int, width: int, depth: int) -> dict:
    return dict(image_size=224, patch_size=patch_size, width=width, depth=depth)


VARIANTS = {
    "mixer_s32_224": _variant(32, 512, 8),
    "mixer_s16_224": _variant(16, 512, 8),
    "mixer_b32_224": _variant(32, 768, 12),
    "mixer_b16_224": _variant(16, 768, 12),
    "mixer_l32_224": _variant(32, 1024, 24),
    "mixer_l16_224": _variant(16, 1024, 24),
}
"""timm's names and the arguments that they stand for."""


class MlpMixer(nnx.Module):
    """Patch embedding, a stack of token- and channel-mixing blocks, norm, pooling and linear head.

    The stack is one `MixerBlock` whose parameters have a leading layer axis, run under `lax.scan`.
    There are no positions: the token-mixing MLP tells tokens apart by its own weights. Start values
    are timm's: Xavier uniform with biases of deviation 1e-6 in the MLPs, LeCun normal in the patch
    embedding, and zero in the head, so that all logits are zero at first.

    Args:
      image_size: (height, width) of the input in pixels, or the side of a square one; multiples of
        the patch size.
      patch_size: side of a patch in pixels.
      channels: input channels.
      num_classes: logits.
      width: D.
      depth: L, the number of blocks.
      token_mlp_ratio: hidden width of the token-mixing MLP over D (not over the tokens, as in
        timm and the paper).
      mlp_ratio: hidden width of the channel MLP over D.
      mlp_mean: mean of the weights of the channel MLPs' first layers, which Trockman & Kolter's
        "Mimetic Initialization of MLPs" (arXiv:2602.07156) sets to another value than the usual
        zero. What LayerNorm puts out sums to zero over the channels, so here the mean shows only
        once training has moved the norm's scale and bias.
      drop_path: rate of every block (timm's Mixer does not let it rise with depth).
      dropout: rate behind both layers of both MLPs.
      dtype: type of the computation ('float32' or 'bfloat16'); parameters are float32.
      unroll: blocks to a step of the loop over the stack; 0 unrolls it, for more compile time.
      remat: what a block keeps for the gradient: 'none' keeps everything, 'dots', 'full'
        (see `layers.run_layers`).
      attention_init: scheme for the token-mixing MLPs; None keeps timm's start values.
      rngs: its `params` stream draws the start values.
    """

    def __init__(
        self,
        *,
        image_size: int | tuple[int, int],
        patch_size: int,
        channels: int,
        num_classes: int,
        width: int,
        depth: int,
        token_mlp_ratio: float = 0.5,
        mlp_ratio: float = 4.0,
        mlp_mean: float = 0.0,
        drop_path: float = 0.0,
        dropout: float = 0.0,
        dtype: str = "float32",
        unroll: int = 1,
        remat: str = "none",
        attention_init: AttentionInit | None = None,
        rngs: nnx.Rngs,
    ):
        self.grid = layers.token_grid(image_size, patch_size)
        layers.check_choices(dtype=dtype, remat=remat)
        self.drop_path_rate = drop_path
        self.dtype = jnp.dtype(dtype)
        self.remat = remat
        self.unroll = unroll

        options = dict(dtype=self.dtype, rngs=rngs)
        self.patch_embedding = layers.PatchEmbedding(patch_size, channels, width, **options)
        kernel, bias = self.patch_embedding.kernel, self.patch_embedding.bias
        kernel[...] = nnx.initializers.lecun_normal()(rngs.params(), kernel.shape)
        bias[...] = jnp.zeros(bias.shape)
        config = BlockConfig(
            num_tokens=self.grid[0] * self.grid[1],
            width=width,
            token_hidden=int(width * token_mlp_ratio),
            channel_hidden=int(width * mlp_ratio),
            mlp_mean=mlp_mean,
            dropout=dropout,
            dtype=self.dtype,
        )
        self.blocks = layers.stack_layers(lambda rngs: MixerBlock(config, rngs=rngs), depth, rngs)
        self.norm = layers.layer_norm(width, **options)
        # The head is float32 whatever the blocks are: logits are what the loss exponentiates.
        zeros = nnx.initializers.zeros
        self.head = nnx.Linear(width, num_classes, kernel_init=zeros, rngs=rngs)
        if attention_init is not None:
            self.initialize_attention(attention_init, rngs.params())

    @property
    def token_mixing_site(self) -> TokenMixingSite:
        """What a scheme may know of this model."""
        depth, _, hidden = self.blocks.token_mlp.fc1.kernel.shape
        width = self.norm.scale.shape[0]
        return TokenMixingSite(grid=self.grid, hidden=hidden, num_layers=depth, width=width)

    def initialize_attention(self, attention_init: AttentionInit, key: jax.Array) -> None:
        """Puts a scheme's token-mixing weights in place, with zero biases."""
        weights = attention_init(key, self.token_mixing_site)
        for name in ("fc1", "fc2"):
            start = getattr(weights, name)
            if start is not None:
                layer = getattr(self.blocks.token_mlp, name)
                layer.kernel[...] = start
                layer.bias[...] = jnp.zeros(layer.bias.shape)

    def __call__(
        self, images: Float[Array, "B H W C"], *, key: Key = None, with_maps: bool = False
    ) -> tuple[Float[Array, "B classes"], dict]:
        """Computes logits.

        Args:
          images: normalized images.
          key: draws dropout and drop path in training; None in evaluation.
          with_maps: whether to return the token-mixing MLPs' maps too (memory grows with N²).

        Returns:
          float32 logits [B, classes] and the intermediates by name: 'patch_embedding' [B, N, D],
          'blocks' (each with a leading layer axis L: 'token_mixing', 'mlp', 'output' [L, B, N, D],
          'token_maps' [L, B, N, N], see `MixerBlock.token_map`), 'pooled' [B, D] behind the final
          norm.
        """
        patches = self.patch_embedding(images)
        patches = patches.reshape(len(images), -1, patches.shape[-1])
        x, blocks = self._run_blocks(patches, key, with_maps)
        pooled = self.norm(x).mean(axis=1)
        logits = self.head(pooled.astype(jnp.float32))
        return logits, {"patch_embedding": patches, "blocks": blocks, "pooled": pooled}

    def _run_blocks(self, x, key, with_maps):
        depth = len(self.blocks.token_mlp.fc1.kernel[...])
        rate = jnp.asarray(self.drop_path_rate, jnp.float32)
        keys = None if key is None else jax.random.split(key, depth)

        def body(x, layer):
            block, key = layer
            return block(x, drop_path_rate=rate, key=key, with_maps=with_maps)

        return layers.run_layers(body, x, (self.blocks, keys), unroll=self.unroll, remat=self.remat)


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """What the blocks of a stack have in common.

    Attributes:
      num_tokens: N.
      width: D.
      token_hidden: hidden units of the token-mixing MLP.
      channel_hidden: hidden units of the channel MLP.
      mlp_mean: mean of the weights of the channel MLP's first layer.
      dropout: rate behind both layers of both MLPs.
      dtype: type of the computation; parameters stay float32.
    """

    num_tokens: int
    width: int
    token_hidden: int
    channel_hidden: int
    mlp_mean: float
    dropout: float
    dtype: jnp.dtype


class MixerBlock(nnx.Module):
    """x + token_mlp(norm(x)ᵀ)ᵀ, then x + mlp(norm(x)): across tokens, then across channels."""

    def __init__(self, config: BlockConfig, *, rngs: nnx.Rngs):
        options = dict(dtype=config.dtype, rngs=rngs)
        mlp_options = options | dict(
            dropout=config.dropout,
            kernel_init=nnx.initializers.xavier_uniform(),
            bias_init=nnx.initializers.normal(1e-6),
        )
        self.norm1 = layers.layer_norm(config.width, **options)
        self.token_mlp = layers.Mlp(config.num_tokens, config.token_hidden, **mlp_options)
        self.norm2 = layers.layer_norm(config.width, **options)
        self.mlp = layers.Mlp(config.width, config.channel_hidden, **mlp_options)
        self.mlp.fc1.kernel[...] = self.mlp.fc1.kernel[...] + config.mlp_mean

    def __call__(
        self,
        x: Float[Array, "B N D"],
        *,
        drop_path_rate: Float[Array, ""],
        key: Key = None,
        with_maps: bool = False,
    ) -> tuple[Float[Array, "B N D"], dict[str, Array]]:
        """Returns the block's output and its intermediates by name."""
        keys = (None,) * 4 if key is None else jax.random.split(key, 4)
        normed = self.norm1(x)
        mixed_tokens = jnp.swapaxes(self.token_mlp(jnp.swapaxes(normed, 1, 2), key=keys[0]), 1, 2)
        x = x + layers.drop_path(mixed_tokens, drop_path_rate, keys[1])
        mixed = self.mlp(self.norm2(x), key=keys[2])
        x = x + layers.drop_path(mixed, drop_path_rate, keys[3])
        out = {"token_mixing": mixed_tokens, "mlp": mixed, "output": x}
        return x, out | ({"token_maps": self.token_map(normed)} if with_maps else {})

    def token_map(self, normed: Float[Array, "B N D"]) -> Float[Array, "B N N"]:
        """How token mixing depends on its normalized input, linearized and averaged over channels.

        Entry [n, m] is the mean over the channels of the derivative of output token n by input
        token m: what an attention map is to attention. GELU's slope at the hidden units is all that
        differs between channels, so its mean gives the mean map.
        """
        fc1, fc2 = self.token_mlp.fc1, self.token_mlp.fc2
        hidden = fc1(jnp.swapaxes(normed, 1, 2)).astype(jnp.float32)
        slope = jax.vmap(jax.vmap(jax.vmap(jax.grad(_gelu))))(hidden).mean(axis=1)
        return jnp.einsum("mh,Bh,hn->Bnm", fc1.kernel[...], slope, fc2.kernel[...])


def _gelu(x):
    return jax.nn.gelu(x, approximate=False)
