"""Convolution filters, the attention maps that act like them, and their assignment to heads."""

import functools
from typing import Annotated

import jax
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from structinit_jax.attention_init.draws import permutations
from structinit_jax.errors import Check, is_count, require

OddInt = Annotated[int, Check("an odd positive integer", lambda x: is_count(x) and x % 2 == 1)]
FilterArray = Annotated[
    np.ndarray | jax.Array,
    Check("an array of filters [F, f, f]", lambda x: np.ndim(x) == 3 and np.size(x) > 0),
]


def place_filters(
    grid: tuple[int, int],
    kernel_size: int = 3,
    filters: FilterArray | None = None,
    dilation: int = 1,
) -> Float[np.ndarray, "F R C"]:
    """Returns the distinct filters of a stack, by default impulses, by offset between tokens.

    R = 2 rows - 1 and C = 2 cols - 1, with offset 0 in the center. Neighboring taps are `dilation`
    apart. Taps that are off the grid for every token are left out. On a single row or column of
    tokens, all impulses are along it. Raises `InputError` for filters of even size, or with values
    that are negative, not finite, or all zero.
    """
    if filters is None:
        height, width = (1 if side == 1 else kernel_size for side in grid)
        filters = impulse_filters(height, width)
    else:
        filters = np.asarray(filters, np.float32)
        _, height, width = filters.shape
        needs = "filters [F, f, f] with odd f and finite values, none negative, not all zero"
        has_values = np.isfinite(filters).all() and filters.min() >= 0 and filters.any((1, 2)).all()
        require("filters", filters, needs, height == width and height % 2 == 1 and has_values)
    rows, cols = grid
    dy, dx = (dilation * (np.arange(size) - size // 2) for size in (height, width))
    y = np.flatnonzero(np.abs(dy) < rows)
    x = np.flatnonzero(np.abs(dx) < cols)
    placed = np.zeros((len(filters), 2 * rows - 1, 2 * cols - 1), np.float32)
    placed[:, rows - 1 + dy[y, None], cols - 1 + dx[x]] = filters[:, y[:, None], x]
    return placed


def impulse_filters(height: int, width: int) -> Float[np.ndarray, "F f g"]:
    """Returns filters that are 1 in one place and 0 elsewhere, in row-major order of that place."""
    count = height * width
    return np.eye(count, dtype=np.float32).reshape(count, height, width)


def target_maps(
    grid: tuple[int, int],
    kernel_size: int = 3,
    filters: FilterArray | None = None,
    dilation: int = 1,
) -> Float[np.ndarray, "F N N"]:
    """Returns the target map H of each filter in `place_filters`; see `filter_maps`."""
    return filter_maps(place_filters(grid, kernel_size, filters, dilation), grid)


def filter_maps(
    filters: Float[np.ndarray, "F R C"], grid: tuple[int, int]
) -> Float[np.ndarray, "F N N"]:
    """Returns the target maps H of placed filters on a grid.

    H[i, j] is proportional to the filter's value at the offset from token i to token j, and rows
    sum to 1, like those of a softmax. Neighbors off the grid are dropped (zero padding). The row of
    an impulse whose neighbor is dropped is zero, and the softmax row closest to it is uniform.
    Raises `InputError` for filters that are off the grid for every token.
    """
    needs = "larger, or kernel_size or dilation smaller: a filter is off the grid for every token"
    require("grid", grid, needs, filters.any(axis=(1, 2)).all())
    maps = np.take(filters.reshape(len(filters), -1), relative_index(grid).T, axis=1)
    total = maps.sum(axis=-1, keepdims=True)
    maps /= np.where(total > 0, total, 1)
    return maps


def relative_index(grid: tuple[int, int]) -> Int[np.ndarray, "N N"]:
    """Returns the row of a relative position bias table for each query i and key j.

    As in timm, the row is (dy + rows - 1) (2 cols - 1) + dx + cols - 1, where (dy, dx) is the
    position of the query minus that of the key. Tokens are in row-major order.
    """
    rows, cols = grid
    y, x = np.divmod(np.arange(rows * cols), cols)
    dy = y[:, None] - y[None, :]
    dx = x[:, None] - x[None, :]
    return (dy + rows - 1) * (2 * cols - 1) + dx + cols - 1


@functools.partial(jax.jit, static_argnums=(1, 2))  # `lax.map` would recompile on every call
def assign(rng: PRNGKeyArray, shape: tuple[int, int], num_filters: int) -> Int[Array, "L h"]:
    """Assigns one of F filters to every head; every F consecutive heads get each filter once."""
    layers, heads = shape
    rngs = jax.random.split(rng, -(-layers * heads // num_filters))
    return permutations(rngs, num_filters).reshape(-1)[: layers * heads].reshape(shape)
