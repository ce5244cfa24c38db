"""Attention schemes for models that were built elsewhere."""

import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from structinit_jax.attention_init import AttentionInit, AttentionSite, AttentionWeights
from structinit_jax.errors import InputError
from structinit_jax.interop.entries import Entry, Shape, check_array, like
from structinit_jax.interop.layouts import FIELDS, find_stack, flatten


def initialize(
    params: Any,
    attention_init: AttentionInit,
    rng: jax.Array,
    *,
    layout: str | None = None,
    num_heads: int | None = None,
    grid: tuple[int, int] | None = None,
    positions: np.ndarray | jax.Array | None = None,
) -> Any:
    """Puts the weights of a scheme into the parameters of a freshly built model.

    Parameters that the scheme does not set stay as they are. Biases of the projections that it sets
    become zero. Schemes assume that the LayerNorm before the attention has scale 1 and bias 0, and
    that query-key products are scaled by d^-1/2.

    A learned position table is offered to the scheme as trainable and takes the encoding that the
    scheme returns. Its rows for class and register tokens change only if the scheme scales the
    whole table.

    Args:
      params: A state dict, Linen tree, NNX module, NNX state or pure dict. It is not changed.
      attention_init: The scheme, for example `attention_init.impulse()`.
      rng: Random key for the scheme.
      layout: One of `LAYOUTS`; None detects it from the names.
      num_heads: Number of heads h; required for state dicts of torch, whose shapes do not show it.
      grid: (rows, cols) of the image tokens; None assumes a square.
      positions: [N, D] encoding that the model adds to its tokens without storing it in `params`,
        for example `sincos_positions(grid, D)`, or for MoCo v3 and big_vision
        `sincos_positions(grid, D, convention="moco")`. A table in `params` is then ignored.

    Returns:
      Parameters of the same structure, array kinds (NumPy or JAX), dtypes and shardings. Arrays
      that did not change may be shared with `params`.

    Raises:
      InputError: The attention layers cannot be found or do not fit, or an argument is missing.
    """
    where = dict(layout=layout, num_heads=num_heads, grid=grid)
    site = attention_site(params, **where, positions=positions)
    return write(params, attention_init(rng, site), **where)


def attention_site(
    params: Any,
    *,
    layout: str | None = None,
    num_heads: int | None = None,
    grid: tuple[int, int] | None = None,
    positions: np.ndarray | jax.Array | None = None,
) -> AttentionSite:
    """Describes the model's attention layers for a scheme. See `initialize` for the arguments."""
    model = _Model(params, layout, num_heads)
    trainable = positions is None
    if positions is None:
        table = _find_table(model, grid)
        if table is None:
            names = ", ".join(model.stack.layout.positions).replace("\\", "")
            raise InputError(
                f"positions: params hold no position table of width {model.width} ({names}): pass "
                "the encoding that the model adds as positions=[N, D]"
            )
        grid, positions = table.grid, jnp.asarray(table.rows[table.prefix :], jnp.float32)
    elif positions.ndim != 2 or positions.shape[1] != model.width:
        raise InputError(
            f"positions has shape {positions.shape}, but the model needs [N, {model.width}]"
        )
    grid = grid or _square(len(positions))
    if grid is None:
        raise InputError(
            f"grid: {len(positions)} positions are not a square: pass grid=(rows, cols)"
        )
    return AttentionSite(
        grid=grid,
        width=model.width,
        num_heads=model.num_heads,
        head_dim=model.head_dim,
        num_layers=model.num_layers,
        qk_scale=model.head_dim**-0.5,
        positions=positions,
        positions_trainable=trainable,
    )


