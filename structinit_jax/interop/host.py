"""Describes a model of another project: its attention layers, sizes, positions and patches."""

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from structinit_jax.attention_init import AttentionWeights
from structinit_jax.attention_init.sites import check_shape, is_concrete
from structinit_jax.errors import InputError, is_count, require
from structinit_jax.interop.layouts import (
    FIELDS,
    Leaves,
    Stack,
    find_stack,
    find_stacks,
    is_float_array,
    replace_rows,
)

Grid = tuple[int, int]

# What the names of parameters show, to be found with `search`.
POSITIONS = re.compile(r"(^|\.)([^.]*pos[^.]*(\.(embeddings?|weight))?|wpe)$")
EXTRA_TOKENS = re.compile(  # class and register tokens
    r"(?i)(^|\.)(cls|class|dist|distillation|reg|registers?|storage)_?"
    r"(tok|tokens?|emb|embed|embeddings?)?$"
)
RELATIVE = re.compile(r"(^|[._])(rel_pos|relative_pos|relative_att|position_bias|attention_bias)")
ROTARY = re.compile(r"(^|[._])(rope|rotary|freqs)")
LAYER_SCALE = re.compile(  # of the attention
    r"(^|\.)((ls_?1|layer_?scale_?1)\.\w+|(gamma|lambda)_?1|scale1)$"
)
GRID_ATTENTION = re.compile(r"(^|\.)attn_grid\.")  # of MaxViT
PATCHES = re.compile(r"(?i)patch|embeds\.proj")
BIAS_TABLE = "relative_position_bias_table"  # of Swin and BEiT, at the end of a name
# Names of modules below a block. The last two are vit-pytorch's.
NORM = re.compile(r"(?i)^([^.]*(norm|ln)[^.]*|0\.norm|1\.net\.0)$")
NORM_STARTS = {"weight": 1, "scale": 1, "gamma": 1, "bias": 0, "beta": 0}


class PositionTable(NamedTuple):
    """Positions `rows` [T, D], the first `prefix` of which are off the grid."""

    name: str
    rows: Any
    prefix: int
    grid: Grid


