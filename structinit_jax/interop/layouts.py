"""How other projects name and lay out the parts of attention, and where a model has them.

Paths here are written with slashes, also where a state dict has dots.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping

from structinit_jax.errors import InputError
from structinit_jax.interop.leaves import Leaves, check_array

FIELDS = ("query", "key", "value", "out")


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """One project's names.

    Attributes:
      example: a name to look for, as the project writes it.
      attention: pattern of the path of an attention layer. Its group `stem` is what precedes the
        model; `index`, where it takes part, is the number of the layer.
      pieces: name of the weight of each of `FIELDS` below the attention layer. Equal names for
        query, key and value mean one fused weight, in this order.
      biases: the same for the biases; absent ones are fine.
      linear: whether weights are those of torch's Linear, [out, in], rather than Flax's
        MultiHeadAttention, [D, h, d] and [h, d, D].
      positions: names below the stem that a learned position table may have; a name is a pattern.
      anchors: the fields of which one is enough to tell an attention layer.
    """

    example: str
    attention: str
    pieces: Mapping[str, str]
    biases: Mapping[str, tuple[str, ...]]
    linear: bool
    positions: tuple[str, ...]
    anchors: tuple[str, ...] = FIELDS

    @property
    def fused(self) -> bool:
        """Whether query, key and value are rows of one weight."""
        return self.pieces["query"] == self.pieces["key"]


def _layout(example, attention, names, *, leaf, extra_biases=None, **fields) -> Layout:
    pieces = dict(zip(FIELDS, names, strict=True))
    biases = {field: (f"{name}/bias",) for field, name in pieces.items()}
    for field, name in (extra_biases or {}).items():
        biases[field] += (name,)
    pieces = {field: f"{name}/{leaf}" for field, name in pieces.items()}
    return Layout(example, attention, pieces, biases, linear=leaf == "weight", **fields)


_FLAX = ("query", "key", "value", "out")
_STEM = r"(?P<stem>(?:.*/)?)"
_LINEN = _layout(
    "Transformer/encoderblock_0/MultiHeadDotProductAttention_0/query/kernel",
    # One without a number is a scan over the layers. Checkpoints from before Linen count _1.
    _STEM + r"Transformer/encoderblock(?:_(?P<index>\d+))?/MultiHeadDotProductAttention_[01]",
    _FLAX,
    leaf="kernel",
    positions=(
        "pos_embedding",
        "Transformer/pos_embedding",
        "Transformer/posembed_input/pos_embedding",
    ),
)
_TIMM_BLOCK = _STEM + r"blocks/(?P<index>\d+)/attn"

LAYOUTS: Mapping[str, tuple[Layout, ...]] = {
    "timm": (
        _layout(
            "blocks.0.attn.q_proj.weight",
            _TIMM_BLOCK,
            ("q_proj", "k_proj", "v_proj", "proj"),
            leaf="weight",
            positions=("pos_embed",),
            anchors=("query", "key", "value"),
        ),
        _layout(
            "blocks.0.attn.qkv.weight",
            _TIMM_BLOCK,
            ("qkv", "qkv", "qkv", "proj"),
            leaf="weight",
            extra_biases={"query": "q_bias", "key": "k_bias", "value": "v_bias"},  # BEiT, EVA
            positions=("pos_embed",),
        ),
    ),
    "huggingface": (
        # Names in files of every version, and of modules before transformers 5.
        _layout(
            "encoder.layer.0.attention.attention.query.weight",
            _STEM + r"encoder/layer/(?P<index>\d+)/attention",
            ("attention/query", "attention/key", "attention/value", "output/dense"),
            leaf="weight",
            positions=("embeddings/position_embeddings",),
        ),
        # Names of modules from transformers 5 on.
        _layout(
            "layers.0.attention.q_proj.weight",
            _STEM + r"layers/(?P<index>\d+)/attention",
            ("q_proj", "k_proj", "v_proj", "o_proj"),
            leaf="weight",
            positions=("embeddings/position_embeddings",),
        ),
    ),
    "big_vision": (_LINEN,),
    "vit_jax": (_LINEN,),
    "nnx": (
        _layout(
            "attn/query/kernel",
            # The last number that ends a part of the path counts the layers; none is one layer.
            r"(?P<stem>)(?:.*(?<!\d)(?P<index>\d+)(?=/|$).*|.*)",
            _FLAX,
            leaf="kernel",
            positions=(r"(?:.*/)?[^/]*pos[^/]*(?:/embedding)?",),
            anchors=("query", "key"),
        ),
    ),
}
"""The layouts by name, each with its variants."""


@dataclasses.dataclass(frozen=True)
class Stack:
    """Where a model has its equal attention layers.

    Attributes:
      layout: how its parts are named.
      stem: what precedes the model's own names.
      attentions: path of every layer, in order, or of the only one where `stacked`.
      stacked: whether its arrays have a leading layer axis.
    """

    layout: Layout
    stem: str
    attentions: tuple[str, ...]
    stacked: bool

    def piece(self, attention: str, field: str) -> str:
        """The path of the weight of a field."""
        return _join(attention, self.layout.pieces[field])

    def biases(self, leaves: Leaves, attention: str, field: str) -> list[str]:
        """The paths of the biases that a field has."""
        names = [_join(attention, name) for name in self.layout.biases[field]]
        return [name for name in names if name in leaves]


def find_stack(leaves: Leaves, name: str | None) -> Stack:
    """Finds the attention layers by their names.

    Raises:
      InputError: if no layout fits, several models do, or a layer is incomplete.
    """
    if name is not None and name not in LAYOUTS:
        raise InputError(f"layout={name!r} is none: choose one of {', '.join(LAYOUTS)}")
    for layout in _variants(name):
        stacks = _stacks(leaves, layout)
        if len(stacks) > 1:
            found = "; ".join(f"{len(s.attentions)} × {s.attentions[0]}" for s in stacks)
            raise InputError(
                f"params hold several stacks of attention layers ({found}): pass the part of the "
                "tree that has one"
            )
        if stacks:
            _check_complete(leaves, stacks[0])
            return stacks[0]
    wanted = ", ".join(layout.example for layout in _variants(name))
    have = ", ".join(list(leaves)[:4]) or "nothing"
    argument = "layout" if name is None else f"layout={name!r}"
    raise InputError(f"{argument}: params have no names such as {wanted}; they have {have}, …")


def _variants(name: str | None) -> Iterable[Layout]:
    names = LAYOUTS if name is None else [name]
    return dict.fromkeys(layout for name in names for layout in LAYOUTS[name])


def _stacks(leaves: Leaves, layout: Layout) -> list[Stack]:
    numbered, single = [], []
    for stem, layers in _attentions(leaves, layout):
        attentions = tuple(layers[index] for index in sorted(layers))
        query = leaves.get(_join(attentions[0], layout.pieces["query"]))
        rank = len(getattr(query, "shape", (0, 0, 0)))
        if layout.linear or rank == 3:
            stacks = single if min(layers) < 0 else numbered
            stacks.append(Stack(layout, stem, attentions, False))
        elif rank == 4:
            numbered += [Stack(layout, stem, (attention,), True) for attention in attentions]
    return numbered or single  # an attention without a number beside numbered ones pools tokens


def _attentions(leaves: Leaves, layout: Layout) -> list[tuple[str, dict[int, str]]]:
    """The stem and the paths by number (-1 for none) of attentions with otherwise equal paths."""
    groups: dict[tuple[str, str], tuple[str, dict[int, str]]] = {}
    for suffix in dict.fromkeys(layout.pieces[field] for field in layout.anchors):
        for path in leaves:
            if path != suffix and not path.endswith("/" + suffix):
                continue
            attention = path[: -len(suffix)].rstrip("/")
            match = re.fullmatch(layout.attention, attention)
            if match is None:
                continue
            index, around = -1, (attention, "")
            if match["index"] is not None:
                index = int(match["index"])
                around = attention[: match.start("index")], attention[match.end("index") :]
            groups.setdefault(around, (match["stem"], {}))[1][index] = attention
    return list(groups.values())


def _check_complete(leaves: Leaves, stack: Stack) -> None:
    for attention in stack.attentions:
        for field in FIELDS:
            path = stack.piece(attention, field)
            if path not in leaves:
                raise InputError(f"params: {attention or 'the attention'} has no {path}")
            check_array(path, leaves[path])
        for path in leaves:
            below = path[len(attention) :].lstrip("/") if path.startswith(attention) else ""
            if re.fullmatch(r"(q_norm|k_norm|query_ln|key_ln)/.*", below):
                raise InputError(
                    f"params: {path} normalizes queries or keys, so that no scheme can set their "
                    "maps: build the model without it"
                )


def _join(*parts: str) -> str:
    return "/".join(part for part in parts if part)