def read(
    params: Any,
    *,
    layout: str | None = None,
    num_heads: int | None = None,
    grid: tuple[int, int] | None = None,
) -> AttentionWeights:
    """Reads the model's attention weights. See `initialize` for the arguments.

    Returns:
      The weights as a scheme returns them; `positions` is None if `params` hold no position table.
    """
    model = _Model(params, layout, num_heads)
    layers: dict[str, list[jax.Array]] = {}
    for entry in model.entries:
        arrays = entry.decode(jnp.asarray(model.leaves[entry.name]), model.shapes_of(entry))
        for path, array in zip(entry.paths, arrays, strict=True):
            layers.setdefault(path, []).append(array)
    kernels = {field: layers[f"attention/{field}/kernel"] for field in FIELDS}
    stacked = model.stack.stacked
    weights = {field: k[0] if stacked else jnp.stack(k) for field, k in kernels.items()}
    table = _find_table(model, grid)
    positions = None if table is None else jnp.asarray(table.rows[table.prefix :])
    return AttentionWeights(**weights, positions=positions)


def write(
    params: Any,
    weights: AttentionWeights,
    *,
    layout: str | None = None,
    num_heads: int | None = None,
    grid: tuple[int, int] | None = None,
) -> Any:
    """Returns new parameters with those `weights` that are not None.

    Biases of the projections that they set become zero. See `initialize` for the other arguments.
    """
    for field in ("patch_scale", "mlp_scale"):
        if getattr(weights, field) is not None:
            raise InputError(
                f"weights.{field}={getattr(weights, field)}: only the attention layers of params "
                f"are known. Leave the scheme's {field} at 1 and multiply that kernel yourself"
            )
    model = _Model(params, layout, num_heads)
    ours = {}
    for field in FIELDS:
        kernel = getattr(weights, field)
        if kernel is not None:
            path = f"attention/{field}"
            _check_shape(field, kernel, (model.num_layers, *model.shapes[f"{path}/kernel"]))
            ours[f"{path}/kernel"] = kernel
            bias_shape = (model.num_layers, *model.shapes[f"{path}/bias"])
            ours[f"{path}/bias"] = np.zeros(bias_shape, np.float32)
    new = dict(model.leaves)
    for entry in model.entries:
        if any(path in ours for path in entry.paths):
            new[entry.name] = _encode(entry, new[entry.name], ours, model.shapes_of(entry))
    if weights.positions is not None or weights.position_scale is not None:
        table = _find_table(model, grid)
        if table is None:
            raise InputError("weights.positions: params hold no position table to write them to")
        rows = jnp.asarray(table.rows, jnp.float32)
        if weights.positions is not None:
            _check_shape("positions", weights.positions, table.rows[table.prefix :].shape)
            rows = rows.at[table.prefix :].set(weights.positions)
        if weights.position_scale is not None:
            rows = weights.position_scale * rows
        old = model.leaves[table.name]
        new[table.name] = like(rows.reshape(old.shape), old)
    return model.rebuild(new)


def _check_shape(field, array, expected):
    if array.shape != expected:
        raise InputError(f"weights.{field} has shape {array.shape}, but the model needs {expected}")


def _encode(entry, old, ours, shapes):
    """Encodes our arrays; those that `ours` lacks keep the old value."""
    xp = np if isinstance(old, np.ndarray) else jnp
    current = dict(zip(entry.paths, entry.decode(old, shapes), strict=True))
    for path in current.keys() & ours.keys():
        array = ours[path] if entry.layer is None else ours[path][entry.layer]
        current[path] = xp.asarray(array).astype(old.dtype)
    return like(entry.encode(*current.values()), old)


