"""ConvMixer (Trockman & Kolter 2022, arXiv:2201.09792) with timm's conventions, in Flax NNX."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from structinit_jax.attention_init import AttentionInit, ConvSite
from structinit_jax.errors import InputError
from structinit_jax.models import layers
from structinit_jax.models.layers import Key


def _variant(image_size, patch_size, width, depth, kernel_size, activation="gelu") -> dict:
    return dict(
        image_size=image_size,
        patch_size=patch_size,
        width=width,
        depth=depth,
        kernel_size=kernel_size,
        activation=activation,
    )


VARIANTS = {
    "convmixer_768_32": _variant(224, 7, 768, 32, 7, "relu"),
    "convmixer_1024_20_ks9_p14": _variant(224, 14, 1024, 20, 9),
    "convmixer_1536_20": _variant(224, 7, 1536, 20, 9),
    "convmixer_256_8": _variant(32, 2, 256, 8, 5),
    "convmixer_512_8": _variant(32, 2, 512, 8, 5),
}
"""timm's names, and the 2024 paper's CIFAR-10 models (table 4; it has kernels of 3 and 8 too)."""


class FixedWeight(nnx.Variable):
    """A weight that training leaves alone: no gradient, no decay, no optimizer state."""


class ConvMixer(nnx.Module):
    """Patch embedding, a stack of depthwise and pointwise convolutions, average pooling, head.

    The stack is one `ConvMixerBlock` whose parameters and running statistics have a leading layer
    axis, run under `lax.scan`. Start values are PyTorch's, which timm leaves in place.

    Training, that is, a call with a key, normalizes by the statistics of the batch (under `jit`
    over a mesh: of the global batch) and moves the running ones in place; evaluation uses those.

    Args:
      image_size: (height, width) of the input in pixels, or the side of a square one; multiples of
        the patch size.
      patch_size: side of a patch in pixels.
      channels: input channels.
      num_classes: logits.
      width: D.
      depth: L, the number of blocks.
      kernel_size: f of the depthwise convolutions; an even one reaches one further down and right.
      activation: 'gelu' (exact) or 'relu'.
      spatial_filters: 'trained', or 'fixed' to keep the depthwise filters at their start values;
        their biases are trained in either case.
      drop_path: rate of the last block's depthwise branch; it rises linearly from 0 at the first.
      dtype: type of the computation ('float32' or 'bfloat16'); parameters, statistics and what is
        computed of them are float32.
      unroll: blocks to a step of the loop over the stack; 0 unrolls it, for more compile time.
      remat: what a block keeps for the gradient: 'none' keeps everything, 'dots', 'full'
        (see `layers.run_layers`).
      attention_init: scheme for the depthwise filters; None keeps `attention_init.default`.
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
        kernel_size: int,
        activation: str = "gelu",
        spatial_filters: str = "trained",
        drop_path: float = 0.0,
        dtype: str = "float32",
        unroll: int = 1,
        remat: str = "none",
        attention_init: AttentionInit | None = None,
        rngs: nnx.Rngs,
    ):
        self.grid = layers.token_grid(image_size, patch_size)
        layers.check_choices(
            activation=activation, spatial_filters=spatial_filters, dtype=dtype, remat=remat
        )
        if kernel_size < 1:
            raise InputError(f"model.kernel_size={kernel_size}: it must be positive, such as 5")
        self.drop_path_rate = drop_path
        self.remat = remat
        self.unroll = unroll
        config = BlockConfig(
            width, kernel_size, activation, spatial_filters == "fixed", jnp.dtype(dtype)
        )
        self.patch_embedding = layers.PatchEmbedding(
            patch_size, channels, width, dtype=config.dtype, rngs=rngs
        )
        self.activation = activation
        self.stem_norm = BatchNorm(width)
        self.blocks = layers.stack_layers(
            lambda rngs: ConvMixerBlock(config, rngs=rngs), depth, rngs
        )
        # The head is float32 whatever the blocks are: logits are what the loss exponentiates.
        self.head = _linear(width, num_classes, dtype=jnp.dtype("float32"), rngs=rngs)
        if attention_init is not None:
            self.initialize_attention(attention_init, rngs.params())

    @property
    def conv_site(self) -> ConvSite:
        """What a scheme may know of this model."""
        depth, kernel_size, _, width = self.blocks.spatial.kernel.shape
        return ConvSite(kernel_size=kernel_size, width=width, num_layers=depth)

    def initialize_attention(self, attention_init: AttentionInit, key: jax.Array) -> None:
        """Puts a scheme's depthwise filters in place; their biases stay as they are."""
        self.blocks.spatial.kernel[...] = attention_init(key, self.conv_site).kernel

    def __call__(
        self, images: Float[Array, "B H W C"], *, key: Key = None, with_maps: bool = False
    ) -> tuple[Float[Array, "B classes"], dict]:
        """Computes logits and, in training, moves the running statistics.

        Args:
          images: normalized images.
          key: draws drop path and marks training; None in evaluation.
          with_maps: refused, since convolutions have no attention maps.

        Returns:
          float32 logits [B, classes] and the intermediates by name: 'stem' [B, rows, cols, D],
          'blocks' (each with a leading layer axis L: 'spatial', 'output' [L, B, rows, cols, D]),
          'pooled' [B, D].
        """
        if with_maps:
            raise InputError("with_maps: model.name='convmixer' has filters, no attention maps")
        training = key is not None
        stem = layers.ACTIVATIONS[self.activation](self.patch_embedding(images))
        stem = self.stem_norm(stem, training=training)
        x, blocks = self._run_blocks(stem, key)
        pooled = x.astype(jnp.float32).mean(axis=(1, 2))
        return self.head(pooled), {"stem": stem, "blocks": blocks, "pooled": pooled}

    def _run_blocks(self, x, key):
        depth = self.conv_site.num_layers
        rates = jnp.linspace(0, self.drop_path_rate, depth)
        keys = None if key is None else jax.random.split(key, depth)

        def body(x, layer):
            block, rate, key = layer
            x, out = block(x, drop_path_rate=rate, key=key)
            # The scan hands each block over as a copy: its new statistics have to come out.
            return x, (out, nnx.state(block, nnx.BatchStat))

        x, (out, statistics) = layers.run_layers(
            body, x, (self.blocks, rates, keys), unroll=self.unroll, remat=self.remat
        )
        if key is not None:
            nnx.update(self.blocks, statistics)
        return x, out


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """What the blocks of a stack have in common.

    Attributes:
      width: D.
      kernel_size: f of the depthwise convolution.
      activation: a name of `layers.ACTIVATIONS`.
      fixed_filters: whether the depthwise filters stay at their start values.
      dtype: type of the computation.
    """

    width: int
    kernel_size: int
    activation: str
    fixed_filters: bool
    dtype: jnp.dtype


