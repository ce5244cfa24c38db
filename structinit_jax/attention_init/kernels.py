"""Convolution kernels, the attention maps that act like them, and their assignment to heads.

The module also has the random draws, sin-cos encoding and LayerNorm that schemes share.
"""

import functools
import math
from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from structinit_jax.attention_init.sites import AttentionSite, TokenMixingSite
from structinit_jax.errors import Check, InputError, PositiveInt, is_count

OddInt = Annotated[int, Check("an odd positive whole number", lambda x: is_count(x) and x % 2 == 1)]
FilterArray = Annotated[
    np.ndarray | jax.Array,
    Check(
        "an array of kernels [F, f, f] of finite numbers",
        lambda x: np.ndim(x) == 3 and np.size(x) > 0 and bool(np.isfinite(x).all()),
    ),
]
Dilation = PositiveInt | tuple[PositiveInt, ...]

# -- kernels ---------------------------------------------------------------------------------------


def kernel_offsets(kernel_size: int) -> Int[np.ndarray, "F 2"]:
    """Returns all offsets (dy, dx) of a kernel, row-major: (-1, -1), (-1, 0), … for size 3."""
    reach = np.arange(kernel_size) - kernel_size // 2
    return np.stack(np.meshgrid(reach, reach, indexing="ij"), axis=-1).reshape(-1, 2)


def impulse_kernels(kernel_size: int, dilation: int = 1) -> Float[np.ndarray, "F g g"]:
    """Returns the f² impulse kernels: kernel k is 1 at the k-th of `kernel_offsets`, else 0.

    Dilation spreads the offsets: kernels are g = (f - 1) · dilation + 1 wide.
    """
    count, wide = kernel_size**2, (kernel_size - 1) * dilation + 1
    kernels = np.zeros((count, wide, wide), np.float32)
    kernels[:, ::dilation, ::dilation] = np.eye(count).reshape(count, kernel_size, kernel_size)
    return kernels


# -- target maps -----------------------------------------------------------------------------------


def relative_index(grid: tuple[int, int]) -> Int[np.ndarray, "N N"]:
    """Returns the row of a relative position bias table for each query i and key j, row-major.

    As in timm, the row is (dy + rows - 1) (2 cols - 1) + dx + cols - 1, where (dy, dx) is the
    position of the query minus that of the key.
    """
    rows, cols = grid
    y, x = np.divmod(np.arange(rows * cols), cols)
    dy, dx = y[:, None] - y[None, :], x[:, None] - x[None, :]
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
    site: AttentionSite | TokenMixingSite,
    kernel_size: int = 3,
    filters: FilterArray | None = None,
    dilation: Dilation = 1,
) -> tuple[Float[np.ndarray, "F R C"], tuple[tuple[int, int], ...]]:
    """Returns the distinct kernels of all layers, and the range (start, stop) that each layer uses.

    The kernels are impulses unless `filters` are given, and have R = 2 rows - 1 by C = 2 cols - 1
    offsets. Raises `InputError` for even sizes, negative values or a wrong number of dilations.
    """
    if filters is not None:
        kernels = np.asarray(filters, np.float32)
        if kernels.shape[1] != kernels.shape[2] or kernels.shape[1] % 2 == 0 or kernels.min() < 0:
            raise InputError(
                f"filters of shape {kernels.shape}: needs kernels [F, f, f] with odd f and no "
                "negative values"
            )
        return crop_kernels(kernels, site.grid), ((0, len(kernels)),) * site.num_layers
    dilations = (dilation,) * site.num_layers if np.ndim(dilation) == 0 else tuple(dilation)
    if len(dilations) != site.num_layers:
        raise InputError(
            f"dilation={dilation!r} has {len(dilations)} values for {site.num_layers} layers: pass "
            "one for each layer, or a single one"
        )
    distinct, count = list(dict.fromkeys(dilations)), kernel_size**2
    kernels = [crop_kernels(impulse_kernels(kernel_size, each), site.grid) for each in distinct]
    starts = [count * distinct.index(each) for each in dilations]
    return np.concatenate(kernels), tuple((start, start + count) for start in starts)


def filter_maps(
    site: AttentionSite | TokenMixingSite,
    kernel_size: int = 3,
    filters: FilterArray | None = None,
    dilation: Dilation = 1,
) -> tuple[Float[np.ndarray, "F N N"], tuple[tuple[int, int], ...]]:
    """Like `filter_kernels`, but returns target maps H instead of kernels.

    Raises `InputError` also if a filter leads off the grid from every token.
    """
    kernels, ranges = filter_kernels(site, kernel_size, filters, dilation)
    maps = normalize_rows(convolution_maps(kernels, site.grid))
    if not maps.any(axis=(1, 2)).all():
        raise InputError(
            f"kernel_size, dilation or filters: on {site.grid} tokens, one filter leads off the "
            "grid from every token: use a smaller kernel or dilation, or more tokens"
        )
    return maps, ranges


