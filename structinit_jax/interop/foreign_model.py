"""Describes a model of another project: its parameters by name, its sizes and its parts."""

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from structinit_jax.attention_init import AttentionWeights
from structinit_jax.attention_init.sites import Grid, check_shape, is_concrete
from structinit_jax.errors import InputError, is_count, require
from structinit_jax.interop.layouts import (
    FIELDS,
    Leaves,
    Stack,
    check_array,
    find_stack,
    find_stacks,
    replace_rows,
    unsupported,
)

# Patterns of names without the model's stem; for norms, without the block's prefix.
_POSITIONS = r"(?:.*\.)?(?:(?!query)[^.]*pos[^.]*(?:\.(?:embeddings?|weight))?|wpe)"
_EXTRA_TOKENS = (
    r"(?i:(?:.*\.)?(?:cls|class|dist|distillation|reg|registers?|storage)"
    r"(?:_?(?:tok|tokens?|emb|embed|embeddings?))*)"
)
# Relative positions, and norms that depend on a condition.
_CHANGES_MAPS = (
    r"(?:.*[._])?(?:rel_pos|relative_pos|relative_att|position_bias|attention_bias|norm1\.linear).*"
)
_WORDS = r"(?:.*\.)?(?:token_embedding|word_embeddings|embed_tokens|wte)(?:\..*)?"
_ROTARY = r"(?:.*[._])?(?:rope|rotary|freqs).*"
_PATCH_NORM = r"(?i:(?:.*\.)?(?:[^.]*patch.*|embeddings\.rms_norm)\.(?:weight|scale|gamma))"
_BIAS_TABLE = "relative_position_bias_table"  # of Swin and BEiT
_LAYER_SCALE = r"(?:.*\.)?((ls_?1|layer_?scale_?1|gamma1)\.\w+|(gamma|lambda)_?1|scale1)"
_UNSUPPORTED = {  # by a part of a name
    "attn_grid.": "belongs to the grid attention of MaxViT",
    "detection_tokens": "belongs to tokens that follow the image tokens",
}
_NORM_START = {"weight": 1, "scale": 1, "gamma": 1, "bias": 0, "beta": 0}  # of a LayerNorm
_NORMS = re.compile(r"(?i:[^.]*(?:norm|ln)[^.]*)|0\.norm|1\.net\.0")  # the last two: vit-pytorch


class PositionTable(NamedTuple):
    """Positions `rows` [T, D], the first `prefix` of which are not on the grid."""

    name: str
    rows: Any
    prefix: int
    grid: Grid


