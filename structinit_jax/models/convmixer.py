"""ConvMixer (Trockman & Kolter 2022, arXiv:2201.09792) with timm's conventions, in Flax NNX."""

from __future__ import annotations  # so that signatures show the names of checked types

from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from structinit_jax.attention_init import AttentionInit, ConvSite, ConvWeights
from structinit_jax.errors import Fraction, PositiveInt, checked
from structinit_jax.models import layers
from structinit_jax.models.layers import BaseInit, Rng
from structinit_jax.models.model import Dtype, ImageSize, Model, Remat, make_stack, run_stack

_IMAGENET = dict(image_size=224, depth=20, kernel_size=9)


class FixedWeight(nnx.Variable):
    """A weight that is not trained: it has no gradient, weight decay or optimizer state."""


class ConvMixer(Model):
    """Patch embedding, a stack of depthwise and pointwise convolutions, average pooling, head.

    In training (a call with `rng`), activations are normalized with batch statistics (of the global
    batch, under `jit` with a mesh), and the running statistics for evaluation are updated in place.

    >>> sizes = dict(image_size=32, channels=3, num_classes=10, width=16, depth=2)
    >>> model = si.ConvMixer(**sizes, attention_init=si.impulse_2024(), rngs=nnx.Rngs(0))

    Args:
      depth: Number of blocks L.
      kernel_size: Kernel size f of the depthwise convolutions. An even kernel extends farther down
        and to the right.
      spatial_filters: 'trained', or 'fixed' to leave the filters and their biases untrained.
    """

    # The last three are the 2024 paper's CIFAR-10 models (table 4; also with kernel sizes 3 and 8).
    # For width 512, the published code has depth 6; the paper's text says 8.
    VARIANTS: ClassVar = {
        "convmixer_1024_20_ks9_p14": _IMAGENET | dict(patch_size=14, width=1024),
        "convmixer_1536_20": _IMAGENET | dict(patch_size=7, width=1536),
        "convmixer_256_8": dict(width=256, depth=8),
        "convmixer_512_6": dict(width=512, depth=6),
        "convmixer_512_8": dict(width=512, depth=8),
    }

    @checked
    def __init__(
        self,
        *,
        image_size: ImageSize = 32,
        channels: PositiveInt,
        num_classes: PositiveInt = 1000,
        patch_size: PositiveInt = 2,
        width: PositiveInt = 256,
        depth: PositiveInt = 8,
        kernel_size: PositiveInt = 5,
        spatial_filters: Literal["trained", "fixed"] = "trained",
        drop_path: Fraction = 0.0,
        base_init: BaseInit = "timm",
        dtype: Dtype = "float32",
        remat: Remat = "none",
        attention_init: AttentionInit | None = None,
        rngs: nnx.Rngs,
    ):
        del base_init  # timm keeps PyTorch's defaults here.
        layers.token_grid(image_size, patch_size)  # Raises unless patches fill the image.
        self.depth = depth
        self.drop_path = drop_path
        self.remat = remat

        options = dict(dtype=jnp.dtype(dtype), rngs=rngs)
        self.patch_embedding = layers.PatchEmbedding(patch_size, channels, width, **options)
        self.stem_norm = BatchNorm(width)
        self.blocks = make_stack(
            ConvMixerBlock,
            depth,
            width=width,
            kernel_size=kernel_size,
            fixed=spatial_filters == "fixed",
            **options,
        )
        self.head = nnx.Linear(width, num_classes, **layers.pytorch_init(width), rngs=rngs)
        if attention_init is not None:
            self.initialize_attention(attention_init, rngs.params())

    def sites(self) -> dict[str, ConvSite]:
        """See `Model.sites`."""
        num_layers, kernel_size, _, width = self.blocks.spatial.kernel.shape
        return {"blocks": ConvSite(kernel_size, width=width, num_layers=num_layers)}

    def __call__(
        self, images: Float[Array, "B H W C"], *, rng: Rng = None, with_maps: bool = False
    ) -> tuple[Float[Array, "B classes"], dict[str, Any]]:
        """Returns logits and intermediates; in training, updates the running statistics.

        See `Model.__call__`; there are no attention maps. The intermediates are
        'stem' [B, rows, cols, D]; 'blocks' with 'spatial', 'output' [L, B, rows, cols, D];
        'pooled' [B, D].
        """
        stem = layers.gelu(self.patch_embedding(images))
        stem = self.stem_norm(stem, training=rng is not None)
        rates = np.linspace(0, self.drop_path, self.depth, dtype=np.float32).tolist()
        x, blocks = run_stack(self.blocks, stem, remat=self.remat, drop_path_rates=rates, rng=rng)
        pooled = x.astype(jnp.float32).mean(axis=(1, 2))
        return self.head(pooled), dict(stem=stem, blocks=blocks, pooled=pooled)


