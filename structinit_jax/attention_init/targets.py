"""Convolution kernels, the attention maps that act like them, and their assignment to heads."""

import functools
from typing import Annotated

import jax
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from structinit_jax.attention_init.draws import permutations
from structinit_jax.checks import Check, is_count
from structinit_jax.errors import InputError

OddInt = Annotated[int, Check("an odd positive whole number", lambda x: is_count(x) and x % 2 == 1)]
OpenFraction = Annotated[int | float, Check("a number between 0 and 1", lambda x: 0 < x < 1)]
FilterArray = Annotated[
    np.ndarray | jax.Array,
    Check(
        "an array of kernels [F, f, f] of numbers from -1e7 to 1e7",
        lambda x: np.ndim(x) == 3 and np.size(x) > 0 and np.abs(x).max() <= 1e7,
    ),
]

# -- kernels ---------------------------------------------------------------------------------------


def kernel_offsets(kernel_size: int) -> Int[np.ndarray, "F 2"]:
    """Returns all offsets (dy, dx) of a kernel, row-major: (-1, -1), (-1, 0), … for size 3."""
    reach = np.arange(kernel_size) - kernel_size // 2
    return np.stack(np.meshgrid(reach, reach, indexing="ij"), axis=-1).reshape(-1, 2)


def impulse_kernels(kernel_size: int) -> Float[np.ndarray, "F f f"]:
    """Returns the f² impulse kernels: kernel k is 1 at the k-th of `kernel_offsets`, else 0."""
    count = kernel_size**2
    return np.eye(count, dtype=np.float32).reshape(count, kernel_size, kernel_size)


def dilate(kernels: Float[np.ndarray, "F f f"], dilation: int) -> Float[np.ndarray, "F g g"]:
    """Spreads the taps of kernels, which become g = (f - 1) · dilation + 1 wide."""
    count, size, _ = kernels.shape
    wide = (size - 1) * dilation + 1
    dilated = np.zeros((count, wide, wide), kernels.dtype)
    dilated[:, ::dilation, ::dilation] = kernels
    return dilated


# -- target maps -----------------------------------------------------------------------------------


def relative_index(grid: tuple[int, int]) -> Int[np.ndarray, "N N"]:
    """Returns the row of a relative position bias table for each query i and key j, row-major.

    As in timm, the row is (dy + rows - 1) (2 cols - 1) + dx + cols - 1, where (dy, dx) is the
    position of the query minus that of the key.
    """
    rows, cols = grid
    y, x = np.divmod(np.arange(rows * cols), cols)
    dy = y[:, None] - y[None, :]
    dx = x[:, None] - x[None, :]
    return (dy + rows - 1) * (2 * cols - 1) + dx + cols - 1


def crop_kernels(
    kernels: Float[np.ndarray, "F g w"], grid: tuple[int, int]
) -> Float[np.ndarray, "F R C"]:
    """Crops or pads kernels to the offsets on a grid: R = 2 rows - 1, C = 2 cols - 1."""
    cropped = np.zeros((len(kernels), 2 * grid[0] - 1, 2 * grid[1] - 1), kernels.dtype)
    center = [size // 2 for size in kernels.shape[1:]]
    y, x = (min(half, side - 1) for half, side in zip(center, grid, strict=True))
    inside = (slice(grid[0] - 1 - y, grid[0] + y), slice(grid[1] - 1 - x, grid[1] + x))
    source = (slice(center[0] - y, center[0] + y + 1), slice(center[1] - x, center[1] + x + 1))
    cropped[:, *inside] = kernels[:, *source]
    return cropped


def convolution_maps(
    kernels: Float[np.ndarray, "F g w"], grid: tuple[int, int]
) -> Float[np.ndarray, "F N N"]:
    """Returns target maps H: H[i, j] is the kernel's value at the offset from token i to token j.

    Neighbors off the grid are dropped (zero padding). The row of an impulse whose neighbor is
    dropped is zero, and the softmax row closest to it is uniform.
    """
    kernels = crop_kernels(kernels, grid).reshape(len(kernels), -1)
    return kernels[:, relative_index(grid).T].astype(np.float32)


def normalize_rows(maps: Float[np.ndarray, "F N N"]) -> Float[np.ndarray, "F N N"]:
    """Scales rows to sum 1, like those of a softmax; all-zero rows stay zero."""
    total = maps.sum(axis=-1, keepdims=True)
    return (maps / np.where(total > 0, total, 1)).astype(np.float32)


def filter_kernels(
    grid: tuple[int, int], kernel_size: int, filters: FilterArray | None, dilation: int
) -> Float[np.ndarray, "F R C"]:
    """Returns the distinct kernels of a stack, cropped to R = 2 rows - 1 by C = 2 cols - 1 offsets.

    They are impulses unless `filters` are given. Raises `InputError` for filters of even size or
    with negative values.
    """
    if filters is None:
        kernels = impulse_kernels(kernel_size)
    else:
        kernels = np.asarray(filters, np.float32)
        if kernels.shape[1] != kernels.shape[2] or kernels.shape[1] % 2 == 0 or kernels.min() < 0:
            raise InputError(
                f"filters of shape {kernels.shape}: needs kernels [F, f, f] with odd f and no "
                "negative values"
            )
    return crop_kernels(dilate(kernels, dilation), grid)


def filter_maps(
    grid: tuple[int, int],
    kernel_size: int = 3,
    filters: FilterArray | None = None,
    dilation: int = 1,
) -> Float[np.ndarray, "F N N"]:
    """Returns the target map H of each of `filter_kernels`, with rows of sum 1 or 0.

    On a single row or column of tokens, the impulses are those along it. Raises `InputError` also
    if a filter leads off the grid from every token.
    """
    kernels = filter_kernels(grid, kernel_size, filters, dilation)
    if filters is None:
        across = kernel_offsets(kernel_size)[:, np.equal(grid, 1)]
        kernels = kernels[(across == 0).all(axis=1)]
    maps = normalize_rows(convolution_maps(kernels, grid))
    if not maps.any(axis=(1, 2)).all():
        raise InputError(
            f"kernel_size, dilation or filters: on {grid} tokens, one filter leads off the grid "
            "from every token: use a smaller kernel or dilation, or more tokens"
        )
    return maps


# -- which head gets which filter ------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=(1, 2))  # `lax.map` would be compiled for every call
def assign(rng: PRNGKeyArray, shape: tuple[int, int], num_filters: int) -> Int[Array, "L h"]:
    """Assigns one of F filters to every head; F successive heads get each filter once."""
    layers, heads = shape
    rngs = jax.random.split(rng, -(-layers * heads // num_filters))
    return permutations(rngs, num_filters).reshape(-1)[: layers * heads].reshape(shape)
