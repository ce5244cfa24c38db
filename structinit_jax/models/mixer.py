"""MLP-Mixer (Tolstikhin et al. 2021, arXiv:2105.01601) with timm's conventions, in Flax NNX."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from structinit_jax.attention_init import TokenMixingSite, TokenMixingWeights
from structinit_jax.checks import PositiveFloat, PositiveInt
from structinit_jax.models import layers
from structinit_jax.models.layers import Rng
from structinit_jax.models.model import Model, ModelConfig, make_stack, run_stack, token_grid


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixerConfig(ModelConfig):
    """Fields of an `MlpMixer`."""

    width: PositiveInt = 512
    depth: PositiveInt = 8
    token_mlp_ratio: PositiveFloat = 0.5
    mlp_ratio: PositiveFloat = 4.0


class MlpMixer(Model):
    """Patch embedding, a stack of token- and channel-mixing blocks, norm, pooling and linear head.

    It needs no positions: token mixing has separate weights for each token. timm's initial weights
    are Xavier uniform in the MLPs, LeCun normal in the patch embedding, zero in the head.

    Use base_init='pytorch' for gray patches of one pixel: without biases, all embedded pixels are
    multiples of one vector, of which LayerNorm leaves only the sign.

    >>> sizes = dict(image_size=32, patch_size=8, channels=3, num_classes=10, width=16, depth=2)
    >>> model = si.MlpMixer(**sizes, rngs=nnx.Rngs(0))

    Args:
      depth: Number of blocks L.
      token_mlp_ratio: Hidden width of the token-mixing MLP over D (not over N).
      mlp_ratio: Hidden width of the channel MLP over D.

    `Model.__init__` describes the other arguments.
    """

    Config = MixerConfig
    VARIANTS: ClassVar = {
        f"mixer_{name}{patch}_224": dict(image_size=224, patch_size=patch, width=width, depth=depth)
        for name, width, depth in (("s", 512, 8), ("b", 768, 12), ("l", 1024, 24))
        for patch in (32, 16)
    }

    def _make_layers(self, channels: int, rngs: nnx.Rngs) -> None:
        config = self.config
        width = config.width
        self.grid = token_grid(config.image_size, config.patch_size)
        options = dict(dtype=jnp.dtype(config.dtype), rngs=rngs)
        self.patch_embedding = layers.PatchEmbedding(config.patch_size, channels, width, **options)
        head_init = layers.pytorch_init(width)
        if config.base_init == "timm":
            head_init = dict(kernel_init=nnx.initializers.zeros)
            kernel = self.patch_embedding.kernel
            kernel[...] = nnx.initializers.lecun_normal()(rngs.params(), kernel.shape)
            self.patch_embedding.bias[...] = jnp.zeros(width)

        num_tokens = self.grid[0] * self.grid[1]
        sizes = dict(config=config, num_tokens=num_tokens)
        self.blocks = make_stack(MixerBlock, config.depth, **sizes, rngs=rngs)
        self.norm = layers.layer_norm(width, **options)
        self.head = nnx.Linear(width, config.num_classes, **head_init, rngs=rngs)

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
        config = self.config
        patches = self.patch_embedding(images, self.grid).reshape(images.shape[0], -1, config.width)
        rates = np.full(config.depth, config.drop_path, np.float32)
        x, blocks = run_stack(self.blocks, patches, config=config, drop_path_rates=rates, rng=rng)
        pooled = self.norm(x).mean(axis=1)
        out = dict(patch_embedding=patches, blocks=blocks, pooled=pooled)
        return self.head(pooled.astype(jnp.float32)), out


class MixerBlock(layers.PreNormBlock):
    """x + token_mlp(norm1(x)ᵀ)ᵀ, then x + mlp(norm2(x)): mixes tokens, then channels."""

    mix_name = "token_mixing"

    def __init__(self, config: MixerConfig, *, num_tokens: int, rngs: nnx.Rngs):
        width = config.width
        options = dict(dtype=jnp.dtype(config.dtype), rngs=rngs)
        init = _timm_mlp_init if config.base_init == "timm" else layers.pytorch_init
        mlp_options = options | dict(init=init)
        self.norm1 = layers.layer_norm(width, **options)
        self.token_mlp = layers.Mlp(num_tokens, int(width * config.token_mlp_ratio), **mlp_options)
        self.norm2 = layers.layer_norm(width, **options)
        self.mlp = layers.Mlp(width, int(width * config.mlp_ratio), **mlp_options)

    def mix(self, x):
        """Applies the token-mixing MLP to [B, N, D]."""
        return jnp.swapaxes(self.token_mlp(jnp.swapaxes(x, 1, 2)), 1, 2), {}

    def set_weights(self, weights: TokenMixingWeights) -> None:
        """Writes the weights that a scheme returns into a stack of these blocks."""
        layers.set_weight(self.token_mlp.fc1.kernel, "fc1", weights.fc1)
        layers.set_weight(self.token_mlp.fc2.kernel, "fc2", weights.fc2)


def _timm_mlp_init(fan_in: int) -> dict[str, nnx.Initializer]:
    del fan_in
    initializers = nnx.initializers
    return dict(kernel_init=initializers.xavier_uniform(), bias_init=initializers.normal(1e-6))