class ConvMixerBlock(layers.StackedBlock):
    """x + norm1(gelu(spatial(x))), then norm2(gelu(channel(x))): depthwise, then pointwise."""

    def __init__(
        self, *, width: int, kernel_size: int, fixed: bool, dtype: DTypeLike, rngs: nnx.Rngs
    ):
        options = dict(dtype=dtype, rngs=rngs)
        self.spatial = DepthwiseConv(width, kernel_size, fixed=fixed, **options)
        self.norm1 = BatchNorm(width)
        self.channel = nnx.Linear(width, width, **layers.pytorch_init(width), **options)
        self.norm2 = BatchNorm(width)

    def __call__(
        self,
        x: Float[Array, "B rows cols D"],
        *,
        drop_path_rate: Float[Array, ""] | None,
        rng: Rng = None,
    ) -> tuple[Float[Array, "B rows cols D"], dict[str, Array]]:
        """Returns the output and the intermediates."""
        training = rng is not None
        mixed = self.norm1(layers.gelu(self.spatial(x)), training=training)
        x = x + layers.drop_path(mixed, drop_path_rate, rng)
        x = self.norm2(layers.gelu(self.channel(x)), training=training)
        return x, {"spatial": mixed, "output": x}

    def set_weights(self, weights: ConvWeights) -> None:
        """Writes the filters that a scheme returns into a stack of these blocks."""
        layers.set_weight(self.spatial.kernel, "kernel", weights.kernel)


class DepthwiseConv(nnx.Module):
    """A convolution with one f × f filter and bias per channel, zero-padded like PyTorch's 'same'.

    `nnx.Conv` is not used because the kernel [f, f, D] and the bias can be `FixedWeight`s.
    """

    def __init__(self, width: int, kernel_size: int, *, fixed: bool, dtype, rngs: nnx.Rngs):
        init = layers.uniform_init(1 / kernel_size)
        weight = FixedWeight if fixed else nnx.Param
        self.kernel = weight(init(rngs.params(), (kernel_size, kernel_size, width)))
        self.bias = weight(init(rngs.params(), (width,)))
        self.dtype = dtype

    def __call__(self, x: Float[Array, "B rows cols D"]) -> Float[Array, "B rows cols D"]:
        """Convolves each channel with its filter."""
        mixed = convolve_depthwise(x.astype(self.dtype), self.kernel[...].astype(self.dtype))
        return mixed + self.bias[...].astype(self.dtype)[None, None, None, :]


def convolve_depthwise(
    x: Float[Array, "B rows cols D"], kernel: Float[Array, "f f D"]
) -> Float[Array, "B rows cols D"]:
    """Convolves each channel with its filter, zero-padded (for even kernels, more at the end).

    On CPUs, a small ConvMixer trains ten times as fast as with XLA's grouped convolutions.
    """
    return jax.lax.platform_dependent(x, kernel, cpu=_add_shifted, default=_convolve)


def _convolve(x, kernel):
    options = dict(dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=kernel.shape[-1])
    return jax.lax.conv_general_dilated(x, kernel[:, :, None, :], (1, 1), "SAME", **options)


def _add_shifted(x, kernel):
    size = len(kernel)
    rows, cols = x.shape[1:3]
    pad = ((size - 1) // 2, size // 2)
    padded = jnp.pad(x.astype(jnp.float32), ((0, 0), pad, pad, (0, 0)))
    weights = kernel.astype(jnp.float32)[:, :, None, None, None]
    shifted = (
        weights[dy, dx] * padded[:, dy : dy + rows, dx : dx + cols]
        for dy, dx in np.ndindex(size, size)
    )
    return sum(shifted).astype(x.dtype)


class BatchNorm(nnx.Module):
    """PyTorch's BatchNorm2d: momentum 0.1, epsilon 1e-5, computed in float32.

    `nnx.BatchNorm` is not used: it records the biased variance, PyTorch the unbiased one.
    """

    momentum = 0.1
    epsilon = 1e-5

    def __init__(self, width: int):
        self.scale = nnx.Param(jnp.ones(width, jnp.float32))
        self.bias = nnx.Param(jnp.zeros(width, jnp.float32))
        self.mean = nnx.BatchStat(jnp.zeros(width, jnp.float32))
        self.variance = nnx.BatchStat(jnp.ones(width, jnp.float32))

    def __call__(
        self, x: Float[Array, "B rows cols D"], *, training: bool
    ) -> Float[Array, "B rows cols D"]:
        """Normalizes each channel; training uses batch statistics and records them."""
        wide = x.astype(jnp.float32)
        mean = self.mean[...]
        variance = self.variance[...]
        if training:
            mean = wide.mean(axis=(0, 1, 2))
            variance = jnp.square(wide - mean[None, None, None, :]).mean(axis=(0, 1, 2))
            count = wide.size // len(mean)
            self._record(self.mean, mean)
            self._record(self.variance, variance * (count / max(count - 1, 1)))
        scale = self.scale[...] * jax.lax.rsqrt(variance + self.epsilon)
        centered = wide - mean[None, None, None, :]
        normed = centered * scale[None, None, None, :] + self.bias[...][None, None, None, :]
        return normed.astype(x.dtype)

    def _record(self, running, batch):
        batch = jax.lax.stop_gradient(batch)
        running[...] = (1 - self.momentum) * running[...] + self.momentum * batch
