"""Reading and writing the attention weights of a model that was built elsewhere."""

import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from structinit_jax.attention_init import AttentionInit, AttentionSite, AttentionWeights
from structinit_jax.errors import InputError
from structinit_jax.interop.layouts import FIELDS, Stack, find_stack
from structinit_jax.interop.leaves import Leaves, check_array, flatten, like


def initialize(
    params: Any,
    attention_init: AttentionInit,
    key: jax.Array,
    *,
    layout: str | None = None,
    num_heads: int | None = None,
    grid: tuple[int, int] | None = None,
    positions: np.ndarray | jax.Array | None = None,
) -> Any:
    """Puts a scheme's weights into the parameters of a freshly built model.

    Everything that the scheme does not set stays as it is. The biases of what it sets become zero,
    as schemes assume; so does every scheme assume that the LayerNorm before the attention is at
    its start, scale 1 and bias 0, and that query-key products are scaled by d^-1/2.

    A learned position table is given to the scheme as trainable, and takes the encoding that the
    scheme starts from; rows of class and register tokens keep theirs.

    Args:
      params: a state dict, Linen tree, NNX module, NNX state or pure dict. It is not changed.
      attention_init: the scheme, such as `attention_init.impulse()`.
      key: draws what is random.
      layout: one of `LAYOUTS`; None finds it by the names.
      num_heads: h, which a state dict of torch does not tell.
      grid: (rows, cols) of the image tokens; None takes a square.
      positions: [N, D] encoding that the model adds to its tokens without having it in `params`,
        such as `sincos_positions(grid, D)`. A table in `params` is then neither read nor written.

    Returns:
      Parameters of the same structure, array kinds (NumPy or JAX), types and shardings. Arrays
      that stay as they are may be the caller's own.

    Raises:
      InputError: if something is missing, does not fit, or must be told by an argument.
    """
    model = _Model.find(params, layout, num_heads)
    weights = attention_init(key, model.site(grid, positions))
    return model.write(weights, grid)


def attention_site(
    params: Any,
    *,
    layout: str | None = None,
    num_heads: int | None = None,
    grid: tuple[int, int] | None = None,
    positions: np.ndarray | jax.Array | None = None,
) -> AttentionSite:
    """What an attention scheme may know of the model; arguments as for `initialize`."""
    return _Model.find(params, layout, num_heads).site(grid, positions)


def read(
    params: Any,
    *,
    layout: str | None = None,
    num_heads: int | None = None,
    grid: tuple[int, int] | None = None,
) -> AttentionWeights:
    """The model's attention weights in a scheme's layout; arguments as for `initialize`.

    `positions` is None where the parameters have no table.
    """
    return _Model.find(params, layout, num_heads).read(grid)


def write(
    params: Any,
    weights: AttentionWeights,
    *,
    layout: str | None = None,
    num_heads: int | None = None,
    grid: tuple[int, int] | None = None,
) -> Any:
    """New parameters with the weights that are not None; arguments as for `initialize`."""
    return _Model.find(params, layout, num_heads).write(weights, grid)


