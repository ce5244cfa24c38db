"""Splits a grid into windows, as in Swin, spreads position biases and masks shifted windows."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

Sides = tuple[int, int]
MASKED = -100.0  # added to logits between tokens that are neighbors only by a shift, as in timm


def partition(x: Float[Array, "B rows cols D"], window: Sides) -> Float[Array, "BW n D"]:
    """Splits a grid, zero-padded at its ends, into windows of n tokens."""
    batch, rows, cols, width = x.shape
    r, c = window
    down, across = -(-rows // r), -(-cols // c)
    x = jnp.pad(x, ((0, 0), (0, down * r - rows), (0, across * c - cols), (0, 0)))
    return x.reshape(batch, down, r, across, c, width).swapaxes(2, 3).reshape(-1, r * c, width)


def unpartition(
    windows: Float[Array, "BW n D"], window: Sides, grid: Sides
) -> Float[Array, "B rows cols D"]:
    """Inverts `partition` and removes the padding."""
    (rows, cols), (r, c), width = grid, window, windows.shape[-1]
    down, across = -(-rows // r), -(-cols // c)
    x = windows.reshape(-1, down, across, r, c, width).swapaxes(2, 3)
    return x.reshape(-1, down * r, across * c, width)[:, :rows, :cols]


def shift_mask(grid: Sides, window: Sides, shift: Sides) -> Float[np.ndarray, "W n n"]:
    """Returns what to add to the logits of each window of a shifted grid.

    The last windows hold tokens from both ends of the grid, which must not attend to each other:
    `MASKED` for such pairs, 0 for all others. As in timm, ends are those of the padded grid.
    """
    wrapped = []  # whether a row or column was moved from the first end to the last
    for side, size, move in zip(grid, window, shift, strict=True):
        padded = side + -side % size
        wrapped.append(np.arange(padded) >= padded - move)
    labels = 2 * wrapped[0][:, None] + wrapped[1][None, :]
    r, c = window
    labels = labels.reshape(len(labels) // r, r, -1, c).swapaxes(1, 2).reshape(-1, r * c)
    apart = labels[:, :, None] != labels[:, None, :]
    return np.where(apart, np.float32(MASKED), np.float32(0))


def spread_bias(table: Float[Array, "R h"], window: Sides) -> Float[Array, "h n n"]:
    """Returns `table[relative_index(window)]`, the bias of each query and key, heads first.

    By slices, since the gradient of indexing is a scatter, which adds in no fixed order on GPUs.
    """
    rows, cols = window
    x = table.reshape(2 * rows - 1, 2 * cols - 1, -1)
    x = jnp.moveaxis(_spread(x, rows), 2, 0)  # [columns apart, query's row, key's row, h]
    x = _spread(x, cols).transpose(4, 2, 0, 3, 1)
    return x.reshape(-1, rows * cols, rows * cols)


def _spread(x, size):
    """Returns an array whose entry [query, key] is x[query - key + size - 1]."""
    return jnp.stack([x[query : query + size][::-1] for query in range(size)])
