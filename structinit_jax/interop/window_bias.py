"""Reads and writes the position biases of windowed attention in other projects' models.

Swin and BEiT keep a table with a row for each offset in the window. Swin Transformer V2 (Liu et al.
2022, sections 3.2 and 3.3) adds 16 sigmoid(MLP(coordinates)) to exp(logit_scale) cos(query, key),
where the coordinates of an offset are on a logarithmic scale and the MLP has one hidden layer of
ReLUs and no output bias.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from structinit_jax.errors import InputError
from structinit_jax.interop.entries import check_array, like, replace_rows
from structinit_jax.interop.host import Grid
from structinit_jax.interop.layouts import Leaves
from structinit_jax.interop.stacks import Stack

TABLE = "relative_position_bias_table"
COORDINATES = "relative_coords_table"
COSINE = re.compile(r"(?P<module>(?:.*\.)?att\w*\.(?:.*\.)?)logit_scale")
MLPS = ("cpb_mlp", "continuous_position_bias_mlp")  # timm and torchvision; Hugging Face
LARGEST_BIAS = 16.0
MARGIN = 0.5  # of the bias from 0 and from the largest, where the sigmoid is flat
LARGEST_ERROR = 1.0  # of a bias that the MLP makes
# Multiples of the powers of the inverse of x^4 = x + 1 fill the unit cube evenly (Roberts 2018).
EVEN = 1.2207440846 ** -np.arange(1.0, 4.0)


class WindowBias(NamedTuple):
    """The position bias of a stack of attention layers.

    Attributes:
      names: Its parameters, the first of which error messages name.
      window: (rows, cols).
      num_heads: Number of heads h.
      encode: From biases [L, R, h] for the R = (2 rows - 1) (2 cols - 1) offsets from key to query
        to the new values of its parameters.
    """

    names: list[str]
    window: Grid
    num_heads: int
    encode: Callable[[Float[Array, "L R h"]], Leaves]


def has_window_bias(leaves: Leaves) -> str | None:
    """Returns the name of a parameter of a window's position bias, or None."""
    return next((name for name in leaves if TABLE in name or COSINE.fullmatch(name)), None)


def table_bias(leaves: Leaves, stack: Stack, grid: Grid | None) -> WindowBias:
    """Finds the table of every layer. See `find_sites` for `grid`."""
    tables = [
        name
        for attention in stack.attentions
        for name in leaves
        if name.startswith(f"{attention.rpartition('.')[0]}.") and name.endswith(TABLE)
    ]
    if len(tables) != len(stack.attentions):
        raise InputError(
            f"params: {stack.attentions[0]} has no {TABLE}, as other layers have: schemes need one "
            "in every layer"
        )
    check_array("params", tables[0], leaves[tables[0]])
    rows, num_heads = leaves[tables[0]].shape
    fitting = (rows, rows - 3)  # BEiT has three for the class token
    windows = [grid, *map(_window, fitting)]
    window = next((w for w in windows if w and _offsets(w) in fitting), None)
    if window is None:
        given = "" if grid is None else f" or one of {grid}"
        raise InputError(
            f"grid: the {rows} rows of {tables[0]} do not fit the offsets in a square window"
            f"{given}: pass grid=(rows, cols) of its window"
        )

    def encode(bias):
        new = {}
        for name, rows in zip(tables, bias, strict=True):
            table = replace_rows(jnp.asarray(leaves[name], jnp.float32), rows, 0)
            new[name] = like(table, leaves[name])
        return new

    return WindowBias(tables, window, num_heads, encode)


def _offsets(window: Grid) -> int:
    return (2 * window[0] - 1) * (2 * window[1] - 1)


