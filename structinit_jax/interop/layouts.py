"""How other projects name their parameters, and where a model has its attention layers."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from flax import nnx

from structinit_jax.errors import InputError
from structinit_jax.interop.entries import Entry, linear, linear_bias, same

FIELDS = ("query", "key", "value", "out")
Leaves = dict[str, Any]


def flatten(params: Any) -> tuple[Leaves, Callable[[Leaves], Any]]:
    """Flattens a state dict, Linen tree, NNX module or NNX state.

    Returns:
      The leaves by name, with dots between the levels ('blocks.0.attn.qkv.weight'), and the
      function that rebuilds `params` from such a dict.

    Raises:
      InputError: `params` is a torch module.
    """
    if callable(getattr(params, "state_dict", None)):
        raise InputError(
            f"params is a {type(params).__name__}, a torch module: pass "
            "{k: v.detach().cpu().numpy() for k, v in model.state_dict().items()} and load the "
            "result into it"
        )
    if isinstance(params, nnx.Module):
        graphdef, state = nnx.split(params)
        leaves, rebuild = flatten(state)
        return leaves, lambda new: nnx.merge(graphdef, rebuild(new))
    flat, treedef = jax.tree_util.tree_flatten_with_path(params)
    leaves = {_name(path): leaf for path, leaf in flat}
    return leaves, lambda new: jax.tree_util.tree_unflatten(treedef, new.values())


def _name(path) -> str:
    # The box around an array (nnx.Variable, nn.Partitioned) adds a last attribute `value`.
    if path and isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name == "value":
        path = path[:-1]
    name = jax.tree_util.keystr(path, simple=True, separator=".").replace("/", ".")
    # The fused weight and bias of torch's MultiheadAttention are no module.
    return re.sub(r"in_proj_(weight|bias)$", r"in_proj.\1", name)


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Names of one project.

    Attributes:
      example: A parameter name, for error messages.
      attention: Pattern of the name of an attention layer. Group `stem` is the prefix of the whole
        model, group `index` the layer number if there is one.
      modules: Names of the modules of `FIELDS` below the attention layer; a fused module is
        repeated for query, key and value.
      torch: Whether the modules are torch's Linear, rather than Flax's MultiHeadAttention's.
      positions: Patterns of the name of a learned position table below the stem.
      patches: Patterns of the name of the patch embedding below the stem.
      anchors: Fields whose presence marks an attention layer.
      separate_biases: Names of biases that belong to a fused module but are kept outside it.
    """

    example: str
    attention: str
    modules: tuple[str, str, str, str]
    torch: bool
    positions: tuple[str, ...]
    patches: tuple[str, ...]
    anchors: tuple[str, ...] = FIELDS
    separate_biases: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def leaf(self) -> str:
        """What a module calls its kernel."""
        return "weight" if self.torch else "kernel"

    def weight(self, attention: str, field: str) -> str:
        """Returns the name of the weight that holds a field."""
        return join(attention, self.modules[FIELDS.index(field)], self.leaf)

    def entries(self, attention: str, path: str, layer: int | None) -> Iterator[Entry]:
        """Maps the weights and biases of the layer `attention` to our module at `path`."""
        fields_of: dict[str, list[str]] = {}
        for field, module in zip(FIELDS, self.modules, strict=True):
            fields_of.setdefault(module, []).append(field)
        for module, fields in fields_of.items():
            name, paths = join(attention, module), [f"{path}/{field}" for field in fields]
            if self.torch:
                in_axes = 2 if fields == ["out"] else 1
                yield from linear(name, *paths, layer=layer, in_axes=in_axes)
            else:
                yield same(f"{name}.kernel", f"{paths[0]}/kernel", layer)
                yield same(f"{name}.bias", f"{paths[0]}/bias", layer)


