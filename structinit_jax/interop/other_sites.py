"""Finds other projects' layers without positions: windows, token mixing, convolutions."""

import math
import re
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from structinit_jax.attention_init import (
    AttentionWeights,
    ConvSite,
    Site,
    TokenMixingSite,
    Weights,
    WindowSite,
)
from structinit_jax.attention_init.sites import GRID, check_shape
from structinit_jax.errors import InputError, require
from structinit_jax.interop.entries import (
    check_array,
    check_entries,
    conv,
    like,
    linear,
    replace_rows,
    unsupported,
    write_entries,
)
from structinit_jax.interop.host import Grid, Host, square
from structinit_jax.interop.layouts import Leaves, Stack, find_stacks

TABLE = "relative_position_bias_table"
REFUSED = {  # by the names of their parameters
    re.compile(r"(?:.*\.)?att\w*\.(?:.*\.)?logit_scale"): "the cosine attention of SwinV2",
    re.compile(r"(?:.*\.)?attn_grid\..*"): "the grid attention of MaxViT",
}
TOKEN_MLP = re.compile(r"(?P<stem>(?:.*\.)?blocks\.)(?P<index>\d+)\.mlp_tokens\.fc1\.weight")
DEPTHWISE = re.compile(r"(?P<stem>(?:.*\.)?blocks\.)(?P<index>\d+)\.0\.fn\.0\.weight")


class FoundSite(NamedTuple):
    """A stack of layers in another project's model.

    Attributes:
      name: One of its parameters, for error messages.
      site: The stack as schemes see it.
      write: Returns leaves with the weights that a scheme returned for the site.
    """

    name: str
    site: Site
    write: Callable[[Leaves, Weights], Leaves]


def find_sites(leaves: Leaves, grid: Grid | None) -> list[FoundSite]:
    """Finds the stacks of a Swin Transformer or BEiT, MLP-Mixer or ConvMixer, from first to last.

    `grid` is (rows, cols) of the tokens, or of the windows that are not square.

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
    if any(TABLE in name for name in leaves):
        return _windows(leaves, grid)
    for pattern, find in ((TOKEN_MLP, _token_mixing), (DEPTHWISE, _convolutions)):
        layers = {int(m["index"]): m for m in map(pattern.fullmatch, leaves) if m}
        if layers:
            return [find(leaves, [layers[index] for index in sorted(layers)], grid)]
    return []


# -- attention with a relative position bias: Swin, BEiT -------------------------------------------


def _windows(leaves: Leaves, grid: Grid | None) -> list[FoundSite]:
    tables = [name for name in leaves if name.endswith(TABLE)]
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


# -- token mixing and convolutions -----------------------------------------------------------------


def _token_mixing(leaves, layers, grid):
    first = layers[0][0]
    check_array("params", first, leaves[first])
    hidden, tokens = leaves[first].shape
    grid = grid or square(tokens)
    if grid is None or math.prod(grid) != tokens:
        raise InputError(
            f"grid={grid}: {first} mixes {tokens} tokens: pass grid=(rows, cols) of that product"
        )
    blocks = [f"{layer['stem']}{layer['index']}" for layer in layers]
    site = TokenMixingSite(grid, hidden=hidden, num_layers=len(layers))
    entries = [
        entry
        for i, block in enumerate(blocks)
        for name in ("fc1", "fc2")
        for entry in linear(f"{block}.mlp_tokens.{name}", name, layer=i, bias=False)
    ]
    shapes = {"fc1/kernel": (tokens, hidden), "fc2/kernel": (hidden, tokens)}
    check_entries(leaves, entries, shapes)

    def write(leaves: Leaves, weights: Weights) -> Leaves:
        ours = {"fc1/kernel": weights.fc1, "fc2/kernel": weights.fc2}
        ours = {path: array for path, array in ours.items() if array is not None}
        return write_entries(leaves, entries, ours, shapes)

    return FoundSite(first, site, write)


def _convolutions(leaves, layers, grid):
    first = layers[0][0]
    check_array("params", first, leaves[first])
    width, _, size, _ = leaves[first].shape
    site = ConvSite(kernel_size=size, width=width, num_layers=len(layers))
    names = [layer[0].removesuffix(".weight") for layer in layers]
    entries = [next(conv(name, "conv", i)) for i, name in enumerate(names)]
    shapes = {"conv/kernel": (size, size, width)}
    check_entries(leaves, entries, shapes)

    def write(leaves: Leaves, weights: Weights) -> Leaves:
        return write_entries(leaves, entries, {"conv/kernel": weights.kernel}, shapes)

    return FoundSite(first, site, write)