class Host:
    """A stack of attention layers among the parameters of a model, and their sizes.

    `bias_tables` are the names of the layers' relative position biases, if the model has them.
    """

    def __init__(
        self, leaves: Leaves, stack: Stack, num_heads: int | None, bias_tables: Sequence[str] = ()
    ):
        self.stack = stack
        self.leaves = {n: leaf for n, leaf in leaves.items() if n.startswith(stack.stem)}
        self.floats = {n: leaf for n, leaf in self.leaves.items() if is_float_array(leaf)}
        self.bias_tables = bias_tables
        out = stack.layout.weights(stack.attentions[0])[-1]
        shape = leaves[out].shape
        self.num_layers = shape[0] if stack.stacked else len(stack.attentions)
        if stack.layout.torch:
            self.width, inner = shape
            if bias_tables:
                _check_heads(num_heads, bias_tables[0], leaves[bias_tables[0]].shape[1])
                num_heads = leaves[bias_tables[0]].shape[1]
            needs = f"the number of heads, which share the {inner} channels of {out}"
            require("num_heads", num_heads, needs, lambda n: is_count(n) and inner % n == 0)
            self.num_heads = num_heads
            self.head_dim = inner // num_heads
        else:
            self.num_heads, self.head_dim, self.width = shape[-3:]
            _check_heads(num_heads, out, self.num_heads)

    def sizes(self) -> dict[str, Any]:
        """Returns the arguments of an `AttentionSite` besides the grid and the positions."""
        return dict(
            width=self.width,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            num_layers=self.num_layers,
            qk_scale=self.head_dim**-0.5,
        )

    def find(self, pattern: re.Pattern[str]) -> Leaves:
        """Returns the arrays of floats whose name matches a pattern."""
        return {name: leaf for name, leaf in self.floats.items() if pattern.search(name)}

    # -- attention ---------------------------------------------------------------------------------

    def write_attention(self, weights: AttentionWeights) -> Leaves:
        """Returns new leaves for the projections that are not None, with biases of zero.

        Projections that are None keep their values in a leaf that several projections share.
        """
        layout = self.stack.layout
        heads = (self.num_heads, self.head_dim)
        new: Leaves = {}

        def write(name, values, part, count):
            """Replaces one of `count` equal parts of a leaf; None stands for zeros."""
            old = new.get(name, self.leaves[name])
            rows = len(old) // count
            shape = (rows, *old.shape[1:])
            values = np.zeros(shape, np.float32) if values is None else values
            if values.shape != shape:
                needs = f"has parts of shape {shape} where equal layers have {values.shape}"
                raise _unsupported(name, needs)
            new[name] = replace_rows(old, values, part * rows)

        for i, field in enumerate(FIELDS):
            kernels = getattr(weights, field)
            if kernels is None:
                continue
            inputs, outputs = (heads, (self.width,)) if field == "out" else ((self.width,), heads)
            check_shape(field, kernels, (self.num_layers, *inputs, *outputs))
            part = layout.modules[:i].count(layout.modules[i])  # of a module with several fields
            count = layout.modules.count(layout.modules[i])
            for layer, attention in enumerate(self.stack.attentions):
                kernel = kernels if self.stack.stacked else kernels[layer]
                if layout.torch:  # [out, in]
                    kernel = kernel.reshape(math.prod(inputs), math.prod(outputs)).T
                write(layout.weights(attention)[i], kernel, part, count)
                bias = f"{layout.names(attention)[i]}.bias"
                if bias in self.leaves:
                    write(bias, None, part, count)
                bias = f"{attention}.{field[0]}_bias"
                if bias in self.leaves:
                    write(bias, None, 0, 1)
        return new

    def require_assumptions(self) -> None:
        """Raises `InputError` if the parameters show that a scheme's maps would not be the model's.

        Such parameters are norms that have been trained, and all that change the maps besides the
        projections and the bias tables, which schemes set.
        """
        layout = self.stack.layout
        known = {name for name in self.floats if name.endswith(BIAS_TABLE)}
        for attention in self.stack.attentions:
            for name in layout.names(attention):
                known |= {f"{name}.{layout.leaf}", f"{name}.bias"}
            known |= {f"{attention}.{letter}_bias" for letter in "qkv"}
        inside = self.stack.inside
        for name, array in self.floats.items():
            module, _, leaf = name.rpartition(".")
            blocks = [block for block in self.stack.blocks if name.startswith(block)]
            if blocks and NORM.search(module.removeprefix(blocks[0])):
                start = NORM_STARTS.get(leaf)
                if start is not None and is_concrete(array) and np.any(np.asarray(array) != start):
                    raise InputError(
                        f"params: {name} is not {start}: schemes need a freshly built model, whose "
                        "norms before attention and MLP start with scale 1 and bias 0"
                    )
            elif name not in known and (name.startswith(inside) or RELATIVE.search(name)):
                raise InputError(
                    f"params: {name} may change the attention maps, which no scheme could then "
                    "set: build the model without it"
                )

    def layer_scale(self) -> str | None:
        """Returns the name of a LayerScale that makes the attention's output small, or None."""
        for name, array in self.find(LAYER_SCALE).items():
            if is_concrete(array) and np.abs(np.asarray(array)).max() < 0.1:
                return name
        return None

    # -- positions and patches ---------------------------------------------------------------------

    def position_table(self, grid: Grid | None) -> PositionTable | None:
        """Finds the learned position table, or returns None. For `grid` see `initialize`."""
        tables = {}
        for name, leaf in self.find(POSITIONS).items():
            axes = tuple(n for n in leaf.shape[:-1] if n > 1)  # the rows, or those of the grid
            if leaf.shape[-1:] == (self.width,) and len(axes) in (1, 2):
                tables[name] = axes
        if not tables:
            return None
        if len(tables) > 1:
            raise InputError(
                f"params hold several position tables ({', '.join(tables)}): pass the subtree of "
                "one, or positions=[N, D]"
            )
        ((name, axes),) = tables.items()
        rows = self.leaves[name].reshape(-1, self.width)
        if len(axes) == 2 and grid in (None, axes):
            return PositionTable(name, rows, 0, axes)
        tokens = [
            leaf for leaf in self.find(EXTRA_TOKENS).values() if self.width in leaf.shape[-1:]
        ]
        extra = sum(leaf.size // self.width for leaf in tokens)
        # Of the class and register tokens, some may have no row.
        prefixes = range(extra + 1) if grid else sorted({0, min(1, extra), extra})
        grids = {prefix: grid or square(len(rows) - prefix) for prefix in prefixes}
        found = [(n, g) for n, g in grids.items() if g and n + math.prod(g) == len(rows)]
        if len(found) != 1:
            raise InputError(
                f"grid={grid} does not fit the {len(rows)} rows of {name}, at most {extra} of them "
                "for class and register tokens: pass grid=(rows, cols) of the image tokens, or "
                "positions"
            )
        return PositionTable(name, rows, *found[0])

    def require_image_patches(self) -> None:
        """Raises `InputError` if the patches are of a sequence or a video: not of a square."""
        kernels = self._patch_kernels()
        if kernels and all(kernel.ndim in (3, 5) for kernel in kernels.values()):
            name = next(iter(kernels))
            raise InputError(
                f"grid: {name} of shape {kernels[name].shape} embeds patches of a sequence or a "
                "video: pass grid=(1, N) for N tokens, or grid=(rows, cols) of a single frame"
            )

    def patch_bias(self) -> str:
        """Returns the name of the patch embedding's bias."""
        found = list(self._patch_kernels())
        biases = [f"{kernel.rpartition('.')[0]}.bias" for kernel in found]
        if len(found) != 1 or biases[0] not in self.leaves:
            raise InputError(
                f"params hold {', '.join(found) or 'no kernel'} where one patch embedding to "
                f"{self.width} channels with a bias is needed, in which this scheme puts a vector "
                "that all tokens share: build the model with it, or use 'mimetic'"
            )
        return biases[0]

    def _patch_kernels(self) -> Leaves:
        """Returns kernels that may be the patch embedding's: convolutions', or linear layers'."""
        layout = self.stack.layout
        output = 0 if layout.torch else -1  # axis
        found = {}
        for name, leaf in self.floats.items():
            is_kernel = name.endswith(f".{layout.leaf}") and 2 <= leaf.ndim <= 5
            if (
                is_kernel
                and leaf.shape[output] == self.width
                and not name.startswith(self.stack.inside)
            ):
                found[name] = leaf
        named = [name for name in found if PATCHES.search(name)]
        convolutions = [name for name, leaf in found.items() if leaf.ndim >= 4]
        return {name: found[name] for name in named or convolutions}


def find_hosts(leaves: Leaves, num_heads: int | None) -> list[Host]:
    """Finds the stacks of attention layers: one of a ViT or BEiT, one for each stage of a Swin."""
    for name in filter(GRID_ATTENTION.search, leaves):
        raise _unsupported(name, "belongs to the grid attention of MaxViT")
    tables = [name for name in leaves if name.endswith(BIAS_TABLE)]
    if not tables:
        return [Host(leaves, find_stack(leaves), num_heads)]
    hosts = []
    for stack in find_stacks(leaves):
        own = [name for block in stack.blocks for name in tables if name.startswith(block)]
        if own:  # A stack without tables is of a text model.
            hosts.append(Host(leaves, stack, num_heads, own))
    if not hosts:
        raise _unsupported(tables[0], "is not in the block of an attention layer")
    return hosts


def square(tokens: int) -> Grid | None:
    """Returns the square grid of that many tokens, or None."""
    side = math.isqrt(max(tokens, 0))
    return (side, side) if side and side * side == tokens else None


def _check_heads(num_heads: int | None, name: str, shown: int) -> None:
    """Checks a number of heads against the one that the parameter `name` shows."""
    needs = f"left out, since {name} shows {shown} heads"
    require("num_heads", num_heads, needs, lambda number: number in (None, shown))


def _unsupported(name: str, why: str) -> InputError:
    """Returns the error for a model in which no scheme can set the attention maps."""
    return InputError(
        f"params: {name} {why}; such models are not supported, only ViTs with one grid of tokens, "
        "Swin and BEiT"
    )
