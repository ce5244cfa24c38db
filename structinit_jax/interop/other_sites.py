"""Layers of other projects' models that have no positions: windows, token mixing, convolutions."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from structinit_jax.attention_init import (
    AttentionWeights,
    ConvSite,
    Site,
    TokenMixingSite,
    Weights,
    WindowSite,
)
from structinit_jax.attention_init.sites import check_grid, check_shape
from structinit_jax.errors import InputError
from structinit_jax.interop.assumptions import require_assumptions
from structinit_jax.interop.entries import Entry, check_array, conv, encode_some, like, linear
from structinit_jax.interop.host import Grid, Host, square
from structinit_jax.interop.layouts import Leaves
from structinit_jax.interop.stacks import check_stack, find_stacks

BIAS_TABLE = "relative_position_bias_table"
TOKEN_MLP = re.compile(r"(?P<stem>(?:.*\.)?blocks\.)(?P<index>\d+)\.mlp_tokens\.fc1\.weight")
COSINE = re.compile(r"(?:.*\.)?att\w*\.(?:.*\.)?logit_scale")
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


def find_sites(leaves: Leaves, layout: str | None, grid: Grid | None) -> list[FoundSite]:
    """Finds the stacks of a Swin Transformer or BEiT, MLP-Mixer or ConvMixer.

    Args:
      leaves: The parameters by name.
      layout: A key of `LAYOUTS`, or None to try them all.
      grid: (rows, cols) of the windows or tokens; None assumes a square.

    Returns:
      The stacks from first to last; none if the model is of another kind.

    Raises:
      InputError: The model is a Swin Transformer V2, or one of these that no scheme fits.
    """
    if grid is not None:
        check_grid("grid", grid)
    for name in filter(COSINE.fullmatch, leaves):
        raise InputError(
            f"params: {name} rescales the logits of cosine attention, as in SwinV2: they depend on "
            "the directions of queries and keys alone, which no scheme sets, and an MLP makes the "
            "position bias. Use a model with a table of biases, such as Swin"
        )
    if any(BIAS_TABLE in name for name in leaves):
        return _windows(leaves, layout, grid)
    for pattern, find in ((TOKEN_MLP, _token_mixing), (DEPTHWISE, _convolutions)):
        layers = {int(m["index"]): m for m in map(pattern.fullmatch, leaves) if m}
        if layers:
            return [find(leaves, [layers[index] for index in sorted(layers)], grid)]
    return []


# -- attention with a relative position bias: Swin, BEiT -------------------------------------------


def _windows(leaves, layout, grid):
    stacks = sorted(find_stacks(leaves, layout), key=lambda stack: _numbers(stack.stem))
    sites = []
    for stack in stacks:
        check_stack(leaves, stack)
        tables = [
            name
            for attention in stack.attentions
            for name in leaves
            if name.startswith(f"{attention.rpartition('.')[0]}.") and name.endswith(BIAS_TABLE)
        ]
        if len(tables) != len(stack.attentions):
            raise InputError(
                f"params: {stack.attentions[0]} has no {BIAS_TABLE}, as other layers have: schemes "
                "need one in every layer"
            )
        sites.append(_window_site(leaves, stack, tables, grid))
    return sites


def _window_site(leaves, stack, tables, grid):
    check_array("params", tables[0], leaves[tables[0]])
    rows, num_heads = leaves[tables[0]].shape
    host = Host(leaves, stack, num_heads)
    require_assumptions(host, bias_tables=tables)
    window = grid or _window(rows) or _window(rows - 3)  # BEiT has three for the class token
    used = (2 * window[0] - 1) * (2 * window[1] - 1) if window else 0
    if used not in (rows, rows - 3):
        raise InputError(
            f"grid: the {rows} rows of {tables[0]} do not fit the offsets in "
            f"{'a square window' if window is None else f'a window of {window}'}: pass "
            "grid=(rows, cols)"
        )
    site = WindowSite(
        grid=window,
        **host.sizes(),
    )

    def write(leaves: Leaves, weights: AttentionWeights) -> Leaves:
        new = Host(leaves, stack, num_heads).with_attention(weights)
        if weights.bias is not None:
            check_shape("bias", weights.bias, (host.num_layers, used, num_heads))
            for name, bias in zip(tables, weights.bias, strict=True):
                table = jnp.asarray(new[name], jnp.float32).at[:used].set(bias)
                new[name] = like(table, new[name])
        return new

    return FoundSite(tables[0], site, write)


def _window(rows: int) -> Grid | None:
    """Returns the square window with so many offsets, or None."""
    side = math.isqrt(rows)
    return (side // 2 + 1, side // 2 + 1) if side**2 == rows and side % 2 else None


def _numbers(stem: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", stem)]


# -- token mixing and convolutions -----------------------------------------------------------------


def _token_mixing(leaves, layers, grid):
    first = layers[0][0]
    check_array("params", first, leaves[first])
    hidden, tokens = leaves[first].shape
    grid = grid or square(tokens)
    if grid is None or math.prod(grid) != tokens:
        raise InputError(f"grid: {first} mixes {tokens} tokens: pass grid=(rows, cols)")
    width = leaves[f"{layers[0]['stem']}{layers[0]['index']}.norm1.weight"].shape[0]
    site = TokenMixingSite(grid=grid, hidden=hidden, num_layers=len(layers), width=width)
    entries = []
    for i, layer in enumerate(layers):
        module = f"{layer['stem']}{layer['index']}.mlp_tokens"
        entries += linear(f"{module}.fc1", "fc1", layer=i, bias=False)
        entries += linear(f"{module}.fc2", "fc2", layer=i, bias=False)
    shapes = {"fc1/kernel": (tokens, hidden), "fc2/kernel": (hidden, tokens)}

    def write(leaves: Leaves, weights: Weights) -> Leaves:
        return _encode(
            leaves, entries, {f"{k}/kernel": getattr(weights, k) for k in ("fc1", "fc2")}, shapes
        )

    return FoundSite(first, site, write)


def _convolutions(leaves, layers, grid):
    first = layers[0][0]
    check_array("params", first, leaves[first])
    width, _, size, _ = leaves[first].shape
    site = ConvSite(kernel_size=size, width=width, num_layers=len(layers))
    entries = [
        next(conv(layer[0].removesuffix(".weight"), "conv", i)) for i, layer in enumerate(layers)
    ]

    def write(leaves: Leaves, weights: Weights) -> Leaves:
        shapes = {"conv/kernel": (size, size, width)}
        return _encode(leaves, entries, {"conv/kernel": weights.kernel}, shapes)

    return FoundSite(first, site, write)


def _encode(
    leaves: Leaves, entries: list[Entry], ours: Mapping[str, Any], shapes: Mapping[str, Any]
) -> Leaves:
    """Returns leaves with those of our arrays that are not None."""
    ours = {path: array for path, array in ours.items() if array is not None}
    new = dict(leaves)
    for entry in entries:
        if entry.paths[0] in ours:
            old, shape = new[entry.name], [shapes[entry.paths[0]]]
            check_array("params", entry.name, old)
            if old.shape != entry.shape(shape):
                raise InputError(
                    f"params: {entry.name} has shape {old.shape}, but schemes for its layers need "
                    f"{entry.shape(shape)}: equal layers without gates"
                )
            new[entry.name] = encode_some(entry, old, ours, shape)
    return new
