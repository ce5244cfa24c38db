"""Describes attention layers of other projects: those with windows or rotary positions."""

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Complex

from structinit_jax.attention_init import AttentionWeights, RotarySite, WindowSite
from structinit_jax.attention_init.sites import GRID, check_shape
from structinit_jax.errors import InputError, require
from structinit_jax.interop.entries import check_array, like, replace_rows, unsupported
from structinit_jax.interop.host import Grid, Host, square
from structinit_jax.interop.layouts import Leaves, Stack, find_stacks

TABLE = "relative_position_bias_table"
REFUSED = {  # by the names of their parameters
    re.compile(r"(?:.*\.)?att\w*\.(?:.*\.)?logit_scale"): "the cosine attention of SwinV2",
    re.compile(r"(?:.*\.)?attn_grid\..*"): "the grid attention of MaxViT",
}
# Error of sines and cosines in bfloat16, and of the turns between neighbors computed from them.
ROUNDING = 0.05


# -- attention with a relative position bias: Swin, BEiT -------------------------------------------


class FoundSite(NamedTuple):
    """A stack of layers in another project's model.

    Attributes:
      name: One of its parameters, for error messages.
      site: The stack as schemes see it.
      write: Returns leaves with the weights that a scheme returned for the site.
    """

    name: str
    site: WindowSite
    write: Callable[[Leaves, AttentionWeights], Leaves]


def find_window_sites(leaves: Leaves, grid: Grid | None) -> list[FoundSite]:
    """Finds the stacks of a Swin Transformer or BEiT, from first to last.

    `grid` is (rows, cols) of the windows that are not square.

    Returns:
      The stacks; none if the model is of another kind.

    Raises:
      InputError: No scheme fits this model.
    """
    if grid is not None:
        require("grid", grid, *GRID)
    for pattern, attention in REFUSED.items():
        for name in filter(pattern.fullmatch, leaves):
            raise unsupported(name, f"belongs to {attention}")
    tables = [name for name in leaves if name.endswith(TABLE)]
    if not tables:
        return []
    stacks = find_stacks(leaves)
    # Those without tables are of a text model.
    seeing = [stack for stack in stacks if any(name.startswith(stack.blocks) for name in tables)]
    sites = [_window_site(leaves, stack, grid) for stack in seeing or stacks]
    if grid is not None and all(found.site.grid != grid for found in sites):
        windows = ", ".join(f"{found.site.grid} of {found.name}" for found in sites)
        raise InputError(f"grid={grid} is none of the windows {windows}: leave it out")
    return sites


def _window_site(leaves: Leaves, stack: Stack, grid: Grid | None) -> FoundSite:
    tables = [
        name
        for attention in stack.attentions
        for name in leaves
        if name.startswith(f"{attention.rpartition('.')[0]}.") and name.endswith(TABLE)
    ]
    if len(tables) != len(stack.attentions):
        raise unsupported(stack.attentions[0], f"has no {TABLE}, as other layers have")
    check_array("params", tables[0], leaves[tables[0]])
    rows, num_heads = leaves[tables[0]].shape
    window = _find_window(tables[0], rows, grid)
    host = Host(leaves, stack, num_heads)
    host.require_assumptions(own=[name for name in leaves if name.endswith(TABLE)])
    site = WindowSite(grid=window, **host.sizes())

    def write(leaves: Leaves, weights: AttentionWeights) -> Leaves:
        for field in ("positions", "position_scale", "patch_scale", "patch_bias", "mlp_scale"):
            if getattr(weights, field) is not None:
                raise InputError(
                    f"attention_init: the scheme sets {field}, which has no place in a model with "
                    f"{tables[0]}: leave out the option"
                )
        new = Host(leaves, stack, num_heads).with_attention(weights)
        if weights.bias is not None:
            check_shape("bias", weights.bias, (host.num_layers, _num_offsets(window), num_heads))
            for name, biases in zip(tables, weights.bias, strict=True):
                table = replace_rows(jnp.asarray(leaves[name], jnp.float32), biases, 0)
                new[name] = like(table, leaves[name])
        return new

    return FoundSite(tables[0], site, write)


def _find_window(table: str, rows: int, grid: Grid | None) -> Grid:
    """Returns the window of a table with one row per offset, and BEiT's 3 for its class token."""
    side = math.isqrt(rows) // 2 + 1
    for window in (grid, (side, side)):
        if window and _num_offsets(window) in (rows, rows - 3):
            return window
    given = "" if grid is None else f" or one of {grid}"
    raise InputError(
        f"grid: the {rows} rows of {table} do not fit the offsets in a square window{given}: pass "
        "grid=(rows, cols) of its window"
    )


def _num_offsets(window: Grid) -> int:
    return (2 * window[0] - 1) * (2 * window[1] - 1)


# -- rotary positions -----------------------------------------------------------------------------


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