@dataclasses.dataclass(frozen=True, eq=False)
class _Model:
    """The leaves of a model, where its attention lies in them, and the sizes of that."""

    leaves: Leaves
    rebuild: Any
    stack: Stack
    width: int
    num_heads: int
    head_dim: int
    num_layers: int

    @classmethod
    def find(cls, params: Any, layout: str | None, num_heads: int | None) -> "_Model":
        leaves, rebuild = flatten(params)
        stack = find_stack(leaves, layout)
        first = stack.attentions[0]
        if stack.layout.linear:
            width, inner = _shape(leaves, stack.piece(first, "out"), 2)
            heads = _check_heads(num_heads, inner)
            dim, layers = inner // heads, len(stack.attentions)
        else:
            path = stack.piece(first, "query")
            *lead, width, heads, dim = _shape(leaves, path, 4 if stack.stacked else 3)
            layers = lead[0] if stack.stacked else len(stack.attentions)
            if num_heads not in (None, heads):
                raise InputError(f"num_heads={num_heads}, but {path} has {heads} heads")
        model = cls(leaves, rebuild, stack, width, heads, dim, layers)
        model._check_shapes()
        return model

    def site(
        self, grid: tuple[int, int] | None, positions: np.ndarray | jax.Array | None
    ) -> AttentionSite:
        trainable = positions is None
        if positions is None:
            path = self._table_path()
            if path is None:
                looked = ", ".join(self.stack.layout.positions)
                raise InputError(
                    f"positions: params hold no position table of width {self.width} (looked for "
                    f"{looked}): pass the encoding that the model adds, positions=[N, D], such as "
                    "attention_init.sincos_positions(grid, D)"
                )
            rows, grid = self._split_table(path, grid)
            positions = jnp.asarray(_rows(self.leaves[path])[rows:], jnp.float32)
        elif positions.ndim != 2 or positions.shape[1] != self.width:
            raise InputError(
                f"positions has shape {positions.shape}, but the model needs [N, {self.width}], "
                "without class and register tokens"
            )
        elif grid is None:
            grid = _square(len(positions))
            if grid is None:
                raise InputError(
                    f"grid: {len(positions)} positions are no square: pass grid=(rows, cols)"
                )
        return AttentionSite(
            grid=grid,
            width=self.width,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            num_layers=self.num_layers,
            qk_scale=self.head_dim**-0.5,
            positions=positions,
            positions_trainable=trainable,
        )

    def read(self, grid: tuple[int, int] | None) -> AttentionWeights:
        fields = {}
        for field in FIELDS:
            layers = [self._kernel(attention, field) for attention in self.stack.attentions]
            fields[field] = layers[0] if self.stack.stacked else jnp.stack(layers)
        path = self._table_path()
        if path is not None:
            prefix, _ = self._split_table(path, grid)
            fields["positions"] = jnp.asarray(_rows(self.leaves[path])[prefix:])
        return AttentionWeights(**fields)

    def write(self, weights: AttentionWeights, grid: tuple[int, int] | None) -> Any:
        new = dict(self.leaves)
        for field in FIELDS:
            start = getattr(weights, field)
            if start is None:
                continue
            expected = (self.num_layers, *self._kernel_shape(field))
            if start.shape != expected:
                raise InputError(
                    f"weights.{field} has shape {start.shape}, but the model needs {expected}"
                )
            for layer, attention in enumerate(self.stack.attentions):
                kernel = start if self.stack.stacked else start[layer]
                self._write_kernel(new, attention, field, kernel)
                self._zero_biases(new, attention, field)
        if weights.positions is not None:
            path = self._table_path()
            if path is None:
                raise InputError(
                    "weights.positions: the scheme sets the position encoding, but params hold no "
                    "position table that can take it"
                )
            old = self.leaves[path]
            prefix, _ = self._split_table(path, grid)
            kept = jnp.asarray(_rows(old)[:prefix], jnp.float32)
            start = jnp.asarray(weights.positions, jnp.float32)
            expected = (len(_rows(old)) - prefix, self.width)
            if start.shape != expected:
                raise InputError(
                    f"weights.positions has shape {start.shape}, but {path} takes {expected}"
                )
            new[path] = like(jnp.concatenate([kept, start]).reshape(old.shape), old)
        return self.rebuild(new)

    def _kernel_shape(self, field: str) -> tuple[int, ...]:
        heads = (self.num_heads, self.head_dim)
        return (*heads, self.width) if field == "out" else (self.width, *heads)

    def _kernel(self, attention: str, field: str) -> jax.Array:
        weight = jnp.asarray(self.leaves[self.stack.piece(attention, field)])
        if not self.stack.layout.linear:
            return weight
        if self.stack.layout.fused and field != "out":
            weight = weight.reshape(3, -1, self.width)[FIELDS.index(field)]
        return weight.T.reshape(self._kernel_shape(field))

    def _write_kernel(self, new: Leaves, attention: str, field: str, kernel: Any) -> None:
        path = self.stack.piece(attention, field)
        old = new[path]
        if self.stack.layout.linear:
            split = -1 if field == "out" else 1
            kernel = kernel.reshape(math.prod(kernel.shape[:split]), -1).T
            if self.stack.layout.fused and field != "out":
                new[path] = _with_slot(old, field, kernel)
                return
        new[path] = like(kernel, old)

    def _zero_biases(self, new: Leaves, attention: str, field: str) -> None:
        for path in self.stack.biases(new, attention, field):
            old = new[path]
            check_array(path, old)
            inner = self.num_heads * self.head_dim
            if self.stack.layout.fused and field != "out" and old.shape == (3 * inner,):
                new[path] = _with_slot(old, field, jnp.zeros(inner))
            else:
                new[path] = like(jnp.zeros(old.shape), old)

    def _check_shapes(self) -> None:
        layout, inner = self.stack.layout, self.num_heads * self.head_dim
        for attention in self.stack.attentions:
            for field in FIELDS:
                path = self.stack.piece(attention, field)
                if not layout.linear:
                    lead = (self.num_layers,) if self.stack.stacked else ()
                    expected = (*lead, *self._kernel_shape(field))
                elif field == "out":
                    expected = (self.width, inner)
                else:
                    expected = (3 * inner if layout.fused else inner, self.width)
                if self.leaves[path].shape != expected:
                    raise InputError(
                        f"params: {path} has shape {self.leaves[path].shape}, not {expected} like "
                        "the rest: schemes need equal layers, with as many keys as queries"
                    )

    def _table_path(self) -> str | None:
        """The path of the learned position table, if there is one."""
        found = []
        for path, leaf in self.leaves.items():
            if not path.startswith(self.stack.stem):
                continue
            name = path[len(self.stack.stem) :]
            known = any(re.fullmatch(pattern, name) for pattern in self.stack.layout.positions)
            shape = getattr(leaf, "shape", ())
            lead = math.prod(shape[:-2])
            if known and shape[1:] and shape[-1] == self.width and lead == 1 < shape[-2]:
                found.append(path)
        if len(found) > 1:
            raise InputError(
                f"params hold several position tables ({', '.join(found)}): pass the part of the "
                "tree that has one"
            )
        for path in found:
            check_array(path, self.leaves[path])
        return found[0] if found else None

    def _split_table(self, path: str, grid: tuple[int, int] | None) -> tuple[int, tuple[int, int]]:
        """The rows before the grid's, and the grid. Not every extra token has a row."""
        rows = len(_rows(self.leaves[path]))
        extra = self._extra_tokens()
        if grid is not None:
            prefix = rows - math.prod(grid)
            if not 0 <= prefix <= extra:
                raise InputError(
                    f"grid={grid} has {math.prod(grid)} tokens, but {path} has {rows} rows, of "
                    f"which at most {extra} are for class and register tokens"
                )
            return prefix, grid
        grids = {n: _square(rows - n) for n in sorted({0, min(1, extra), extra})}
        grids = {n: square for n, square in grids.items() if square is not None}
        if len(grids) != 1:
            raise InputError(
                f"grid: the {rows} rows of {path} (at most {extra} of them for class and register "
                "tokens) do not tell one square of image tokens: pass grid=(rows, cols)"
            )
        return next(iter(grids.items()))

    def _extra_tokens(self) -> int:
        """How many class, distillation and register tokens the model has."""
        pattern = r"(?:.*/)?(?:cls|class|dist|distillation|reg|register)(?:_tokens?|_embedding)?"
        return sum(
            math.prod(leaf.shape) // self.width
            for path, leaf in self.leaves.items()
            if path.startswith(self.stack.stem)
            and re.fullmatch(pattern, path[len(self.stack.stem) :])
            and getattr(leaf, "shape", ())[-1:] == (self.width,)
        )


def _check_heads(num_heads: int | None, inner: int) -> int:
    if num_heads is None:
        raise InputError(
            f"num_heads: the names and shapes do not tell into how many heads the {inner} channels "
            "of the attention divide: pass num_heads=…"
        )
    if num_heads < 1 or inner % num_heads:
        raise InputError(
            f"num_heads={num_heads} does not divide the {inner} channels of the attention"
        )
    return num_heads


def _shape(leaves: Leaves, path: str, rank: int) -> tuple[int, ...]:
    shape = leaves[path].shape
    if len(shape) != rank:
        raise InputError(f"params: {path} has shape {shape}, but needs {rank} axes")
    return shape


def _square(tokens: int) -> tuple[int, int] | None:
    side = math.isqrt(max(tokens, 0))
    return (side, side) if side and side * side == tokens else None


def _rows(table: Any) -> Any:
    return table.reshape(table.shape[-2:])


def _with_slot(old: Any, field: str, part: Any) -> Any:
    """A fused weight or bias with one of its three parts replaced."""
    parts = jnp.split(jnp.asarray(old), 3)
    parts[FIELDS.index(field)] = jnp.asarray(part).astype(old.dtype)
    return like(jnp.concatenate(parts), old)
