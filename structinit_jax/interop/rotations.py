"""Reads the rotary positions (RoPE) that another project's model computes."""

import math
from typing import Any

import numpy as np
from jaxtyping import Complex

from structinit_jax.attention_init import RotarySite
from structinit_jax.errors import InputError
from structinit_jax.interop.entries import check_array
from structinit_jax.interop.host import Grid, Host, square

# Error of sines and cosines in bfloat16, and of the turns between neighbors computed from them.
ROUNDING = 0.05


def rotary_site(host: Host, given: Any, grid: Grid | None) -> RotarySite:
    """Returns the site of a model with the `rotations` that were passed to `initialize`."""
    parts = tuple(given) if isinstance(given, tuple | list) else (given,)
    for part in parts:
        check_array("rotations", "the table", part)
    shapes, d, is_pair = [part.shape for part in parts], host.head_dim, len(parts) == 2
    lead = (1,) * (4 - len(shapes[0])) + shapes[0][:-2]
    heads = (host.num_layers, host.num_heads)
    fits = len(lead) == 2 and all(n in (1, m) for n, m in zip(lead, heads, strict=True))
    if not fits or len(set(shapes)) != 1 or shapes[0][-1] != (d if is_pair else 2 * d):
        raise InputError(
            f"rotations has shape {' and '.join(map(str, shapes))}, but the model needs timm's "
            f"model.rope.get_embed(shape=grid) [N, {2 * d}] or Hugging Face's pair "
            f"model.rope_embeddings(pixel_values) of [N, {d}], with leading axes for "
            f"{host.num_layers} layers and {host.num_heads} heads if these differ"
        )
    parts = [np.asarray(part, np.float64) for part in parts]
    cos, sin = parts if is_pair else (parts[0][..., d:], parts[0][..., :d])
    # Both channels of a pair have the same sine and cosine.
    neighbors = all(np.array_equal(part[..., ::2], part[..., 1::2]) for part in (sin, cos))
    pairs, firsts = ("interleaved", slice(0, d, 2)) if neighbors else ("halves", slice(d // 2))
    angles = np.arctan2(sin[..., firsts], cos[..., firsts])
    angles = angles.reshape(*lead, *angles.shape[-2:]).astype(np.float32)
    tokens = angles.shape[2]
    grid = grid or square(tokens)
    if grid is None or math.prod(grid) != tokens or not _is_even(np.exp(1j * angles), grid):
        raise InputError(
            f"grid={grid}: the {tokens} rotations do not turn by equal angles along the rows and "
            "columns of this grid: pass the rotations of the image tokens alone, row by row, and "
            "their grid=(rows, cols)"
        )
    return RotarySite(grid=grid, **host.sizes(), angles=angles, pairs=pairs)


def _is_even(turns: Complex[np.ndarray, "L h N p"], grid: Grid) -> bool:
    """Whether the turns between neighbors are the same in the whole grid, as in 2D RoPE."""
    turns = turns.reshape(*turns.shape[:2], *grid, -1)
    right = turns[..., 1:, :] * turns[..., :-1, :].conj()
    down = turns[..., 1:, :, :] * turns[..., :-1, :, :].conj()
    return all(
        np.allclose(steps, steps[..., :1, :1, :], rtol=0, atol=ROUNDING) for steps in (right, down)
    )