def growing_dilation(kernel_size: int, num_layers: int, grid: tuple[int, int]) -> tuple[int, ...]:
    """Returns the default dilation of each layer for attention with positions.

    It is 1 in the first third of the layers. In the others the kernel reaches a seventh of the
    grid's shorter side: 2 tokens for 14×14.
    """
    reach = kernel_size // 2
    later = max(1, min(grid) // (7 * reach)) if reach else 1
    first = max(1, num_layers // 3)
    return (1,) * first + (later,) * (num_layers - first)


# -- which head gets which filter ------------------------------------------------------------------


def assign(rng: PRNGKeyArray, shape: tuple[int, int], num_filters: int) -> Int[Array, "L h"]:
    """Assigns one of F filters to every head; F successive heads get each filter once."""
    layers, heads = shape
    rngs = jax.random.split(rng, -(-layers * heads // num_filters))
    return permutations(rngs, num_filters).reshape(-1)[: layers * heads].reshape(shape)


@functools.partial(jax.jit, static_argnums=(1, 2))  # `lax.map` would be compiled for every call
def assign_by_layer(
    rng: PRNGKeyArray, num_heads: int, ranges: tuple[tuple[int, int], ...]
) -> Int[Array, "L h"]:
    """Like `assign`, but each layer has its own range of filters, as `filter_maps` returns it."""
    filter_index = jnp.zeros((len(ranges), num_heads), jnp.int32)
    for start, stop in dict.fromkeys(ranges):
        layers = np.flatnonzero([available == (start, stop) for available in ranges])
        range_rng = jax.random.fold_in(rng, start)
        drawn = assign(range_rng, (len(layers), num_heads), stop - start)
        filter_index = filter_index.at[layers].set(start + drawn)
    return filter_index


def random_rotations(rng: PRNGKeyArray, shape: tuple[int, ...]) -> Float[Array, "*batch m n"]:
    """Draws matrices with orthonormal columns (m ≥ n), by which heads with equal maps differ."""
    return jnp.linalg.qr(draw_flat(jax.random.normal, rng, shape))[0]


# -- random numbers --------------------------------------------------------------------------------


def draw_flat(
    draw: Callable[[PRNGKeyArray, tuple[int]], Array], rng: PRNGKeyArray, shape: tuple[int, ...]
) -> Array:
    """Returns the same values as `draw(rng, shape)`, but draws along a single axis.

    On CPUs, XLA unrolls loops over short axes together with the many rounds of the random
    generator, and takes up to 20 times as long to compile a draw over several axes.
    """
    return draw(rng, (math.prod(shape),)).reshape(shape)


def permutations(rngs: Array, size: int) -> Int[Array, "n size"]:
    """Returns a permutation of 0 … size - 1 for each key (not by vmap, which compiles slower)."""
    return jax.lax.map(lambda rng: jax.random.permutation(rng, size), rngs)


def trunc_normal(
    rng: PRNGKeyArray, shape: tuple[int, ...], dtype: DTypeLike = float, *, std: float
) -> Array:
    """Draws as timm's `trunc_normal_(std=std)`, which cuts at ±2, not at ±2 standard deviations."""
    return std * jax.random.truncated_normal(rng, -2 / std, 2 / std, shape, dtype)


def near_identity(
    rng: PRNGKeyArray, shape: tuple[int, ...], *, noise: float, identity: float
) -> Float[Array, "*batch D D"]:
    """Draws matrices noise · U + identity · I of shape [*shape, D], where D = shape[-1].

    U is uniform between ±(3 / D)^1/2, so that its entries have variance 1 / D.
    """
    width = shape[-1]
    bound = (3 / width) ** 0.5
    draw = functools.partial(jax.random.uniform, minval=-bound, maxval=bound)
    uniform = draw_flat(draw, rng, (*shape, width))
    eye = jnp.broadcast_to(jnp.eye(width), uniform.shape)
    return noise * uniform + identity * eye


# -- tokens ----------------------------------------------------------------------------------------


def sincos_positions(
    grid: tuple[int, int], width: int, convention: str = "timm"
) -> Float[np.ndarray, "N D"]:
    """Returns the 2-D sine-cosine encoding of a grid (rows, cols), tokens in row-major order.

    'timm' is timm's `build_sincos2d_pos_embed`, which the 2024 paper uses: channels sin y, sin x,
    cos y, cos x and frequencies 10,000^(-4 i / D), i = 0 … D/4 - 1. 'big_vision' has channels
    sin x, cos x, sin y, cos y and frequencies 10,000^(-i / (D/4 - 1)). Raises `InputError` unless
    the width D is a multiple of 4 and at least 8.
    """
    if width % 4 or width < 8:
        raise InputError(
            f"width={width}: sin-cos positions need a width of at least 8 that is divisible by 4: "
            "change the width, or use learned positions and a scheme that keeps them, such as "
            "'default' or mimetic(replace_positions=False)"
        )
    if convention not in ("timm", "big_vision"):
        raise InputError(f"convention={convention!r}: choose 'timm' or 'big_vision'")
    quarter = width // 4
    steps = quarter if convention == "timm" else quarter - 1
    frequencies = 10_000.0 ** -(np.arange(quarter) / steps)
    y, x = np.meshgrid(*map(np.arange, grid), indexing="ij")
    y, x = (axis.reshape(-1, 1) * frequencies for axis in (y, x))
    if convention == "timm":
        channels = [np.sin(y), np.sin(x), np.cos(y), np.cos(x)]
    else:
        channels = [np.sin(x), np.cos(x), np.sin(y), np.cos(y)]
    return np.concatenate(channels, axis=1).astype(np.float32)


def layer_norm(x: Float[Array | np.ndarray, "N D"], epsilon: float = 1e-6):
    """Applies LayerNorm without scale and bias: in float64 for a NumPy array, else in float32."""
    xp, dtype = (np, np.float64) if isinstance(x, np.ndarray) else (jnp, jnp.float32)
    x = x.astype(dtype)
    x = x - x.mean(axis=1, keepdims=True)
    return x / xp.sqrt((x * x).mean(axis=1, keepdims=True) + epsilon)