class _Model:
    """A model's parameters by name, the entries of its attention layers, and their sizes.

    `shapes` are those of our arrays by path, without the layer axis.
    """

    def __init__(self, params: Any, layout: str | None, num_heads: int | None):
        self.leaves, self.rebuild = flatten(params)
        self.stack = find_stack(self.leaves, layout)
        self.entries = self.stack.entries(self.leaves, "attention")
        for entry in self.entries:
            check_array("params", entry.name, self.leaves[entry.name])
        self._set_sizes(num_heads)
        heads = (self.num_heads, self.head_dim)
        self.shapes = {"attention/out/kernel": (*heads, self.width)}
        self.shapes["attention/out/bias"] = (self.width,)
        for field in ("query", "key", "value"):
            self.shapes[f"attention/{field}/kernel"] = (self.width, *heads)
            self.shapes[f"attention/{field}/bias"] = heads
        for entry in self.entries:
            shape, expected = self.leaves[entry.name].shape, entry.shape(self.shapes_of(entry))
            if shape != expected:
                raise InputError(
                    f"params: {entry.name} has shape {shape}, but needs {expected}: schemes need "
                    "equal layers with as many keys as queries"
                )

    def _set_sizes(self, num_heads: int | None) -> None:
        layout, attentions = self.stack.layout, self.stack.attentions
        name = layout.weight(attentions[0], "out" if layout.torch else "query")
        shape = self.leaves[name].shape
        self.num_layers = shape[0] if self.stack.stacked else len(attentions)
        if not layout.torch:
            self.width, self.num_heads, self.head_dim = shape[-3:]
            if num_heads not in (None, self.num_heads):
                raise InputError(f"num_heads={num_heads}, but {name} has {self.num_heads} heads")
            return
        if len(shape) != 2:
            raise InputError(f"params: {name} has shape {shape}, but needs two axes")
        self.width, inner = shape
        if num_heads is None:
            raise InputError(f"num_heads: pass the number of heads that share {inner} channels")
        if num_heads < 1 or inner % num_heads:
            raise InputError(f"num_heads={num_heads} does not divide the {inner} channels")
        self.num_heads, self.head_dim = num_heads, inner // num_heads

    def shapes_of(self, entry: Entry) -> list[Shape]:
        """Shapes of our arrays in an entry, with the layer axis if the model stacks its layers."""
        lead = (self.num_layers,) if entry.layer is None else ()
        return [(*lead, *self.shapes[path]) for path in entry.paths]


class _Table(NamedTuple):
    """A learned position table: `rows` [T, D], the first `prefix` of which are off the grid."""

    name: str
    rows: Any
    prefix: int
    grid: tuple[int, int]


def _find_table(model: _Model, grid: tuple[int, int] | None) -> _Table | None:
    stem, patterns = re.escape(model.stack.stem), "|".join(model.stack.layout.positions)
    found = []
    for name, leaf in model.leaves.items():
        if re.fullmatch(f"{stem}(?:{patterns})", name):
            *lead, rows, width = (1, 1, *getattr(leaf, "shape", ()))
            if math.prod(lead) == 1 < rows and width == model.width:
                found.append(name)
    if not found:
        return None
    if len(found) > 1:
        raise InputError(
            f"params hold several position tables ({', '.join(found)}): pass the subtree of one"
        )
    name, leaf = found[0], model.leaves[found[0]]
    check_array("params", name, leaf)
    rows = leaf.reshape(leaf.shape[-2:])
    return _Table(name, rows, *_split_rows(name, len(rows), _num_extra_tokens(model), grid))


def _split_rows(name, rows, extra, grid):
    """Returns the number of rows before those of the grid, and the grid.

    Of the `extra` class and register tokens, some may have no row.
    """
    if grid is not None:
        prefix = rows - math.prod(grid)
        if not 0 <= prefix <= extra:
            raise InputError(
                f"grid={grid} has {math.prod(grid)} tokens, but {name} has {rows} rows, at most "
                f"{extra} of them for class and register tokens"
            )
        return prefix, grid
    squares = {n: _square(rows - n) for n in sorted({0, min(1, extra), extra})}
    found = [(n, square) for n, square in squares.items() if square is not None]
    if len(found) != 1:
        raise InputError(
            f"grid: the {rows} rows of {name}, at most {extra} of them for class and register "
            "tokens, do not determine a square of image tokens: pass grid=(rows, cols)"
        )
    return found[0]


def _num_extra_tokens(model: _Model) -> int:
    """Counts class, distillation and register tokens."""
    pattern = re.escape(model.stack.stem) + (
        r"(?:.*\.)?(?:cls|class|dist|distillation|reg|register)(?:_tokens?|_embedding)?"
    )
    return sum(
        math.prod(leaf.shape) // model.width
        for name, leaf in model.leaves.items()
        if re.fullmatch(pattern, name) and getattr(leaf, "shape", ())[-1:] == (model.width,)
    )


def _square(tokens: int) -> tuple[int, int] | None:
    side = math.isqrt(max(tokens, 0))
    return (side, side) if side and side * side == tokens else None