class ConvMixerBlock(nnx.Module):
    """x + norm(act(depthwise(x))), then norm(act(pointwise(x)))."""

    def __init__(self, config: BlockConfig, *, rngs: nnx.Rngs):
        self.spatial = DepthwiseConv(config, rngs=rngs)
        self.norm1 = BatchNorm(config.width)
        self.channel = _linear(config.width, config.width, dtype=config.dtype, rngs=rngs)
        self.norm2 = BatchNorm(config.width)
        self.activation = config.activation

    def __call__(
        self, x: Float[Array, "B rows cols D"], *, drop_path_rate: Float[Array, ""], key: Key = None
    ) -> tuple[Float[Array, "B rows cols D"], dict[str, Array]]:
        """Returns the block's output and its intermediates by name."""
        activate, training = layers.ACTIVATIONS[self.activation], key is not None
        mixed = self.norm1(activate(self.spatial(x)), training=training)
        x = x + layers.drop_path(mixed, drop_path_rate, key)
        x = self.norm2(activate(self.channel(x)), training=training)
        return x, {"spatial": mixed, "output": x}


class DepthwiseConv(nnx.Module):
    """One f × f filter for each channel, in PyTorch's 'same' padding, with a bias."""

    def __init__(self, config: BlockConfig, *, rngs: nnx.Rngs):
        shape = (config.kernel_size, config.kernel_size, config.width)
        init = _uniform(1 / config.kernel_size)
        weight = FixedWeight if config.fixed_filters else nnx.Param
        self.kernel = weight(init(rngs.params(), shape))
        self.bias = nnx.Param(init(rngs.params(), shape[-1:]))
        self.dtype = config.dtype

    def __call__(self, x: Float[Array, "B rows cols D"]) -> Float[Array, "B rows cols D"]:
        """Mixes each channel across its neighbours; zeros lie beyond the border."""
        kernel = self.kernel[...].astype(self.dtype)
        mixed = jax.lax.conv_general_dilated(
            x.astype(self.dtype),
            kernel[:, :, None, :],
            window_strides=(1, 1),
            padding="SAME",  # of an even kernel's padding the odd row lies below, as in PyTorch
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=kernel.shape[-1],
        )
        return mixed + self.bias[...].astype(self.dtype)[None, None, None, :]


class BatchNorm(nnx.Module):
    """PyTorch's BatchNorm2d: momentum 0.1, epsilon 1e-5, in float32 whatever goes in.

    Flax's own keeps the biased variance in its running statistics, where PyTorch keeps the unbiased
    one, though both normalize by the biased.
    """

    momentum = 0.1
    epsilon = 1e-5

    def __init__(self, width: int):
        self.scale = nnx.Param(jnp.ones(width))
        self.bias = nnx.Param(jnp.zeros(width))
        self.mean = nnx.BatchStat(jnp.zeros(width))
        self.variance = nnx.BatchStat(jnp.ones(width))

    def __call__(
        self, x: Float[Array, "B rows cols D"], *, training: bool
    ) -> Float[Array, "B rows cols D"]:
        """Normalizes each channel; in training by the batch, whose statistics it takes in."""
        wide = x.astype(jnp.float32)
        mean, variance = self.mean[...], self.variance[...]
        if training:
            old = mean, variance
            mean = wide.mean(axis=(0, 1, 2))
            variance = jnp.square(wide - mean[None, None, None, :]).mean(axis=(0, 1, 2))
            count = wide.size // len(mean)
            unbiased = variance * (count / max(count - 1, 1))
            for statistic, before, now in zip(
                (self.mean, self.variance), old, (mean, unbiased), strict=True
            ):
                now = jax.lax.stop_gradient(now)
                statistic[...] = (1 - self.momentum) * before + self.momentum * now
        scale = self.scale[...] * jax.lax.rsqrt(variance + self.epsilon)
        centred = wide - mean[None, None, None, :]
        normed = centred * scale[None, None, None, :] + self.bias[...][None, None, None, :]
        return normed.astype(x.dtype)


def _linear(inputs: int, outputs: int, *, dtype, rngs: nnx.Rngs) -> nnx.Linear:
    init = _uniform(inputs**-0.5)
    return nnx.Linear(inputs, outputs, kernel_init=init, bias_init=init, dtype=dtype, rngs=rngs)


def _uniform(bound: float):
    """PyTorch's start values of weights and biases, `bound` being fan_in^-1/2."""

    def init(key, shape, dtype=jnp.float32, out_sharding=None):
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init
