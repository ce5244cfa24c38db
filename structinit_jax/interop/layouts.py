"""One table of the names of parameters in other projects, and the search for attention layers."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
from flax import nnx

from structinit_jax.errors import InputError, suggest
from structinit_jax.interop.entries import Entry, linear, linear_bias, same, unwrapped

FIELDS = ("query", "key", "value", "out")
Leaves = dict[str, Any]

_NUMBER = re.compile(r"(?<!\d)\d+(?=\.|$)")  # at the end of a part of a name


def flatten(params: Any) -> tuple[Leaves, Callable[[Leaves], Any]]:
    """Flattens a state dict, Linen tree, Equinox or NNX module, or NNX state.

    Returns:
      The leaves by name, with dots between the levels ('blocks.0.attn.qkv.weight'), and the
      function that rebuilds `params` from such a dict.
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
    # The fused weight and bias of torch's MultiheadAttention are not in a module.
    return re.sub(r"in_proj_(weight|bias)$", r"in_proj.\1", unwrapped(name))


def join(*parts: str) -> str:
    """Joins the levels of a name; empty ones are left out."""
    return ".".join(part for part in parts if part)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Names of one project. All but `modules` are patterns.

    Attributes:
      attention: Name of an attention layer. Group `stem` is the prefix of the whole model, group
        `index` the layer number if there is one. Without a group `index`, layers are numbered by
        the last number in which their names differ.
      modules: Names of the modules of `FIELDS` below the attention layer; a fused module is
        repeated for query, key and value.
      torch: Whether kernels are [out, in], as in torch and Equinox, rather than those of Flax's
        MultiHeadAttention.
      positions: Name of a learned position table below the stem.
      patches: Name of the patch embedding below the stem.
      patch_norm: Name of a norm of the patch embeddings alone, below the stem.
      norms: Names of the norms before attention and MLP, below the block.
      mlp_out: Name of the MLP's output layer below the block. None if users choose its name: it is
        then found by its shape.
      anchors: Fields whose presence marks an attention layer.
      separate_biases: Names of biases that belong to a fused module but are kept outside it.
    """

    attention: str
    modules: tuple[str, str, str, str]
    torch: bool
    positions: str
    patches: str
    patch_norm: str = r"patch_embed\.norm"
    norms: str = r"norm[12]"
    mlp_out: str | None = r"mlp\.fc2"
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


# -- the table -------------------------------------------------------------------------------------

_STEM = r"(?P<stem>(?:.*?\.)??)"
_HUGGING_FACE_LAYER = r"(?:encoder\.layers?|layers|(?:model\.)?layer)\.(?P<index>\d+)\.attention"
_LINEN = Layout(
    # A block without a number is a scan over the layers. Checkpoints older than Linen count _1.
    attention=_STEM
    + r"Transformer\.encoderblock(?:_(?P<index>\d+))?\.MultiHeadDotProductAttention_[01]",
    modules=FIELDS,
    torch=False,
    positions=r"(?:Transformer\.(?:posembed_input\.)?)?pos_embedding",
    patches="embedding",
    norms=r"LayerNorm_\d",
    mlp_out=r"MlpBlock_\d\.Dense_1",
)
TIMM = Layout(
    attention=_STEM + r"blocks\.(?P<index>\d+)\.attn",
    modules=("qkv", "qkv", "qkv", "proj"),
    torch=True,
    positions=r"(?:embeds\.)?pos_embed",  # `embeds` in NaFlexViT
    patches=r"(?:patch_embed|embeds)\.proj",
    patch_norm=r"(?:patch_embed|embeds)\.norm",
    mlp_out=r"mlp\.(?:fc2|w3)",
    separate_biases={"query": "q_bias", "key": "k_bias", "value": "v_bias"},  # BEiT, EVA
)
_TIMM_SEPARATE = dataclasses.replace(
    TIMM,
    modules=("q_proj", "k_proj", "v_proj", "proj"),
    anchors=("query", "key", "value"),
    separate_biases={},
)
_HUGGING_FACE = tuple(
    Layout(
        attention=_STEM + attention,
        modules=modules,
        torch=True,
        positions=r"embeddings\.position_embeddings?(?:\.weight)?",
        patches=r"embeddings\.patch_embed(?:ding)?s?(?:\.projection)?",
        patch_norm=r"embeddings\.rms_norm",
        norms=r"layernorm_(?:before|after)|(?:layer_|rms_)?norm[12]",
        mlp_out=r"output\.dense|(?:mlp|ffn)\.(?:fc2|weights_out|down_proj)",
    )
    for attention, modules in (
        (  # in files, and in modules of transformers < 5
            r"encoder\.layer\.(?P<index>\d+)\.attention",
            ("attention.query", "attention.key", "attention.value", "output.dense"),
        ),
        # In modules of transformers >= 5: ViT has `layers`, Dinov2 `encoder.layer`, DINOv3
        # `model.layer`, or in files `layer`, AIMv2 and EoMT an `out_proj`.
        (_HUGGING_FACE_LAYER, ("q_proj", "k_proj", "v_proj", "o_proj")),
        (_HUGGING_FACE_LAYER, ("q_proj", "k_proj", "v_proj", "out_proj")),
        (_HUGGING_FACE_LAYER, ("q_proj", "k_proj", "v_proj", "projection_layer")),  # InternVL
        (  # the vision towers of CLIP and SigLIP
            r"encoder\.layers\.(?P<index>\d+)\.self_attn",
            ("q_proj", "k_proj", "v_proj", "out_proj"),
        ),
        # Swin, in files and in modules of transformers >= 5; each stage is a stack.
        (
            r"blocks\.(?P<index>\d+)\.attention",
            ("self.query", "self.key", "self.value", "output.dense"),
        ),
        (r"blocks\.(?P<index>\d+)\.attention", ("q_proj", "k_proj", "v_proj", "o_proj")),
    )
)
_TORCHVISION = Layout(
    attention=_STEM + r"encoder\.layers\.encoder_layer_(?P<index>\d+)\.self_attention",
    modules=("in_proj", "in_proj", "in_proj", "out_proj"),
    torch=True,
    positions=r"encoder\.pos_embedding",
    patches="conv_proj",
    norms=r"ln_[12]",
    mlp_out=r"mlp\.(?:3|linear_2)",
)
# Swin; each stage is a stack.
_TORCHVISION_SWIN = dataclasses.replace(
    TIMM,
    attention=r"(?P<stem>(?:.*\.)?features\.\d+\.)(?P<index>\d+)\.attn",
    separate_biases={},
)
# Its own vision towers and OpenAI's; those of timm in it have timm's names.
_OPEN_CLIP = Layout(
    attention=_STEM + r"transformer\.resblocks\.(?P<index>\d+)\.attn",
    modules=("in_proj", "in_proj", "in_proj", "out_proj"),
    torch=True,
    positions="positional_embedding",
    patches="conv1",
    norms=r"ln_[12]",
    mlp_out=r"mlp\.c_proj",
)
_DEIT3_JAX = Layout(
    attention=_STEM + r"layer_(?P<index>\d+)\.attn",
    modules=("wq", "wk", "wv", "wo"),
    torch=False,
    positions=r"embed\.wpe",
    patches=r"embed\.wte",
    mlp_out=r"ff\.w2",
)
_VIT_PYTORCH = Layout(
    attention=_STEM + r"transformer\.layers\.(?P<index>\d+)\.0",
    modules=("to_qkv", "to_qkv", "to_qkv", "to_out.0"),
    torch=True,
    positions="pos_embedding",
    patches=r"to_patch_embedding\.2",
    patch_norm=r"to_patch_embedding\.3",
    norms=r"0\.norm|1\.net\.0",
    mlp_out=r"1\.net\.[34]",
)
_SIMPLE_VIT = dataclasses.replace(_VIT_PYTORCH, modules=("to_qkv", "to_qkv", "to_qkv", "to_out"))
# Models of one's own. The names of everything but the projections are the user's.
_NNX = Layout(
    attention=r"(?P<stem>).*",
    modules=FIELDS,
    torch=False,
    positions=r"(?:.*\.)?[^.]*pos[^.]*(?:\.(?:embeddings?|weight))?",
    patches=r".*",
    norms=r"(?i:[^.]*(?:norm|ln)[^.]*)",
    mlp_out=None,
    anchors=("query", "key"),
)
_KERAS = dataclasses.replace(_NNX, modules=("query", "key", "value", "attention_output"))
_EQUINOX = dataclasses.replace(
    _NNX,
    modules=("query_proj", "key_proj", "value_proj", "output_proj"),
    torch=True,
)
_TRANSFORMER_ENCODER = dataclasses.replace(
    _NNX,
    attention=r"(?P<stem>)(?:.*\.)?layers\.(?P<index>\d+)\.self_attn",
    modules=("in_proj", "in_proj", "in_proj", "out_proj"),
    torch=True,
    norms=r"norm[12]",
    mlp_out="linear2",
)

LAYOUTS: Mapping[str, tuple[Layout, ...]] = {
    "timm": (_TIMM_SEPARATE, TIMM),
    "huggingface": _HUGGING_FACE,
    "torchvision": (_TORCHVISION, _TORCHVISION_SWIN),
    "open_clip": (_OPEN_CLIP,),
    "vit_pytorch": (_VIT_PYTORCH, _SIMPLE_VIT),
    "torch": (_TRANSFORMER_ENCODER,),
    "big_vision": (_LINEN,),
    "vit_jax": (_LINEN,),
    "deit3_jax": (_DEIT3_JAX,),
    "nnx": (_NNX,),
    "keras": (_KERAS,),
    "equinox": (_EQUINOX,),
}
"""The layouts by name, each with its variants. 'torch' is `torch.nn.TransformerEncoder`."""

# -- the search ------------------------------------------------------------------------------------


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
      InputError: As for `find_stacks`; or of several stacks, not exactly one sees images.
    """
    stacks = find_stacks(leaves, name)
    seeing = [stack for stack in stacks if _sees_images(leaves, stack)]
    if len(stacks) == 1 or len(seeing) == 1:
        return (seeing or stacks)[0]
    raise InputError(
        f"params hold several models ({', '.join(stack.attentions[0] for stack in stacks)}): pass "
        "the subtree of one; a model with several stages is not supported unless it is a Swin"
    )


