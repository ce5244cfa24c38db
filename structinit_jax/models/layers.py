"""Layers shared by the model families, with timm's conventions.

The conventions are an exact (erf) GELU and a LayerNorm with epsilon 1e-6. `dtype` is the type of
the computation; parameters are float32 and drawn from the `params` stream of `rngs`.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PRNGKeyArray

from structinit_jax.attention_init import draws
from structinit_jax.attention_init.sites import check_shape
from structinit_jax.errors import InputError, require

Rng = PRNGKeyArray | None
RESIDUAL = "residual"  # the `jax.checkpoint` name of what `keep` marks


def keep(x: Array) -> Array:
    """Marks an array that a training step saves for the gradient, as it does matrix products."""
    return checkpoint_name(x, RESIDUAL)


def gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Computes the exact GELU, x Φ(x), in float32.

    `jax.nn.gelu` uses erfc, which makes a training step of ViT-T/16 take 4 % longer on CPUs.
    """
    wide = x.astype(jnp.float32)
    return (wide * (0.5 + 0.5 * jax.lax.erf(wide * 0.5**0.5))).astype(x.dtype)


# The initializer of timm's ViT and Swin.
truncated_normal = functools.partial(draws.trunc_normal, std=0.02)


def uniform_init(bound: float) -> nnx.Initializer:
    """Returns PyTorch's default initializer for weights and biases; `bound` is fan_in^-1/2."""
    return functools.partial(draws.uniform, bound=bound)


def pytorch_init(fan_in: int) -> dict[str, nnx.Initializer]:
    """Returns PyTorch's default `kernel_init` and `bias_init` of a Linear or Conv2d layer."""
    init = uniform_init(fan_in**-0.5)
    return dict(kernel_init=init, bias_init=init)


def timm_init(fan_in: int) -> dict[str, nnx.Initializer]:
    """Returns the `kernel_init` and `bias_init` of linear layers in timm's ViT and Swin."""
    del fan_in
    return dict(kernel_init=truncated_normal, bias_init=nnx.initializers.zeros)


BaseInit = Literal["timm", "pytorch"]
LinearInit = Callable[[int], dict[str, nnx.Initializer]]
BASE_INITS: dict[BaseInit, LinearInit] = {"timm": timm_init, "pytorch": pytorch_init}


def drop_path(x: Float[Array, "B *rest"], rate: Float[Array, ""] | None, rng: Rng) -> Array:
    """Drops the residual branch of random examples (stochastic depth, Huang et al. 2016).

    Without a rate or a random key, nothing is dropped.
    """
    if rate is None or rng is None:
        return x
    mask_shape = (x.shape[0],) + (1,) * (x.ndim - 1)
    mask = keep(jax.random.bernoulli(rng, 1 - rate, mask_shape))
    return jnp.where(mask, x / (1 - rate), 0).astype(x.dtype)


def set_weight(variable: nnx.Variable, field: str, value: Array | np.ndarray | None) -> None:
    """Sets a variable to a scheme's weight, unless the weight is None.

    Raises `InputError` if the shapes differ; assignment alone would broadcast.
    """
    if value is not None:
        check_shape(field, value, variable.shape)
        variable[...] = jnp.asarray(value, variable.dtype)


def layer_norm(width: int, *, dtype, rngs: nnx.Rngs, epsilon: float = 1e-6) -> nnx.LayerNorm:
    """Returns a LayerNorm without Flax's fast variance, which loses precision in float32."""
    return nnx.LayerNorm(width, epsilon=epsilon, dtype=dtype, use_fast_variance=False, rngs=rngs)


def dot_general(x: Array, kernel: Array, dimension_numbers, **options) -> Array:
    """Replaces `jax.lax.dot_general` in Flax's linear layers, as their `dot_general` argument.

    On CPUs, the kernel's gradient is a product of two matrices. In JAX's own gradient, which sums
    over examples and tokens, XLA transposes an operand first and takes 1.1 to 4.6 times as long.
    `jax.jvp` can differentiate the gradient, but not the function itself.
    """
    product = functools.partial(jax.lax.dot_general, dimension_numbers=dimension_numbers, **options)
    if jax.typeof(x).sharding.mesh.explicit_axes:  # JAX cannot infer how rows are sharded
        return product(x, kernel)
    num_axes = len(dimension_numbers[0][0])
    num_inputs = math.prod(kernel.shape[:num_axes])

    def product_of_matrices(x, kernel):
        y = x.reshape(-1, num_inputs) @ kernel.reshape(num_inputs, -1)
        return y.reshape(*x.shape[: x.ndim - num_axes], *kernel.shape[num_axes:])

    def kernel_gradient(product, x, kernel, gradient):
        return jax.linear_transpose(functools.partial(product, x), kernel)(gradient)[0]

    def backward(operands, gradient):
        x, kernel = operands
        (x_gradient,) = jax.linear_transpose(lambda x: product(x, kernel), x)(gradient)
        return x_gradient, jax.lax.platform_dependent(
            *operands,
            gradient,
            cpu=functools.partial(kernel_gradient, product_of_matrices),
            default=functools.partial(kernel_gradient, product),
        )

    product_with_gradient = jax.custom_vjp(product)
    product_with_gradient.defvjp(lambda *operands: (product(*operands), operands), backward)
    return product_with_gradient(x, kernel)