class ForeignModel:
    """A model of another project, with one of its stacks of attention layers and their sizes.

    `leaves` are the model's parameters by name, `bias_tables` the names of the relative position
    biases of the stack's layers, if the model has them.
    """

    def __init__(
        self, leaves: Leaves, stack: Stack, num_heads: int | None, bias_tables: Sequence[str] = ()
    ):
        self.leaves = leaves
        self.stack = stack
        self.bias_tables = bias_tables
        self._set_sizes(num_heads)
        for attention in stack.attentions:
            names = stack.layout.weights(attention)
            for field, name in zip(FIELDS, names, strict=True):
                inner = names.count(name) * self.num_heads * self.head_dim
                shape = (self.width, inner) if field == "out" else (inner, self.width)
                if stack.layout.kind == "heads":
                    shape = self._kernel_shape(field)
                elif stack.layout.kind == "linear":
                    shape = shape[::-1]
                check_array(name, leaves[name])
                if leaves[name].shape != shape:
                    why = f"has shape {leaves[name].shape} instead of {shape}"
                    raise unsupported(name, why)

    def _set_sizes(self, num_heads: int | None) -> None:
        layout = self.stack.layout
        attentions = self.stack.attentions
        has_heads = layout.kind == "heads"
        query, _, _, out = layout.weights(attentions[0])
        name = query if has_heads else out
        shape = self.leaves[name].shape
        if 0 in shape or (len(shape) != 2 and not has_heads):
            why = f"has shape {shape}, as if parameters were reshaped or partitioned"
            raise unsupported(name, why)
        self.num_layers = shape[0] if self.stack.stacked else len(attentions)
        shown = None  # number of heads that the parameters show
        if has_heads:
            self.width, shown, self.head_dim = shape[-3:]
        if self.bias_tables:
            name = self.bias_tables[0]
            shown = self.leaves[name].shape[1]
        if shown is not None:
            needs = f"left out, because {name} has {shown} heads"
            require("num_heads", num_heads, needs, num_heads in (None, shown))
        self.num_heads = num_heads if shown is None else shown
        if not has_heads:
            self.width, inner = shape if layout.kind == "torch" else shape[::-1]
            needs = (
                f"the number of heads, a divisor of the {inner} channels of {out}; shapes do not "
                "show it, but the model does (timm: model.blocks[0].attn.num_heads)"
            )
            fits = is_count(self.num_heads) and inner % self.num_heads == 0
            require("num_heads", self.num_heads, needs, fits)
            self.head_dim = inner // self.num_heads

    def _kernel_shape(self, field: str) -> tuple[int, ...]:
        """Returns the shape of one of our kernels, with a layer axis if the model stacks layers."""
        heads = (self.num_heads, self.head_dim)
        lead = (self.num_layers,) if self.stack.stacked else ()
        return (*lead, *heads, self.width) if field == "out" else (*lead, self.width, *heads)

    def sizes(self) -> dict[str, Any]:
        """Returns the arguments of an `AttentionSite` except the grid and the positions."""
        return dict(
            width=self.width,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            num_layers=self.num_layers,
            qk_scale=self.head_dim**-0.5,
        )

    # -- attention ---------------------------------------------------------------------------------

    def write_attention(self, weights: AttentionWeights) -> Leaves:
        """Returns new leaves for the projections that are not None, with biases of zero.

        In a leaf that several projections share, those that are None keep their values.
        """
        layout = self.stack.layout
        lead = () if self.stack.stacked else (self.num_layers,)
        new: Leaves = {}

        def write(name, rows, part, transposed=False):
            old = new.get(name, self.leaves[name])
            changed = replace_rows(old.T if transposed else old, rows, part * len(rows))
            new[name] = changed.T if transposed else changed

        for i, field in enumerate(FIELDS):
            kernels = getattr(weights, field)
            if kernels is None:
                continue
            check_shape(field, kernels, (*lead, *self._kernel_shape(field)))
            module = layout.modules[i]
            part = layout.modules[:i].count(module)  # index within a fused module
            for layer, attention in enumerate(self.stack.attentions):
                kernel = kernels if self.stack.stacked else kernels[layer]
                if layout.kind != "heads":
                    shape = (-1, self.width) if field == "out" else (self.width, -1)
                    kernel = kernel.reshape(shape).T  # [out, in]
                write(layout.weights(attention)[i], kernel, part, layout.kind == "linear")
                bias = f"{layout.names(attention)[i]}.bias"
                if bias in self.leaves:
                    rows, *rest = self.leaves[bias].shape
                    rows //= layout.modules.count(module)
                    write(bias, np.zeros((rows, *rest), np.float32), part)
                bias = f"{attention}.{field[0]}_bias"
                if bias in self.leaves:
                    write(bias, np.zeros(self.leaves[bias].shape, np.float32), 0)
        return new

    def require_assumptions(self) -> None:
        """Raises `InputError` for trained norms, and for parameters that change a scheme's maps."""
        layout = self.stack.layout
        known = set()
        for attention in self.stack.attentions:
            for name in layout.names(attention):
                known |= {f"{name}.{layout.leaf}", f"{name}.bias"}
            known |= {f"{attention}.{letter}_bias" for letter in "qkv"}
        inside = tuple(f"{a}." if a else "" for a in self.stack.attentions)
        for name, array in self._floats().items():
            is_norm = self._is_norm(name)
            start = _NORM_START.get(name.rpartition(".")[2]) if is_norm else None
            if start is not None:
                if is_concrete(array) and np.any(np.asarray(array) != start):
                    raise InputError(
                        f"params: {name} is not {start}: schemes need a freshly built model, whose "
                        "norms before attention and MLP start with scale 1 and bias 0"
                    )
            elif is_norm or name.startswith(inside) or self._matches(_CHANGES_MAPS, name):
                is_table = self.bias_tables and name.endswith(_BIAS_TABLE)
                is_rotary = not self.bias_tables and self._matches(_ROTARY, name)
                # `rotary_positions` and `layer_scale` find these, and their callers report them.
                is_reported = is_rotary or self._matches(_LAYER_SCALE, name)
                if name not in known and not is_table and not is_reported:
                    why = "may change the attention maps that schemes set"
                    raise InputError(f"params: {name} {why}: build the model without it")

    def norm_without_bias(self) -> str | None:
        """Returns the name of a norm that has no bias, like an RMSNorm, or None."""
        biases = {"weight": "bias", "scale": "bias", "gamma": "beta"}
        for name in filter(self._is_norm, self._floats()):
            module, _, leaf = name.rpartition(".")
            if leaf in biases and f"{module}.{biases[leaf]}" not in self.leaves:
                return module
        return None

    def patch_norm(self) -> str | None:
        """Returns the name of a norm after the patch embedding, or None if no name suggests any."""
        found = self._names(_PATCH_NORM)
        return next((x for x in found if np.shape(self.leaves[x]) == (self.width,)), None)

    def rotary_positions(self) -> str | None:
        """Returns the name of a parameter of rotary positions, or None if no name suggests any."""
        return next((name for name in self._floats() if self._matches(_ROTARY, name)), None)

    def layer_scale(self) -> str | None:
        """Returns the name of a LayerScale that makes the attention's output small, or None."""
        for name, array in self._floats().items():
            is_known = self._matches(_LAYER_SCALE, name) and is_concrete(array)
            if is_known and np.abs(np.asarray(array)).max() < 0.1:
                return name
        return None

    # -- positions and patches ---------------------------------------------------------------------

    def position_table(self, grid: Grid | None) -> PositionTable | None:
        """Finds the learned position table, or returns None. For `grid`, see `initialize`."""
        found = {}
        for name in self._names(_POSITIONS):
            shape = _table_shape(self.leaves[name], self.width)
            # Unlike a position table, a linear layer with a similar name has a bias.
            if shape and f"{name.removesuffix('weight')}bias" not in self.leaves:
                found[name] = shape
        if not found:
            return None
        if len(found) > 1:
            raise InputError(
                f"params hold several position tables ({', '.join(found)}): pass a subtree with "
                "only one of them, or positions=[N, D]"
            )
        ((name, shape),) = found.items()
        rows = self.leaves[name].reshape(-1, self.width)
        if len(shape) == 2 and grid in (None, shape):
            return PositionTable(name, rows, 0, shape)
        shapes = [np.shape(self.leaves[token]) for token in self._names(_EXTRA_TOKENS)]
        extra = sum(math.prod(s) // self.width for s in shapes if s[-1:] == (self.width,))
        return PositionTable(name, rows, *_split_rows(name, len(rows), extra, grid))

    def require_image_tokens(self) -> None:
        """Raises `InputError` if the model embeds words, sequences or videos, not images."""
        kernels = self._patch_kernels()
        if {2, 4} & set(kernels.values()):
            return
        for name in kernels or self._names(_WORDS):
            raise InputError(
                f"grid: {name} embeds words, or patches of a sequence or a video: pass grid=(1, N) "
                "for N tokens, or grid=(rows, cols) of a single frame, and measure the maps"
            )

    def patch_bias(self) -> str:
        """Returns the name of the patch embedding's bias."""
        found = list(self._patch_kernels())
        biases = [f"{kernel.rpartition('.')[0]}.bias" for kernel in found]
        if len(found) != 1 or biases[0] not in self.leaves:
            raise InputError(
                f"params hold {', '.join(found) or 'no kernel'}, but this scheme needs one patch "
                f"embedding to {self.width} channels with a bias, which it sets to a vector that "
                "all tokens share: build the model with such a bias, or use 'mimetic'"
            )
        return biases[0]

    def _patch_kernels(self) -> dict[str, int]:
        """Returns the ranks of kernels that may be the patch embedding's, by name.

        These are kernels of linear layers, or of convolutions with one to three spatial axes.
        """
        layout = self.stack.layout
        inside = tuple(f"{attention}." for attention in self.stack.attentions)
        axis = 0 if layout.kind == "torch" else -1  # of the outputs
        ranks = {}
        for name in self._names(rf".*\.{layout.leaf}"):
            shape = np.shape(self.leaves[name])
            ends_here = 2 <= len(shape) <= 5 and shape[axis] == self.width
            if ends_here and not name.startswith(inside):
                ranks[name] = len(shape)
        named = [name for name in ranks if re.search(r"patch|embeds\.proj", name.lower())]
        found = named or [name for name, rank in ranks.items() if rank >= 4]
        return {name: ranks[name] for name in found}

    # -- names -------------------------------------------------------------------------------------

    def _floats(self) -> Leaves:
        """Returns the floating-point arrays."""
        return {
            name: leaf
            for name, leaf in self.leaves.items()
            if isinstance(leaf, np.ndarray | jax.Array) and jnp.issubdtype(leaf.dtype, np.floating)
        }

    def _is_norm(self, name: str) -> bool:
        """Whether an array belongs to a norm before the attention or the MLP of a block."""
        if self.stack.attentions == ("",):  # The attention layer is the model: no block around it.
            return False
        module = name.rpartition(".")[0]
        block = next(filter(name.startswith, self.stack.blocks), None)
        if block is None or _NORMS.fullmatch(module.removeprefix(block)) is None:
            return False
        # In vit-pytorch, the first layer of an MLP without a norm of its own has this name too.
        is_linear = module == f"{block}1.net.0" and np.ndim(self.leaves.get(f"{module}.weight")) > 1
        return not is_linear

    def _names(self, pattern: str) -> Iterator[str]:
        """Yields the names below the model's stem that match a pattern."""
        return (name for name in self.leaves if self._matches(pattern, name))

    def _matches(self, pattern: str, name: str) -> bool:
        stem = self.stack.stem
        return name.startswith(stem) and re.fullmatch(pattern, name[len(stem) :]) is not None


def find_models(
    leaves: Leaves, num_heads: int | None, projections: Sequence[str] | None
) -> list[ForeignModel]:
    """Returns a model with each of its stacks: one for a ViT or BEiT, one per stage for a Swin."""
    for name, (part, why) in itertools.product(leaves, _UNSUPPORTED.items()):
        if part in name:
            raise unsupported(name, why)
    tables = [name for name in leaves if name.endswith(_BIAS_TABLE)]
    if not tables:
        return [ForeignModel(leaves, find_stack(leaves, projections), num_heads)]
    stacks = find_stacks(leaves, projections)
    # Stacks without tables belong to a text model.
    visual = [stack for stack in stacks if any(name.startswith(stack.blocks) for name in tables)]
    models = []
    for stack in visual or stacks:
        own = [name for block in stack.blocks for name in tables if name.startswith(block)]
        if len(own) != len(stack.attentions):
            raise unsupported(stack.attentions[0], f"has no {_BIAS_TABLE}, unlike other layers")
        models.append(ForeignModel(leaves, stack, num_heads, own))
    return models


def square_grid(tokens: int) -> Grid | None:
    """Returns the square grid of that many tokens, or None."""
    side = math.isqrt(max(tokens, 0))
    return (side, side) if side and side * side == tokens else None


def _table_shape(leaf: Any, width: int) -> tuple[int, ...]:
    """Returns (rows,) of a position table, (rows, cols) if it has the grid's axes, else ()."""
    shape = getattr(leaf, "shape", ())
    shape = (*(n for n in shape[:-1] if n > 1), *shape[-1:])
    return shape[:-1] if len(shape) in (2, 3) and shape[-1] == width else ()


def _split_rows(name, rows, extra, grid):
    """Returns the number of rows that precede the image tokens, and the grid.

    Some of the `extra` class and register tokens may have no row.
    """
    if grid is not None:
        found = [(rows - math.prod(grid), grid)]
        # Some models drop a row of their table, such as ViTDet in Hugging Face.
        found = found if 0 <= found[0][0] <= max(extra, 1) else []
    else:
        squares = {n: square_grid(rows - n) for n in sorted({0, min(1, extra), extra})}
        found = [(n, side) for n, side in squares.items() if side is not None]
    needs = (
        f"(rows, cols) of the image tokens: {name} has {rows} rows, at most {extra} of them for "
        "class and register tokens"
    )
    require("grid", grid, needs, len(found) == 1)
    return found[0]
