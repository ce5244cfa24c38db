"""Windows of a token grid, as in Swin (Liu et al. 2021, arXiv:2103.14030, section 3.2)."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

Sides = tuple[int, int]
MASKED = (
    -100.0
)  # added to logits between tokens that only a cyclic shift made neighbors, as in timm


def window_and_shift(grid: Sides, window_size: int) -> tuple[Sides, Sides]:
    """Returns the sides of the windows on a grid and their shift.

    Along a side of the grid no longer than `window_size` there is one window and no shift.
    """
    window = tuple(min(side, window_size) for side in grid)
    shift = tuple(window_size // 2 if side > window_size else 0 for side in grid)
    return window, shift


def partition(x: Float[Array, "B rows cols D"], window: Sides) -> Float[Array, "BW n D"]:
    """Splits a grid, zero-padded at its ends, into windows of n tokens."""
    batch, rows, cols, width = x.shape
    down, right = (-side % size for side, size in zip((rows, cols), window, strict=True))
    x = jnp.pad(x, ((0, 0), (0, down), (0, right), (0, 0)))
    (r, c), (rows, cols) = window, (rows + down, cols + right)
    x = x.reshape(batch, rows // r, r, cols // c, c, width)
    return x.swapaxes(2, 3).reshape(-1, r * c, width)


def unpartition(
    windows: Float[Array, "BW n D"], window: Sides, grid: Sides
) -> Float[Array, "B rows cols D"]:
    """Inverts `partition` and removes the padding."""
    (r, c), width = window, windows.shape[-1]
    down, across = (-(-side // size) for side, size in zip(grid, window, strict=True))
    x = windows.reshape(-1, down, across, r, c, width).swapaxes(2, 3)
    return x.reshape(-1, down * r, across * c, width)[:, : grid[0], : grid[1]]


def shift_mask(grid: Sides, window: Sides, shift: Sides) -> Float[np.ndarray, "W n n"]:
    """Returns what to add to the logits of each window of a shifted grid.

    The last windows hold tokens from both ends of the grid, which must not attend to each other:
    `MASKED` for such pairs, 0 for all others. As in timm, ends are those of the padded grid.
    """
    regions = []
    for side, size, move in zip(grid, window, shift, strict=True):
        place = np.arange(side + -side % size)
        end = len(place)
        last, wrapped = place >= end - size, place >= end - move
        regions.append(last.astype(int) + wrapped if move else np.zeros(end, int))
    labels = 3 * regions[0][:, None] + regions[1][None, :]
    r, c = window
    labels = labels.reshape(len(labels) // r, r, -1, c).swapaxes(1, 2).reshape(-1, r * c)
    apart = labels[:, :, None] != labels[:, None, :]
    return np.where(apart, np.float32(MASKED), np.float32(0))