def image_sides(image_size: int | Sequence[int]) -> tuple[int, int]:
    """Returns an image size as (height, width); a single number means both."""
    sides = (image_size,) * 2 if np.ndim(image_size) == 0 else tuple(image_size)
    require("image_size", image_size, "one number, or (height, width)", len(sides) == 2)
    return sides


def token_grid(image_size: int | Sequence[int], patch_size: int) -> tuple[int, int]:
    """Returns (rows, cols) of the patch grid; raises `InputError` if it does not fill the image."""
    sides = image_sides(image_size)
    needs = f"a multiple of patch_size={patch_size}"
    require("image_size", image_size, needs, not any(side % patch_size for side in sides))
    return sides[0] // patch_size, sides[1] // patch_size


class PatchEmbedding(nnx.Module):
    """Maps each p × p patch to a token, like a convolution of size and stride p.

    It uses a matrix product, not `nnx.Conv`: the product's gradient is deterministic on GPUs,
    whereas cuDNN's need not be. Its initial values are those of PyTorch's Conv2d, as in timm.
    """

    def __init__(self, patch_size: int, channels: int, width: int, *, dtype, rngs: nnx.Rngs):
        shape = (patch_size, patch_size, channels, width)
        init = uniform_init(math.prod(shape[:-1]) ** -0.5)
        self.kernel = nnx.Param(init(rngs.params(), shape))
        self.bias = nnx.Param(init(rngs.params(), (width,)))
        self.dtype = dtype

    def __call__(
        self, images: Float[Array, "B H W C"], grid: tuple[int, int] | None = None
    ) -> Float[Array, "B rows cols D"]:
        """Returns one token per patch.

        Raises `InputError` for integer images, a wrong number of channels, sides that are not
        multiples of p or, if `grid` is given, another grid.
        """
        p, _, channels, _ = self.kernel.shape
        if grid:
            sides = grid[0] * p, grid[1] * p
            needs = f"(B, {sides[0]}, {sides[1]}, {channels})"
        else:
            sides = images.shape[1:3]
            needs = f"(B, H, W, {channels}), with H and W multiples of {p}"
        # Otherwise the product would broadcast a kernel with a single channel, and positions would
        # fit any grid with the same number of tokens. Integers are pixels before normalization.
        fits = images.shape[1:] == (*sides, channels) and not any(side % p for side in sides)
        if not fits or not jnp.issubdtype(images.dtype, jnp.floating):
            raise InputError(
                f"images have type {images.dtype} and shape {images.shape}, but the model needs "
                f"normalized floating-point images of shape {needs}"
            )
        rows, cols = (side // p for side in sides)
        # A batch that is sharded over an explicit mesh needs two reshapes instead of one.
        batch = images.shape[0]
        patches = images.reshape(batch, rows, p, cols * p, channels)
        patches = patches.reshape(batch, rows, p, cols, p, channels)
        kernel = self.kernel[...].astype(self.dtype)
        bias = self.bias[...].astype(self.dtype)
        tokens = jnp.einsum("brpcqi,pqid->brcd", patches.astype(self.dtype), kernel)
        return tokens + bias[None, None, None, :]


class Mlp(nnx.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, width: int, hidden: int, *, init: LinearInit, dtype, rngs: nnx.Rngs):
        needs = "1 or more: raise the ratio that sets it"
        require("hidden units of an MLP", hidden, needs, hidden > 0)
        options = dict(dtype=dtype, rngs=rngs, dot_general=dot_general)
        self.fc1 = nnx.Linear(width, hidden, **init(width), **options)
        self.fc2 = nnx.Linear(hidden, width, **init(hidden), **options)

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Applies both layers."""
        return self.fc2(gelu(keep(self.fc1(x))))


class StackedBlock(nnx.Module):
    """Base class of blocks to be stacked by `model.make_stack`, which sets `is_stack`.

    A trainer can set two functions for a stack that runs on several devices. `model.run_stack`
    calls `gather` with each block and runs the block that it returns. `on_shards` returns a
    function of an array [B, ...] that is applied to each device's part of the batch.
    """

    is_stack: bool = False
    gather: Callable[[nnx.Module], nnx.Module] | None = None
    on_shards: Callable[[Callable[[Array], Array]], Callable[[Array], Array]] | None = None