def find_stacks(leaves: Leaves, name: str | None) -> list[Stack]:
    """Finds the attention layers by the names of a layout, or of the first in which all are there.

    Raises:
      InputError: The layout is unknown, or none fits.
    """
    if name is not None and name not in LAYOUTS:
        raise InputError(f"layout={name!r} is unknown: {suggest(name, LAYOUTS)}")
    missing: list[str] = []
    for layout in [lay for n in (LAYOUTS if name is None else [name]) for lay in LAYOUTS[n]]:
        stacks = _stacks(leaves, layout)
        attentions = [attention for stack in stacks for attention in stack.attentions]
        weights = [layout.weight(attention, field) for attention in attentions for field in FIELDS]
        absent = [weight for weight in weights if weight not in leaves]
        if stacks and not absent:
            return stacks
        missing += absent
    similar = [n for n in leaves if re.search(r"att|qkv|query|q_proj|in_proj", n, re.IGNORECASE)]
    if not similar:
        raise InputError(
            f"params hold no attention layers, only {', '.join(list(leaves)[:6]) or 'nothing'}"
        )
    wanted = missing[0] if missing else "blocks.0.attn.qkv.weight"
    raise InputError(
        f"params have no {wanted}, but {', '.join(similar[:6])}: if all layers have equal linear "
        "projections from and to all channels, rename them for the call to names such as "
        f"{wanted}, or to those of another project in interop.LAYOUTS; other attention is not "
        "supported"
    )