def _window(rows: int) -> Grid | None:
    """Returns the square window with this many offsets, or None."""
    side = math.isqrt(rows)
    return (side // 2 + 1, side // 2 + 1) if side**2 == rows and side % 2 else None


def mlp_bias(leaves: Leaves, stack: Stack, buffers: Mapping[str, Any]) -> WindowBias:
    """Finds the MLP of every layer, and its coordinates in the parameters or the buffers."""
    found = [_module_and_mlp(leaves, attention) for attention in stack.attentions]
    modules, mlps = zip(*found, strict=True)
    tables = [_coordinates(leaves, buffers, module) for module in modules]
    shape = tables[0].shape
    window = (shape[0] // 2 + 1, shape[1] // 2 + 1)
    num_heads = len(leaves[f"{mlps[0]}.2.weight"])
    parts = ("0.weight", "0.bias", "2.weight")
    names = [f"{module}logit_scale" for module in modules]
    names += [f"{mlp}.{part}" for mlp in mlps for part in parts]
    for name in names:
        check_array("params", name, leaves[name])
    names += [f"{module}{COORDINATES}" for module in modules]

    def encode(bias):
        new = {}
        for module, mlp, table, biases in zip(
            modules, mlps, tables, np.asarray(bias, np.float64), strict=True
        ):
            hidden = len(leaves[f"{mlp}.0.bias"])
            arrays = fit_mlp(table.reshape(-1, 2), biases, hidden, f"{mlp}.2.weight")
            # Content logits then start as small as in Swin: cosines times 1 instead of 10.
            scale = f"{module}logit_scale"
            new[scale] = like(np.zeros(leaves[scale].shape), leaves[scale])
            for part, array in zip(parts, arrays, strict=True):
                name = f"{mlp}.{part}"
                new[name] = like(array, leaves[name])
        return new

    return WindowBias(names, window, num_heads, encode)


def _module_and_mlp(leaves, attention):
    """Returns the prefix of the module in an attention layer that has the bias, and its MLP."""
    for name in leaves:
        match = COSINE.fullmatch(name)
        if match and match["module"].startswith(f"{attention}."):
            for mlp in (f"{match['module']}{mlp}" for mlp in MLPS):
                if f"{mlp}.0.weight" in leaves:
                    return match["module"], mlp
            raise InputError(
                f"params: {name} rescales the logits of cosine attention, which depend on the "
                "directions of queries and keys alone: no scheme sets them. Use a model that also "
                f"has a position bias, as a table (Swin) or as {MLPS[0]} (SwinV2)"
            )
    raise InputError(f"params: {attention} has no logit_scale, as other layers have")


def _coordinates(leaves, buffers, module) -> Float[np.ndarray, "G W 2"]:
    name = f"{module}{COORDINATES}"
    table = leaves.get(name, buffers.get(name))
    if table is None:
        raise InputError(
            f"buffers: neither params nor buffers hold {name}, the coordinates in the model's "
            "windows: pass buffers={k: v.numpy() for k, v in model.named_buffers()}"
        )
    check_array("buffers", name, table)
    shape = table.shape
    if len(shape) != 4 or shape[0] != 1 or shape[3] != 2 or not (shape[1] % 2 and shape[2] % 2):
        raise InputError(
            f"buffers: {name} has shape {shape}, but needs (1, 2 rows - 1, 2 cols - 1, 2)"
        )
    return np.asarray(table[0], np.float64)


def fit_mlp(
    coordinates: Float[np.ndarray, "R 2"], bias: Float[np.ndarray, "R h"], hidden: int, name: str
) -> tuple[
    Float[np.ndarray, "hidden 2"], Float[np.ndarray, " hidden"], Float[np.ndarray, "h hidden"]
]:
    """Fits 16 sigmoid(MLP(coordinates)) to biases, up to a constant, which the softmax ignores.

    The kinks of the hidden ReLUs are placed on lines of all directions through all parts of the
    window: as initialized by the models, all go through the center, and no output layer could make
    a bias at one offset. The output layer is the least-squares solution of minimal norm. With 512
    hidden units and one neighbor per head, the maps are exact in windows of up to 8×8 tokens and
    differ by 0.02 in total variation in 16×16.

    Returns:
      The weight and bias of the hidden layer and the weight of the output layer, as in torch.

    Raises:
      InputError: The biases do not fit between 0 and 16, or the MLP is too small for them.
    """
    low, high = bias.min(axis=0), bias.max(axis=0)
    spread = float((high - low).max())
    if spread > LARGEST_BIAS - 2 * MARGIN:
        raise InputError(
            f"params: biases of the scheme differ by {spread:.1f}, but {name} makes biases between "
            f"0 and {LARGEST_BIAS:g}: use a smaller target_mass"
        )
    wanted = bias - (low + high) / 2 + LARGEST_BIAS / 2
    logits = np.log(wanted / (LARGEST_BIAS - wanted))
    even = np.arange(1, hidden + 1)[:, None] * EVEN % 1
    angle = 2 * np.pi * even[:, :1]
    weight = np.concatenate([np.cos(angle), np.sin(angle)], axis=1)
    points = (2 * even[:, 1:] - 1) * np.abs(coordinates).max()
    offset = -np.sum(weight * points, axis=1)
    units = np.maximum(coordinates @ weight.T + offset, 0)
    out = np.linalg.pinv(units, rcond=1e-5) @ logits
    error = np.abs(LARGEST_BIAS / (1 + np.exp(-units @ out)) - wanted).max()
    if error > LARGEST_ERROR:
        raise InputError(
            f"params: the {hidden} hidden units before {name} make the scheme's biases for the "
            f"{len(bias)} offsets of a window only up to {error:.1f}: build the model with smaller "
            "windows"
        )
    return weight, offset, out.T
