"""Describes a model of another project: its parameters by name, its sizes and its parts."""

import math
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from structinit_jax.attention_init import AttentionWeights
from structinit_jax.attention_init.sites import check_grid, check_shape
from structinit_jax.errors import InputError, is_count
from structinit_jax.interop.entries import Entry, Shape, check_array, encode_some
from structinit_jax.interop.layouts import FIELDS, Leaves
from structinit_jax.interop.stacks import Stack, find_stack

Grid = tuple[int, int]
EXTRA_NAMES = " (params named like cls_token, class_embedding, dist_token or registers)"
COMPUTED = "positions=[N, D] if the model computes those of its tokens from these rows"


class Host:
    """A model's parameters by name, the entries of its attention layers, and their sizes.

    `shapes` are those of our arrays by path, without the layer axis.
    """

    def __init__(self, leaves: Leaves, stack: Stack, num_heads: int | None):
        self.leaves, self.stack = leaves, stack
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
        if not is_count(num_heads) or inner % num_heads:
            raise InputError(
                f"num_heads={num_heads!r}: needs a whole number that divides the {inner} channels"
            )
        self.num_heads, self.head_dim = num_heads, inner // num_heads

    def shapes_of(self, entry: Entry) -> list[Shape]:
        """Shapes of our arrays in an entry, with the layer axis if the model stacks its layers."""
        lead = (self.num_layers,) if entry.layer is None else ()
        return [(*lead, *self.shapes[path]) for path in entry.paths]

    def position_table(self, grid: Grid | None) -> "Table | None":
        """Finds the learned position table. See `initialize` for `grid`."""
        if grid is not None:
            check_grid("grid", grid)
        found = [
            name
            for name in self._names(self.stack.layout.positions)
            if _table_shape(self.leaves[name], self.width)
        ]
        if not found:
            return None
        if len(found) > 1:
            raise InputError(
                f"params hold several position tables ({', '.join(found)}): pass the subtree of one"
            )
        name, leaf = found[0], self.leaves[found[0]]
        check_array("params", name, leaf)
        rows = leaf.reshape(-1, self.width)
        shape = _table_shape(leaf, self.width)
        if len(shape) == 2 and grid in (None, shape):
            return Table(name, rows, 0, shape)
        extra = sum(math.prod(self.leaves[n].shape) // self.width for n in self.extra_tokens())
        return Table(name, rows, *_split_rows(name, len(rows), extra, grid))

    def positions(self, given: Any | None, grid: Grid | None) -> "Table":
        """Returns the encoding that the model adds to its tokens.

        Args:
          given: The encoding [N, D], or None for the learned position table.
          grid: See `initialize`.

        Raises:
          InputError: There is none, or it does not fit the model or the grid.
        """
        if given is None:
            table = self.position_table(grid)
            if table is None:
                names = self.stack.layout.position_names
                raise InputError(
                    f"positions: params hold no position table of width {self.width} ({names}). "
                    "Pass the encoding that the model adds to its tokens as positions=[N, D], or "
                    "its rotary positions as rotations, or for a scheme that needs none "
                    "('mimetic') grid=(rows, cols); no scheme fits relative positions"
                )
            return table
        check_array("positions", "the encoding", given)
        if given.ndim != 2 or given.shape[1] != self.width:
            raise InputError(
                f"positions has shape {given.shape}, but the model needs [N, {self.width}]"
            )
        if grid is not None:
            check_grid("grid", grid)
        elif (grid := square(len(given))) is None:
            raise InputError(
                f"grid: {len(given)} positions are not a square: pass grid=(rows, cols)"
            )
        return Table("positions", given, 0, grid)

    def sizes(self) -> dict[str, Any]:
        """Returns the arguments of an `AttentionSite` beside the grid and the positions."""
        return dict(
            width=self.width,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            num_layers=self.num_layers,
            qk_scale=self.head_dim**-0.5,
        )

    def patch_kernels(self) -> list[str]:
        """Returns the names of what may be the kernel of the patch embedding.

        It may be a linear layer's or a convolution's (three-dimensional in models of videos).
        """
        layout = self.stack.layout

        def may_be_one(name):
            rank = len(getattr(self.leaves[name], "shape", ()))
            return rank in (4, 5) or (rank == 2 and (layout.torch or "patch" in name.lower()))

        return [
            name
            for name in self._names(rf"{p}\.{layout.leaf}" for p in layout.patches)
            if not name.startswith(tuple(f"{attention}." for attention in self.stack.attentions))
            and may_be_one(name)
            and self.leaves[name].shape[0 if layout.torch else -1] == self.width
        ]

    def patch_kernel(self) -> str:
        """Returns the name of the patch embedding's kernel, a convolution's or a linear layer's."""
        found = self.patch_kernels()
        if len(found) != 1:
            raise InputError(
                f"params hold {', '.join(found) or 'no kernel'} where a patch embedding to "
                f"{self.width} channels is needed: build the scheme with patch_scale=1 and "
                "multiply that kernel yourself"
            )
        return found[0]

    def patch_norm(self) -> str | None:
        """Returns the name of the scale of a norm of the patch embeddings, as in AIMv2."""
        return next(
            self._names(rf"{n}\.(?:weight|scale)" for n in self.stack.layout.patch_norms), None
        )

    def patch_gain(self) -> str:
        """Returns the name of the array that sets the size of the patch embeddings."""
        return self.patch_norm() or self.patch_kernel()

    def patch_rms(self) -> jax.Array:
        """Returns the root mean square (> 0) of the embeddings of white images of variance 1."""
        gain = jnp.asarray(self.leaves[self.patch_gain()], jnp.float32)
        return jnp.maximum(jnp.sqrt(jnp.sum(jnp.square(gain)) / self.width), 1e-12)

    def patch_bias(self) -> str:
        """Returns the name of the patch embedding's bias, which `leaves` need not hold."""
        return f"{self.patch_kernel().rpartition('.')[0]}.bias"

    def arrays(self) -> dict[str, jax.Array]:
        """Returns our arrays of the attention layers by path, with a leading layer axis."""
        layers: dict[str, list[jax.Array]] = {}
        for entry in self.entries:
            arrays = entry.decode(jnp.asarray(self.leaves[entry.name]), self.shapes_of(entry))
            for path, array in zip(entry.paths, arrays, strict=True):
                layers.setdefault(path, []).append(array)
        return {path: a[0] if self.stack.stacked else jnp.stack(a) for path, a in layers.items()}

    def with_attention(self, weights: AttentionWeights) -> Leaves:
        """Returns new leaves with the projections that are not None, and zero biases for them."""
        ours: dict[str, Any] = {}
        for field in FIELDS:
            kernel = getattr(weights, field)
            if kernel is not None:
                path = f"attention/{field}"
                check_shape(field, kernel, (self.num_layers, *self.shapes[f"{path}/kernel"]))
                ours[f"{path}/kernel"] = kernel
                bias_shape = (self.num_layers, *self.shapes[f"{path}/bias"])
                ours[f"{path}/bias"] = np.zeros(bias_shape, np.float32)
        new = dict(self.leaves)
        for entry in self.entries:
            if any(path in ours for path in entry.paths):
                new[entry.name] = encode_some(entry, new[entry.name], ours, self.shapes_of(entry))
        return new

    def extra_tokens(self) -> list[str]:
        """Returns the names of class, distillation and register tokens, the class token first."""
        pattern = (
            r"(?i:(?:.*\.)?(?:cls|class|dist|distillation|reg|registers?)_?"
            r"(?:tok|tokens?|emb|embed|embeddings?)?)"
        )
        names = [
            name
            for name in self._names([pattern])
            if getattr(self.leaves[name], "shape", ())[-1:] == (self.width,)
        ]
        return sorted(names, key=lambda name: "cls" not in name and "class" not in name)

    def has_pre_norm(self) -> bool:
        """Returns whether tokens are normalized before the first block too, as in CLIP."""
        pattern = r"(?:norm_pre|ln_pre|pre_lay(?:er|r)norm)\.(?:weight|scale)"
        return any(True for _ in self._names([pattern]))

    def _names(self, patterns: Iterable[str]) -> Iterator[str]:
        """Yields the names below the model's stem that match one of the patterns."""
        pattern = re.compile(f"{re.escape(self.stack.stem)}(?:{'|'.join(patterns)})")
        return (name for name in self.leaves if pattern.fullmatch(name))


def find_host(leaves: Leaves, layout: str | None, num_heads: int | None) -> Host:
    """Finds the attention layers of a model with a single grid of tokens."""
    return Host(leaves, find_stack(leaves, layout), num_heads)


class Table(NamedTuple):
    """A learned position table: `rows` [T, D], the first `prefix` of which are off the grid."""

    name: str
    rows: Any
    prefix: int
    grid: tuple[int, int]


def _table_shape(leaf: Any, width: int) -> tuple[int, ...]:
    """Returns (rows,) of a position table or (rows, cols) of one with the grid's axes, else ()."""
    shape = list(getattr(leaf, "shape", ()))
    while shape[:1] == [1]:
        del shape[0]
    return tuple(shape[:-1]) if len(shape) in (2, 3) and shape[-1] == width else ()


def _split_rows(name, rows, extra, grid):
    """Returns the number of rows before those of the grid, and the grid.

    Of the `extra` class and register tokens, some may have no row.
    """
    if grid is not None:
        prefix = rows - math.prod(grid)
        if not 0 <= prefix <= extra:
            raise InputError(
                f"grid={grid} has {math.prod(grid)} tokens, but {name} has {rows} rows, at most "
                f"{extra} of them for class and register tokens{EXTRA_NAMES}: pass another grid, "
                f"or {COMPUTED}"
            )
        return prefix, grid
    squares = {n: square(rows - n) for n in sorted({0, min(1, extra), extra})}
    found = [(n, square) for n, square in squares.items() if square is not None]
    if len(found) != 1:
        raise InputError(
            f"grid: the {rows} rows of {name}, at most {extra} of them for class and register "
            f"tokens{EXTRA_NAMES}, do not determine a square of image tokens: pass "
            f"grid=(rows, cols), or {COMPUTED}"
        )
    return found[0]


def square(tokens: int) -> Grid | None:
    """Returns the square grid of that many tokens, or None."""
    side = math.isqrt(max(tokens, 0))
    return (side, side) if side and side * side == tokens else None
