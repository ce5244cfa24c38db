"""MLP-Mixer (Tolstikhin et al. 2021, arXiv:2105.01601) with timm's conventions, in Flax NNX."""

from __future__ import annotations  # so that signatures show the names of checked types

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from structinit_jax.attention_init import AttentionInit, TokenMixingSite, TokenMixingWeights
from structinit_jax.errors import Fraction, PositiveFloat, PositiveInt, checked
from structinit_jax.models import layers
from structinit_jax.models.layers import BaseInit, Rng
from structinit_jax.models.model import Dtype, ImageSize, Model, Remat, make_stack, run_stack


class MlpMixer(Model):
    """Patch embedding, a stack of token- and channel-mixing blocks, norm, pooling and linear head.

    It needs no positions: token mixing has separate weights for each token. timm's initial weights
    are Xavier uniform in the MLPs, LeCun normal in the patch embedding, zero in the head.

    Use base_init='pytorch' for one-pixel grayscale patches: without biases, all embedded pixels are
    multiples of one vector, and LayerNorm preserves only their sign.

    >>> sizes = dict(image_size=32, patch_size=8, channels=3, num_classes=10, width=16, depth=2)
    >>> model = si.MlpMixer(**sizes, rngs=nnx.Rngs(0))

    Args:
      depth: Number of blocks L.
      token_mlp_ratio: Ratio of the token-mixing MLP's hidden width to D (not to N).
      mlp_ratio: Ratio of the channel-mixing MLP's hidden width to D.
    """

    VARIANTS: ClassVar = {
        f"mixer_{name}{patch}_224": dict(image_size=224, patch_size=patch, width=width, depth=depth)
        for name, width, depth in (("s", 512, 8), ("b", 768, 12), ("l", 1024, 24))
        for patch in (32, 16)
    }

    @checked
    def __init__(
        self,
        *,
        image_size: ImageSize = 224,
        channels: PositiveInt,
        num_classes: PositiveInt = 1000,
        patch_size: PositiveInt = 16,
        width: PositiveInt = 512,
        depth: PositiveInt = 8,
        token_mlp_ratio: PositiveFloat = 0.5,
        mlp_ratio: PositiveFloat = 4.0,
        drop_path: Fraction = 0.0,
        base_init: BaseInit = "timm",
        dtype: Dtype = "float32",
        remat: Remat = "none",
        attention_init: AttentionInit | None = None,
        rngs: nnx.Rngs,
    ):
        self.grid = layers.token_grid(image_size, patch_size)
        self.width = width
        self.depth = depth
        self.drop_path = drop_path
        self.remat = remat

        options = dict(dtype=jnp.dtype(dtype), rngs=rngs)
        self.patch_embedding = layers.PatchEmbedding(patch_size, channels, width, **options)
        head_init = layers.pytorch_init(width)
        if base_init == "timm":
            head_init = dict(kernel_init=nnx.initializers.zeros)
            kernel = self.patch_embedding.kernel
            init = nnx.initializers.lecun_normal(dtype=jnp.float32)
            kernel[...] = init(rngs.params(), kernel.shape)
            self.patch_embedding.bias[...] = jnp.zeros(width, jnp.float32)
        self.blocks = make_stack(
            MixerBlock,
            depth,
            num_tokens=self.grid[0] * self.grid[1],
            width=width,
            token_hidden=int(token_mlp_ratio * width),
            hidden=int(mlp_ratio * width),
            init=_timm_mlp_init if base_init == "timm" else layers.pytorch_init,
            **options,
        )
        self.norm = layers.layer_norm(width, **options)
        self.head = nnx.Linear(width, num_classes, **head_init, rngs=rngs)
        if attention_init is not None:
            self.initialize_attention(attention_init, rngs.params())

    def sites(self) -> dict[str, TokenMixingSite]:
        """See `Model.sites`."""
        num_layers, _, hidden = self.blocks.token_mlp.fc1.kernel.shape
        return {"blocks": TokenMixingSite(self.grid, hidden=hidden, num_layers=num_layers)}

    def __call__(
        self, images: Float[Array, "B H W C"], *, rng: Rng = None, with_maps: bool = False
    ) -> tuple[Float[Array, "B classes"], dict[str, Any]]:
        """Returns logits and intermediates; see `Model.__call__`. There are no attention maps.

        The intermediates are 'patch_embedding' [B, N, D]; 'blocks' with 'token_mixing', 'mlp',
        'output' [L, B, N, D]; 'pooled' [B, D] after the norm.
        """
        patches = self.patch_embedding(images, self.grid)
        patches = patches.reshape(images.shape[0], self.grid[0] * self.grid[1], self.width)
        rates = [self.drop_path] * self.depth
        x, blocks = run_stack(
            self.blocks, patches, remat=self.remat, drop_path_rates=rates, rng=rng
        )
        pooled = self.norm(x).mean(axis=1)
        out = dict(patch_embedding=patches, blocks=blocks, pooled=pooled)
        return self.head(pooled.astype(jnp.float32)), out


class MixerBlock(layers.StackedBlock):
    """x + token_mlp(norm1(x)ᵀ)ᵀ, then x + mlp(norm2(x)): mixes tokens, then channels."""

    def __init__(
        self,
        *,
        num_tokens: int,
        width: int,
        token_hidden: int,
        hidden: int,
        init: layers.LinearInit,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        options = dict(dtype=dtype, rngs=rngs)
        self.norm1 = layers.layer_norm(width, **options)
        self.token_mlp = layers.Mlp(num_tokens, token_hidden, init=init, **options)
        self.norm2 = layers.layer_norm(width, **options)
        self.mlp = layers.Mlp(width, hidden, init=init, **options)

    def __call__(
        self, x: Float[Array, "B N D"], *, drop_path_rate: Float[Array, ""] | None, rng: Rng = None
    ) -> tuple[Float[Array, "B N D"], dict[str, Array]]:
        """Returns the output and the intermediates by name."""
        token_rng, mlp_rng = (None, None) if rng is None else jax.random.split(rng)
        mixed = jnp.swapaxes(self.token_mlp(jnp.swapaxes(self.norm1(x), 1, 2)), 1, 2)
        x = x + layers.drop_path(mixed, drop_path_rate, token_rng)
        x = layers.keep(x)
        hidden = self.mlp(self.norm2(x))
        x = x + layers.drop_path(hidden, drop_path_rate, mlp_rng)
        return x, dict(token_mixing=mixed, mlp=hidden, output=x)

    def set_weights(self, weights: TokenMixingWeights) -> None:
        """Writes the weights that a scheme returns into a stack of these blocks."""
        layers.set_weight(self.token_mlp.fc1.kernel, "fc1", weights.fc1)
        layers.set_weight(self.token_mlp.fc2.kernel, "fc2", weights.fc2)


def _timm_mlp_init(fan_in: int) -> dict[str, nnx.Initializer]:
    del fan_in
    initializers = nnx.initializers
    return dict(kernel_init=initializers.xavier_uniform(), bias_init=initializers.normal(1e-6))
