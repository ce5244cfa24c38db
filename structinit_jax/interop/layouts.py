"""The names of parameters in other projects."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from flax import nnx

from structinit_jax.errors import InputError
from structinit_jax.interop.entries import Entry, linear, same

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
    # The fused weight and bias of torch's MultiheadAttention are not in a module.
    return re.sub(r"in_proj_(weight|bias)$", r"in_proj.\1", name)


def join(*parts: str) -> str:
    """Joins the levels of a name; empty ones are left out."""
    return ".".join(part for part in parts if part)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Names of one project.

    Attributes:
      example: A parameter name, for error messages.
      attention: Pattern of the name of an attention layer. Group `stem` is the prefix of the whole
        model, group `index` the layer number if there is one. Without a group `index`, layers are
        numbered by the last number in which their names differ.
      modules: Names of the modules of `FIELDS` below the attention layer; a fused module is
        repeated for query, key and value.
      torch: Whether the modules are torch's Linear, rather than Flax's MultiHeadAttention's.
      positions: Patterns of the name of a learned position table below the stem.
      patches: Patterns of the name of the patch embedding below the stem.
      patch_norms: Patterns of the name of a norm of the patch embeddings alone, below the stem.
      anchors: Fields whose presence marks an attention layer.
      separate_biases: Names of biases that belong to a fused module but are kept outside it.
    """

    example: str
    attention: str
    modules: tuple[str, str, str, str]
    torch: bool
    positions: tuple[str, ...]
    patches: tuple[str, ...]
    patch_norms: tuple[str, ...] = ()
    anchors: tuple[str, ...] = FIELDS
    separate_biases: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def leaf(self) -> str:
        """What a module calls its kernel."""
        return "weight" if self.torch else "kernel"

    @property
    def position_names(self) -> str:
        """What a position table may be called, for error messages."""
        names = (pattern.replace("\\", "") for pattern in self.positions)
        return ", ".join("*pos*" if "*" in name else name for name in names)

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
    positions=("pos_embed", r"embeds\.pos_embed"),  # `embeds` in NaFlexViT
    patches=(r"patch_embed\.proj", r"embeds\.proj"),
    patch_norms=(r"patch_embed\.norm", r"embeds\.norm"),
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
# Names in modules of transformers >= 5: ViT has `layers`, Dinov2 `encoder.layer`, DINOv3
# `model.layer`, or in files `layer`.
_HUGGING_FACE_5 = dataclasses.replace(
    _HUGGING_FACE,
    example="layers.0.attention.q_proj.weight",
    attention=_STEM + r"(?:encoder\.layer|layers|(?:model\.)?layer)\.(?P<index>\d+)\.attention",
    modules=("q_proj", "k_proj", "v_proj", "o_proj"),
    patches=(r"embeddings\.patch_embeddings(?:\.projection)?",),
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
# Swin; each stage is a stack.
_TORCHVISION_SWIN = dataclasses.replace(
    TIMM,
    example="features.1.0.attn.qkv.weight",
    attention=r"(?P<stem>(?:.*\.)?features\.\d+\.)(?P<index>\d+)\.attn",
    separate_biases={},
)
# Its own vision towers and OpenAI's; those of timm in it have timm's names.
_OPEN_CLIP = Layout(
    example="visual.transformer.resblocks.0.attn.in_proj_weight",
    attention=_STEM + r"transformer\.resblocks\.(?P<index>\d+)\.attn",
    modules=("in_proj", "in_proj", "in_proj", "out_proj"),
    torch=True,
    positions=("positional_embedding",),
    patches=("conv1",),
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
    attention=r"(?P<stem>).*",
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
    "torchvision": (_TORCHVISION, _TORCHVISION_SWIN),
    "open_clip": (_OPEN_CLIP,),
    "big_vision": (_LINEN,),
    "vit_jax": (_LINEN,),
    "deit3_jax": (_DEIT3_JAX,),
    "nnx": (_NNX,),
}
"""The layouts by name, each with its variants."""