_STEM = r"(?P<stem>(?:.*?\.)??)"
_LINEN = Layout(
    example="Transformer.encoderblock_0.MultiHeadDotProductAttention_0.query.kernel",
    # A block without a number is a scan over the layers. Checkpoints older than Linen count _1.
    attention=_STEM
    + r"Transformer\.encoderblock(?:_(?P<index>\d+))?\.MultiHeadDotProductAttention_[01]",
    modules=FIELDS,
    torch=False,
    positions=(
        "pos_embedding",
        r"Transformer\.pos_embedding",
        r"Transformer\.posembed_input\.pos_embedding",
    ),
    patches=("embedding",),
)
TIMM = Layout(
    example="blocks.0.attn.qkv.weight",
    attention=_STEM + r"blocks\.(?P<index>\d+)\.attn",
    modules=("qkv", "qkv", "qkv", "proj"),
    torch=True,
    positions=("pos_embed",),
    patches=(r"patch_embed\.proj",),
    separate_biases={"query": "q_bias", "key": "k_bias", "value": "v_bias"},  # BEiT, EVA
)
_TIMM_SEPARATE = dataclasses.replace(
    TIMM,
    example="blocks.0.attn.q_proj.weight",
    modules=("q_proj", "k_proj", "v_proj", "proj"),
    anchors=("query", "key", "value"),
    separate_biases={},
)
# Names in the files of every version, and in modules of transformers < 5.
_HUGGING_FACE = Layout(
    example="encoder.layer.0.attention.attention.query.weight",
    attention=_STEM + r"encoder\.layer\.(?P<index>\d+)\.attention",
    modules=("attention.query", "attention.key", "attention.value", "output.dense"),
    torch=True,
    positions=(r"embeddings\.position_embeddings",),
    patches=(r"embeddings\.patch_embeddings\.projection",),
)
# Names in modules of transformers >= 5: ViT has `layers`, Dinov2 `encoder.layer`. DINOv3, with
# `model.layer` or in files `layer`, has rotary positions, which `attention_site` then says.
_HUGGING_FACE_5 = dataclasses.replace(
    _HUGGING_FACE,
    example="layers.0.attention.q_proj.weight",
    attention=_STEM + r"(?:encoder\.layer|layers|(?:model\.)?layer)\.(?P<index>\d+)\.attention",
    modules=("q_proj", "k_proj", "v_proj", "o_proj"),
)
# The vision towers of CLIP and SigLIP.
_HUGGING_FACE_CLIP = dataclasses.replace(
    _HUGGING_FACE,
    example="encoder.layers.0.self_attn.q_proj.weight",
    attention=_STEM + r"encoder\.layers\.(?P<index>\d+)\.self_attn",
    modules=("q_proj", "k_proj", "v_proj", "out_proj"),
    positions=(r"embeddings\.position_embedding\.weight",),
    patches=(r"embeddings\.patch_embedding",),
)
# Swin, in files and in modules of transformers >= 5; each stage is a stack.
_HUGGING_FACE_SWIN = dataclasses.replace(
    _HUGGING_FACE,
    example="encoder.layers.0.blocks.0.attention.self.query.weight",
    attention=_STEM + r"blocks\.(?P<index>\d+)\.attention",
    modules=("self.query", "self.key", "self.value", "output.dense"),
)
_HUGGING_FACE_SWIN_5 = dataclasses.replace(
    _HUGGING_FACE_SWIN,
    example="encoder.layers.0.blocks.0.attention.q_proj.weight",
    modules=_HUGGING_FACE_5.modules,
)
_TORCHVISION = Layout(
    example="encoder.layers.encoder_layer_0.self_attention.in_proj_weight",
    attention=_STEM + r"encoder\.layers\.encoder_layer_(?P<index>\d+)\.self_attention",
    modules=("in_proj", "in_proj", "in_proj", "out_proj"),
    torch=True,
    positions=(r"encoder\.pos_embedding",),
    patches=("conv_proj",),
)
_DEIT3_JAX = Layout(
    example="layer_0.attn.wq.kernel",
    attention=_STEM + r"layer_(?P<index>\d+)\.attn",
    modules=("wq", "wk", "wv", "wo"),
    torch=False,
    positions=(r"embed\.wpe",),
    patches=(r"embed\.wte",),
)
_NNX = Layout(
    example="attn.query.kernel",
    # The last part of the name that ends in a number counts the layers, if there is one.
    attention=r"(?P<stem>)(?:.*(?<!\d)(?P<index>\d+)(?=\.|$).*|.*)",
    modules=FIELDS,
    torch=False,
    positions=(r"(?:.*\.)?[^.]*pos[^.]*(?:\.embedding)?",),
    patches=(r".*",),
    anchors=("query", "key"),
)

LAYOUTS: Mapping[str, tuple[Layout, ...]] = {
    "timm": (_TIMM_SEPARATE, TIMM),
    "huggingface": (
        _HUGGING_FACE,
        _HUGGING_FACE_5,
        _HUGGING_FACE_CLIP,
        _HUGGING_FACE_SWIN,
        _HUGGING_FACE_SWIN_5,
    ),
    "torchvision": (_TORCHVISION,),
    "big_vision": (_LINEN,),
    "vit_jax": (_LINEN,),
    "deit3_jax": (_DEIT3_JAX,),
    "nnx": (_NNX,),
}
"""The layouts by name, each with its variants."""


@dataclasses.dataclass(frozen=True)
class Stack:
    """A model's stack of equal attention layers.

    Attributes:
      layout: The names of its parts.
      stem: Prefix of all names of the model.
      attentions: Name of every layer in order, or the only name if `stacked`.
      stacked: Whether the arrays have a leading layer axis.
    """

    layout: Layout
    stem: str
    attentions: tuple[str, ...]
    stacked: bool

    def entries(self, leaves: Leaves, path: str) -> list[Entry]:
        """Maps the weights and the existing biases of all layers, as `Layout.entries` does."""
        entries: list[Entry] = []
        for i, attention in enumerate(self.attentions):
            layer = None if self.stacked else i
            entries += self.layout.entries(attention, path, layer)
            for field, bias in self.layout.separate_biases.items():
                name = join(attention, bias)
                entries.append(linear_bias(name, f"{path}/{field}", layer=layer))
        return [entry for entry in entries if entry.name in leaves]