def _sees_images(leaves: Leaves, stack: Stack) -> bool:
    pattern = re.compile(re.escape(stack.stem) + rf"(?:{stack.layout.patches})\.\w+")
    return any(pattern.fullmatch(name) for name in leaves)


def _stacks(leaves: Leaves, layout: Layout) -> list[Stack]:
    """Returns the groups of attention layers whose names differ in one number."""
    matches: dict[str, re.Match] = {}
    for suffix in dict.fromkeys(layout.weight("", field) for field in layout.anchors):
        for name in leaves:
            attention = ("." + name).removesuffix("." + suffix)[1:]
            if attention != name and (match := re.fullmatch(layout.attention, attention)):
                matches[attention] = match
    if "index" in re.compile(layout.attention).groupindex:
        spans = {name: match.span("index") for name, match in matches.items()}
    else:
        spans = _number_spans(matches)
    groups: dict[tuple[str, str], dict[int, str]] = {}
    for attention, (start, end) in spans.items():
        index = int(attention[start:end] or -1)
        groups.setdefault((attention[:start], attention[end:]), {})[index] = attention
    numbered, single = [], []
    for layers in groups.values():
        attentions = tuple(layers[index] for index in sorted(layers))
        stem = matches[attentions[0]]["stem"]
        query = leaves.get(layout.weight(attentions[0], "query"))
        rank = len(getattr(query, "shape", (0, 0, 0)))
        if layout.torch or rank == 3:
            stacks = single if min(layers) < 0 else numbered
            stacks.append(Stack(layout, stem, attentions, stacked=False))
        elif rank == 4:
            numbered += [Stack(layout, stem, (name,), stacked=True) for name in attentions]
    # A single attention next to numbered ones pools tokens.
    return numbered or single


def _number_spans(names: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Returns where each name has its layer number, (-1, -1) if it has no number.

    It is the last number in which otherwise equal names differ.
    """
    groups: dict[str, dict[str, list[re.Match]]] = {}
    for name in names:
        groups.setdefault(_NUMBER.sub("#", name), {})[name] = [*_NUMBER.finditer(name)]
    spans = {}
    for group in groups.values():
        columns = list(zip(*group.values(), strict=True))
        differing = [i for i, column in enumerate(columns) if len({n[0] for n in column}) > 1]
        column = (differing or range(len(columns)))[-1] if columns else None
        for name, numbers in group.items():
            spans[name] = (-1, -1) if column is None else numbers[column].span()
    return spans
