"""Convolution kernels, the attention maps that act like them, and which head gets which."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from structinit_jax.errors import InputError


def check_kernel_size(kernel_size: int, grid: tuple[int, int] | None = None) -> None:
    """Raises `InputError` unless the kernel size is odd, positive and fits the grid."""
    if kernel_size < 1 or kernel_size % 2 == 0:
        raise InputError(
            f"attention_init.kernel_size={kernel_size}: an attention map has a centre, so the "
            "kernel size must be odd and positive, such as 3 or 5"
        )
    if grid is not None and kernel_size > min(grid):
        raise InputError(
            f"attention_init.kernel_size={kernel_size} is larger than the token grid "
            f"{grid[0]}x{grid[1]}: use a smaller kernel or a smaller model.patch_size"
        )


def kernel_offsets(kernel_size: int) -> Int[np.ndarray, "F 2"]:
    """All offsets (dy, dx) of a kernel, row-major: (-1, -1), (-1, 0), … for size 3."""
    reach = np.arange(kernel_size) - kernel_size // 2
    return np.stack(np.meshgrid(reach, reach, indexing="ij"), axis=-1).reshape(-1, 2)


def impulse_kernels(kernel_size: int, dilation: int = 1) -> Float[np.ndarray, "F g g"]:
    """The f² impulse kernels: kernel k is 1 at the k-th of `kernel_offsets`, else 0.

    A dilation moves the offsets apart: kernels are then g = (f - 1) · dilation + 1 wide.
    """
    f = kernel_size
    kernels = np.eye(f * f, dtype=np.float32).reshape(f * f, f, f)
    wide = np.zeros((f * f,) + ((f - 1) * dilation + 1,) * 2, np.float32)
    wide[:, ::dilation, ::dilation] = kernels
    return wide


def smooth_kernels(
    kernel_size: int, sigma: float, *, surround: float | None = None
) -> Float[np.ndarray, "F g g"]:
    """Gaussians of deviation `sigma` centred at each of the f² offsets, of sum 1.

    With `surround`, the positive part of the difference of two Gaussians of deviations `sigma` and
    `surround`: a narrower bump, since attention cannot be negative. Kernels reach 2 sigma beyond
    the outermost offsets.
    """
    reach = kernel_size // 2 + int(np.ceil(2 * sigma))
    y, x = np.meshgrid(*(np.arange(-reach, reach + 1),) * 2, indexing="ij")

    def bump(dy, dx, deviation):
        squared = (y - dy) ** 2 + (x - dx) ** 2
        return np.exp(-squared / (2 * deviation**2)) / deviation**2

    kernels = [bump(dy, dx, sigma) for dy, dx in kernel_offsets(kernel_size)]
    if surround is not None:
        wide = [bump(dy, dx, surround) for dy, dx in kernel_offsets(kernel_size)]
        kernels = [np.maximum(a - b, 0) for a, b in zip(kernels, wide, strict=True)]
    return np.stack([k / k.sum() for k in kernels]).astype(np.float32)


def box_kernels(kernel_size: int) -> Float[np.ndarray, "1 f f"]:
    """The mean over the kernel: one filter, which spans one dimension only (corollary 3)."""
    return np.full((1, kernel_size, kernel_size), kernel_size**-2, np.float32)


def convolution_maps(
    kernels: Float[np.ndarray, "F f f"], grid: tuple[int, int]
) -> Float[np.ndarray, "F N N"]:
    """Target maps H: H[i, j] is the kernel's value at the offset from token i to token j.

    Neighbours that fall off the grid are left out (zero padding): the row of an impulse whose
    neighbour is missing is all zero, and its best softmax row is uniform.
    """
    reach = kernels.shape[-1] // 2
    tokens = np.stack(np.meshgrid(*map(np.arange, grid), indexing="ij"), axis=-1).reshape(-1, 2)
    offset = tokens[None, :] - tokens[:, None]
    inside = np.all(np.abs(offset) <= reach, axis=-1)
    dy, dx = np.moveaxis(np.clip(offset + reach, 0, 2 * reach), -1, 0)
    return np.where(inside, kernels[:, dy, dx], 0).astype(np.float32)


def centre_first(num_filters: int) -> Int[np.ndarray, " F"]:
    """Kernel indices from the centre outwards; for 3×3 the order of the 2025 paper's program."""
    if num_filters == 9:
        return np.array([4, 1, 5, 3, 7, 0, 2, 6, 8])
    size = round(num_filters**0.5)
    if size**2 != num_filters:  # not the offsets of a square kernel: their own order
        return np.arange(num_filters)
    return np.argsort(np.sum(kernel_offsets(size) ** 2, axis=1), kind="stable")


def assign_filters(
    key: PRNGKeyArray, shape: tuple[int, int], num_filters: int, *, order: str
) -> Int[Array, "L h"]:
    """The filter of every head.

    Args:
      key: draws them.
      shape: (layers, heads).
      num_filters: F.
      order: 'even' covers all filters as evenly as there are heads in all layers, without repeats
        in a run of F heads; 'random' draws each independently (2024); 'centre_first' walks from the
        centre outwards by head number, alike in every layer (2025).
    """
    layers, heads = shape
    if order == "random":
        return jax.random.randint(key, shape, 0, num_filters)
    if order == "centre_first":
        filters = centre_first(num_filters)[np.arange(heads) % num_filters]
        return jnp.broadcast_to(jnp.asarray(filters, jnp.int32)[None], shape)
    rounds = -(-layers * heads // num_filters)
    permutations = jax.vmap(lambda k: jax.random.permutation(k, num_filters))(
        jax.random.split(key, rounds)
    )
    return permutations.reshape(-1)[: layers * heads].reshape(shape)


def assign_layers(
    key: PRNGKeyArray,
    ranges: tuple[tuple[int, int], ...],
    num_heads: int,
    *,
    order: str,
    same_layers: bool,
) -> Int[Array, "L h"]:
    """Each head's filter, from its layer's (start, stop) in a bank of filters.

    Layers with the same filters to choose from are dealt with together, by `assign_filters`.
    """
    chosen = jnp.zeros((len(ranges), num_heads), jnp.int32)
    for start, stop in dict.fromkeys(ranges):
        layers = np.array([i for i, pair in enumerate(ranges) if pair == (start, stop)])
        dealt = assign_filters(
            jax.random.fold_in(key, start),
            (1 if same_layers else len(layers), num_heads),
            stop - start,
            order=order,
        )
        dealt = jnp.broadcast_to(start + dealt, (len(layers), num_heads))
        chosen = chosen.at[layers].set(dealt.astype(jnp.int32))
    return chosen


def bank_ranges(
    banks: Sequence[np.ndarray], bank_of_layer: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Each layer's (start, stop) in the concatenated banks."""
    stops = np.cumsum([len(bank) for bank in banks]).tolist()
    return tuple((stops[i] - len(banks[i]), stops[i]) for i in bank_of_layer)


def per_layer(field: str, value: int | Sequence[int], num_layers: int) -> tuple[int, ...]:
    """One value for each layer, from one for all or a sequence of that length."""
    values = (value,) * num_layers if np.ndim(value) == 0 else tuple(value)
    if len(values) != num_layers:
        raise InputError(
            f"attention_init.{field}={value!r} has {len(values)} values for {num_layers} layers: "
            "give one for each layer, or a single one for all"
        )
    return values