def find_stack(leaves: Leaves, name: str | None) -> Stack:
    """Finds the attention layers of a model with a single grid of tokens.

    Raises:
      InputError: As for `find_stacks`; or the model has several stacks, of which not one sees
        images.
    """
    stacks = find_stacks(leaves, name)
    if len(stacks) > 1:
        stacks = [stack for stack in stacks if _sees_images(leaves, stack)] or stacks
    if len(stacks) > 1:
        found = "; ".join(f"{len(s.attentions)} × {s.attentions[0]}" for s in stacks)
        raise InputError(
            f"params hold several stacks ({found}): pass the subtree of one. Stages of one model "
            "need a relative_position_bias_table in each layer, as in Swin but not SwinV2"
        )
    check_stack(leaves, stacks[0])
    return stacks[0]


def find_stacks(leaves: Leaves, name: str | None) -> list[Stack]:
    """Finds the attention layers by their names.

    Args:
      leaves: The parameters by name.
      name: A key of `LAYOUTS`, or None to try them all.

    Returns:
      The stacks of the first layout that fits.

    Raises:
      InputError: No layout fits, or a layer is incomplete.
    """
    if name is not None and name not in LAYOUTS:
        raise InputError(f"layout={name!r} is unknown: choose one of {', '.join(LAYOUTS)}")
    names = LAYOUTS if name is None else [name]
    layouts = list(dict.fromkeys(layout for name in names for layout in LAYOUTS[name]))
    for layout in layouts:
        stacks = _stacks(leaves, layout)
        if stacks:
            return stacks
    argument = "layout" if name is None else f"layout={name!r}"
    known = "; ".join(f"{n} ({', '.join(v.example for v in LAYOUTS[n])})" for n in names)
    similar = [n for n in leaves if re.search(r"att|qkv|query|q_proj|in_proj", n, re.IGNORECASE)]
    looks = " that look like attention" if similar else ""
    raise InputError(
        f"{argument}: params have no attention that is named as in {known}. Their names{looks}: "
        f"{_abbreviate(similar or list(leaves))}. "
        "Rename them for the call, or describe the layers with an AttentionSite and place the "
        "arrays that the scheme returns for it"
    )


def _abbreviate(names: list[str], most: int = 6) -> str:
    return ", ".join([*names[:most], *(["…"] if len(names) > most else [])]) or "none"


def _stacks(leaves: Leaves, layout: Layout) -> list[Stack]:
    numbered, single = [], []
    for stem, layers in _attentions(leaves, layout):
        attentions = tuple(layers[index] for index in sorted(layers))
        query = leaves.get(layout.weight(attentions[0], "query"))
        rank = len(getattr(query, "shape", (0, 0, 0)))
        if layout.torch or rank == 3:
            stacks = single if min(layers) < 0 else numbered
            stacks.append(Stack(layout, stem, attentions, stacked=False))
        elif rank == 4:
            numbered += [Stack(layout, stem, (name,), stacked=True) for name in attentions]
    # A single attention next to numbered ones pools tokens.
    return numbered or single


def _sees_images(leaves: Leaves, stack: Stack) -> bool:
    pattern = re.compile(re.escape(stack.stem) + rf"(?:{'|'.join(stack.layout.patches)})\.\w+")
    return any(pattern.fullmatch(name) for name in leaves)


def _attentions(leaves: Leaves, layout: Layout) -> list[tuple[str, dict[int, str]]]:
    """Returns, per group of names that differ in one number, the stem and the names by number."""
    groups: dict[tuple[str, str], tuple[str, dict[int, str]]] = {}  # number -1 if there is none
    for suffix in dict.fromkeys(layout.weight("", field) for field in layout.anchors):
        for name in leaves:
            attention = ("." + name).removesuffix("." + suffix)[1:]
            match = attention != name and re.fullmatch(layout.attention, attention)
            if not match:
                continue
            index, around = -1, (attention, "")
            if match["index"] is not None:
                index = int(match["index"])
                around = attention[: match.start("index")], attention[match.end("index") :]
            groups.setdefault(around, (match["stem"], {}))[1][index] = attention
    return list(groups.values())


def check_stack(leaves: Leaves, stack: Stack) -> None:
    """Raises `InputError` if a layer lacks one of its projections."""
    for attention in stack.attentions:
        for field in FIELDS:
            name = stack.layout.weight(attention, field)
            if name not in leaves:
                raise InputError(f"params: {attention or 'the attention layer'} has no {name}")


def join(*parts: str) -> str:
    """Joins the levels of a name; empty ones are left out."""
    return ".".join(part for part in parts if part)
