"""Attention schemes for models that were built elsewhere."""

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from structinit_jax.attention_init import AttentionInit, AttentionSite, AttentionWeights
from structinit_jax.errors import InputError
from structinit_jax.interop.entries import Entry, Shape
from structinit_jax.interop.layouts import FIELDS, Stack, find_stack
from structinit_jax.interop.params import Leaves, check_array, flatten, like


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
    scheme returns. Its rows for class and register tokens stay as they are.

    Args:
      params: A state dict, Linen tree, NNX module, NNX state or pure dict. It is not changed.
      attention_init: The scheme, for example `attention_init.impulse()`.
      rng: Random key for the scheme.
      layout: One of `LAYOUTS`; None detects it from the names.
      num_heads: Number of heads h; required for state dicts of torch, whose shapes do not show it.
      grid: (rows, cols) of the image tokens; None assumes a square.
      positions: [N, D] encoding that the model adds to its tokens without storing it in `params`,
        for example `sincos_positions(grid, D)`. A table in `params` is then ignored.

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
    model = _find_model(params, layout, num_heads)
    trainable = positions is None
    if positions is None:
        table = _find_table(model, grid)
        if table is None:
            names = ", ".join(model.stack.layout.positions).replace("\\", "")
            raise InputError(
                f"positions: params hold no position table of width {model.width} (looked for "
                f"{names}): pass the encoding that the model adds as positions=[N, D], for example "
                "attention_init.sincos_positions(grid, D)"
            )
        grid, positions = table.grid, jnp.asarray(table.rows[table.prefix :], jnp.float32)
    elif positions.ndim != 2 or positions.shape[1] != model.width:
        raise InputError(
            f"positions has shape {positions.shape}, but the model needs [N, {model.width}] "
            "without class and register tokens"
        )
    elif grid is None:
        grid = _square(len(positions))
        if grid is None:
            raise InputError(
                f"grid: {len(positions)} positions do not form a square: pass grid=(rows, cols)"
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
    model = _find_model(params, layout, num_heads)
    layers: dict[str, list[jax.Array]] = {}
    for entry in model.entries:
        arrays = entry.decode(jnp.asarray(model.leaves[entry.name]), model.shapes_of(entry))
        for path, array in zip(entry.paths, arrays, strict=True):
            layers.setdefault(path, []).append(array)
    kernels = {field: layers[_path(field, "kernel")] for field in FIELDS}
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
    model = _find_model(params, layout, num_heads)
    ours = {}
    for field in FIELDS:
        kernel = getattr(weights, field)
        if kernel is None:
            continue
        expected = (model.num_layers, *model.shapes[_path(field, "kernel")])
        if kernel.shape != expected:
            raise InputError(
                f"weights.{field} has shape {kernel.shape}, but the model needs {expected}"
            )
        ours[_path(field, "kernel")] = kernel
        bias_shape = model.shapes[_path(field, "bias")]
        ours[_path(field, "bias")] = np.zeros((model.num_layers, *bias_shape), np.float32)
    new = dict(model.leaves)
    for entry in model.entries:
        if any(path in ours for path in entry.paths):
            new[entry.name] = _encode(entry, new[entry.name], ours, model.shapes_of(entry))
    if weights.positions is not None:
        table = _find_table(model, grid)
        if table is None:
            raise InputError(
                "weights.positions: the scheme sets the position encoding, but params hold no "
                "position table for it"
            )
        kept, start = (
            jnp.asarray(rows, jnp.float32)
            for rows in (table.rows[: table.prefix], weights.positions)
        )
        expected = table.rows[table.prefix :].shape
        if start.shape != expected:
            raise InputError(
                f"weights.positions has shape {start.shape}, but {table.name} needs {expected}"
            )
        old = model.leaves[table.name]
        new[table.name] = like(jnp.concatenate([kept, start]).reshape(old.shape), old)
    return model.rebuild(new)


def _encode(entry: Entry, old: Any, ours: dict[str, Any], shapes: list[Shape]) -> Any:
    """Encodes our arrays; those that `ours` lacks keep the old value."""
    xp = np if isinstance(old, np.ndarray) else jnp
    current = dict(zip(entry.paths, entry.decode(old, shapes), strict=True))
    for path in current.keys() & ours.keys():
        array = ours[path] if entry.layer is None else ours[path][entry.layer]
        current[path] = xp.asarray(array).astype(old.dtype)
    return like(entry.encode(*current.values()), old)


@dataclasses.dataclass(frozen=True, eq=False)
class _Model:
    """A model's parameters by name, its stack of attention layers and their sizes."""

    leaves: Leaves
    rebuild: Callable[[Leaves], Any]
    stack: Stack
    width: int
    num_heads: int
    head_dim: int
    num_layers: int

    @property
    def entries(self) -> list[Entry]:
        """Entries of all attention weights, onto the paths of `shapes`."""
        return self.stack.entries(self.leaves, "attention")

    @property
    def shapes(self) -> dict[str, Shape]:
        """Shapes of our arrays by path, without the layer axis."""
        width, heads = self.width, (self.num_heads, self.head_dim)
        shapes = {_path("out", "kernel"): (*heads, width), _path("out", "bias"): (width,)}
        for field in ("query", "key", "value"):
            shapes |= {_path(field, "kernel"): (width, *heads), _path(field, "bias"): heads}
        return shapes

    def shapes_of(self, entry: Entry) -> list[Shape]:
        """Shapes of our arrays in an entry, with the layer axis if the model stacks its layers."""
        lead = (self.num_layers,) if entry.layer is None else ()
        return [(*lead, *self.shapes[path]) for path in entry.paths]


def _path(field: str, leaf: str) -> str:
    return f"attention/{field}/{leaf}"


def _find_model(params: Any, layout: str | None, num_heads: int | None) -> _Model:
    leaves, rebuild = flatten(params)
    stack = find_stack(leaves, layout)
    first = stack.attentions[0]
    num_layers = len(stack.attentions)
    if stack.layout.torch:
        width, inner = _shape(leaves, stack.layout.weight(first, "out"), 2)
        num_heads = _check_heads(num_heads, inner)
        head_dim = inner // num_heads
    else:
        name = stack.layout.weight(first, "query")
        *lead, width, heads, head_dim = _shape(leaves, name, 4 if stack.stacked else 3)
        if num_heads not in (None, heads):
            raise InputError(f"num_heads={num_heads}, but {name} has {heads} heads")
        num_heads, num_layers = heads, lead[0] if lead else num_layers
    model = _Model(leaves, rebuild, stack, width, num_heads, head_dim, num_layers)
    for entry in model.entries:
        check_array("params", entry.name, leaves[entry.name])
        shape, expected = leaves[entry.name].shape, entry.shape(model.shapes_of(entry))
        if shape != expected:
            raise InputError(
                f"params: {entry.name} has shape {shape}, but the other layers need {expected}: "
                "schemes need equal layers with as many keys as queries"
            )
    return model


def _shape(leaves: Leaves, name: str, rank: int) -> Shape:
    shape = leaves[name].shape
    if len(shape) != rank:
        raise InputError(f"params: {name} has shape {shape}, but needs {rank} axes")
    return shape


def _check_heads(num_heads: int | None, inner: int) -> int:
    if num_heads is None:
        raise InputError(
            f"num_heads: names and shapes do not show how many heads share the {inner} channels of "
            "the attention: pass num_heads=…"
        )
    if num_heads < 1 or inner % num_heads:
        raise InputError(
            f"num_heads={num_heads} does not divide the {inner} channels of the attention"
        )
    return num_heads


class _Table(NamedTuple):
    """A learned position table: `rows` [T, D], the first `prefix` of which are off the grid."""

    name: str
    rows: Any
    prefix: int
    grid: tuple[int, int]


def _find_table(model: _Model, grid: tuple[int, int] | None) -> _Table | None:
    stem = model.stack.stem
    found = []
    for name, leaf in model.leaves.items():
        shape = getattr(leaf, "shape", ())
        if (
            name.startswith(stem)
            and any(re.fullmatch(p, name[len(stem) :]) for p in model.stack.layout.positions)
            and len(shape) >= 2
            and shape[-1] == model.width
            and math.prod(shape[:-2]) == 1 < shape[-2]
        ):
            found.append(name)
    if not found:
        return None
    if len(found) > 1:
        raise InputError(
            f"params hold several position tables ({', '.join(found)}): pass the subtree that has "
            "only one"
        )
    name, leaf = found[0], model.leaves[found[0]]
    check_array("params", name, leaf)
    rows = leaf.reshape(leaf.shape[-2:])
    return _Table(name, rows, *_split_rows(name, len(rows), _num_extra_tokens(model), grid))


def _split_rows(
    name: str, rows: int, extra: int, grid: tuple[int, int] | None
) -> tuple[int, tuple[int, int]]:
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
    grids = {n: _square(rows - n) for n in sorted({0, min(1, extra), extra})}
    grids = {n: square for n, square in grids.items() if square is not None}
    if len(grids) != 1:
        raise InputError(
            f"grid: the {rows} rows of {name}, at most {extra} of them for class and register "
            "tokens, do not determine a square of image tokens: pass grid=(rows, cols)"
        )
    return next(iter(grids.items()))


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
