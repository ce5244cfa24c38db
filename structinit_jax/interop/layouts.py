"""Parameters of other projects: arrays by name, and the attention layers among them."""

import itertools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Shaped

from structinit_jax.attention_init.sites import is_concrete
from structinit_jax.errors import InputError

FIELDS = ("query", "key", "value", "out")
Leaves = dict[str, Any]

_NUMBER = re.compile(r"(?<!\d)\d+(?=\.|$)")  # at the end of a dot-separated part


# -- arrays: NumPy's, JAX's and torch's ------------------------------------------------------------


def is_tensor(leaf: Any) -> bool:
    """Whether a leaf is a torch tensor. Does not import torch."""
    return "torch" in sys.modules and isinstance(leaf, sys.modules["torch"].Tensor)


def as_array(leaf: Any) -> Any:
    """Converts a torch tensor to NumPy, which has no bfloat16: 8- and 16-bit floats to float32."""
    if not is_tensor(leaf) or leaf.is_meta:
        return leaf
    if hasattr(leaf, "full_tensor"):
        raise InputError(
            "params hold a DTensor, which is sharded: call initialize before fully_shard, or pass "
            "torch.distributed.checkpoint.state_dict.get_model_state_dict with full_state_dict=True"
        )
    leaf = leaf.detach().cpu()
    return (leaf.float() if leaf.is_floating_point() and leaf.itemsize < 4 else leaf).numpy()


def check_array(name: str, leaf: Any) -> None:
    """Raises `InputError` for anything but a NumPy or JAX array of floats that has values."""
    is_array = isinstance(leaf, np.ndarray | jax.Array)
    if not is_array or not jnp.issubdtype(leaf.dtype, jnp.floating):
        kind = f"has dtype {leaf.dtype}" if is_array else f"has type {type(leaf).__name__}"
        raise InputError(
            f"params: {name} {kind}, but must be an array of floats with values, not "
            "on torch's 'meta' device or from eval_shape"
        )


def like(new: Any, old: np.ndarray | jax.Array | jax.ShapeDtypeStruct) -> np.ndarray | jax.Array:
    """Converts new values to the array kind (NumPy or JAX), dtype and sharding of the old ones."""
    if isinstance(old, np.ndarray) and not isinstance(new, jax.core.Tracer):
        return np.array(new, old.dtype, order="C")
    new = jax.device_put(new).astype(old.dtype)  # `jnp.asarray` would compile for each shape
    uncommitted = np.ndarray | jax.core.Tracer | jax.ShapeDtypeStruct
    if isinstance(old, uncommitted) or not old.committed:
        return new
    return jax.device_put(new, old.sharding)


def replace_rows(
    table: Shaped[Array | np.ndarray, "R *k"], rows: Float[Array | np.ndarray, "r *k"], start: int
) -> Shaped[Array | np.ndarray, "R *k"]:
    """Returns a table with `rows` in place of its rows from `start` on, in the table's dtype."""
    # JAX cannot join parts of a table that are sharded differently on a mesh with explicit axes.
    xp = np if is_concrete(table) and is_concrete(rows) else jnp
    table = xp.asarray(table)
    rows = xp.asarray(rows).astype(table.dtype)
    return xp.concatenate([table[:start], rows, table[start + len(rows) :]])


# -- names -----------------------------------------------------------------------------------------


def flatten(params: Any) -> tuple[Leaves, Callable[[Leaves], Any]]:
    """Flattens the `params` of `initialize`.

    Returns the leaves by name, with dots between the levels ('blocks.0.attn.qkv.weight'), and the
    function that rebuilds `params` from such a dict.
    """
    kind = type(params).__name__
    if callable(getattr(params, "state_dict", None)):
        raise InputError(f"params is a {kind}, a torch module: pass its state_dict()")
    if hasattr(params, "initialize_attention"):
        raise InputError(f"params is a {kind}: call its initialize_attention(scheme, rng)")
    if isinstance(params, nnx.Module):
        graphdef, state, sown = nnx.split(params, nnx.Not(nnx.Intermediate), ...)
        leaves, rebuild = flatten(state)
        return leaves, lambda new: nnx.merge(graphdef, rebuild(new), sown)
    flat, treedef = jax.tree_util.tree_flatten_with_path(params)
    given = {_name(path): leaf for path, leaf in flat}
    tensors = {name: leaf for name, leaf in given.items() if is_tensor(leaf)}
    arrays = {name: as_array(tensor) for name, tensor in tensors.items()}

    def rebuild(new):
        # New values get the dtype and device of the tensor that they replace.
        for name, tensor in tensors.items():
            if new[name] is arrays[name]:
                new[name] = tensor
            else:
                new[name] = sys.modules["torch"].from_numpy(new[name]).to(tensor)
        result = treedef.unflatten(new.values())
        # JAX sorts the keys of dicts.
        return {key: result[key] for key in params} if type(params) is dict else result

    return given | arrays, rebuild


def _name(path) -> str:
    # The box around an array (nnx.Variable, nn.Partitioned) adds a `value` attribute to the path.
    if path and isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name == "value":
        path = path[:-1]
    name = jax.tree_util.keystr(path, simple=True, separator=".").replace("/", ".")
    # The fused weight and bias of torch's MultiheadAttention are not in a submodule.
    return re.sub(r"in_proj_(weight|bias)$", r"in_proj.\1", name)


def unsupported(name: str, why: str) -> InputError:
    """Returns the error for a model in which no scheme can set the attention maps."""
    supported = "only ViTs with one grid of tokens, Swin and BEiT"
    return InputError(f"params: {name} {why}; such models are not supported, {supported}")


# -- attention layers ------------------------------------------------------------------------------


class Layout(NamedTuple):
    """How a model names and shapes the projections of its attention layers.

    Attributes:
      modules: Names of the modules of `FIELDS` below the layer; a fused module is repeated.
      kind: 'torch' for kernels [out, in], as in torch and Equinox; 'linear' for Flax's [in, out];
        'heads' for those of Flax's MultiHeadAttention, [D, h, d] and [h, d, D].
    """

    modules: tuple[str, str, str, str]
    kind: Literal["torch", "linear", "heads"]

    @property
    def leaf(self) -> str:
        """Name of a module's kernel."""
        return "weight" if self.kind == "torch" else "kernel"

    def names(self, attention: str) -> list[str]:
        """Returns the names of the modules that hold the fields of the layer `attention`."""
        return [f"{attention}.{module}" if attention else module for module in self.modules]

    def weights(self, attention: str) -> list[str]:
        """Returns the names of the kernels of these modules."""
        return [f"{name}.{self.leaf}" for name in self.names(attention)]


PROJECTIONS = (  # the modules of known projects
    ("qkv", "qkv", "qkv", "proj"),  # timm
    ("qkv", "qkv", "qkv", "out_proj"),  # MONAI
    ("q_proj", "k_proj", "v_proj", "proj"),  # timm's EVA
    # Hugging Face: files, Swin's files, modules of transformers >= 5, CLIP, InternVL
    ("attention.query", "attention.key", "attention.value", "output.dense"),
    ("self.query", "self.key", "self.value", "output.dense"),
    ("q_proj", "k_proj", "v_proj", "o_proj"),
    ("q_proj", "k_proj", "v_proj", "out_proj"),
    ("q_proj", "k_proj", "v_proj", "projection_layer"),
    # torch.nn.MultiheadAttention: torchvision, open_clip, torch.nn.TransformerEncoder
    ("in_proj", "in_proj", "in_proj", "out_proj"),
    ("to_qkv", "to_qkv", "to_qkv", "to_out.0"),  # vit-pytorch
    ("to_qkv", "to_qkv", "to_qkv", "to_out"),  # vit-pytorch's SimpleViT
    ("query_proj", "key_proj", "value_proj", "output_proj"),  # Equinox
    FIELDS,  # Flax: NNX, big_vision, vit_jax
    ("query", "key", "value", "attention_output"),  # keras-hub
    ("wq", "wk", "wv", "wo"),  # deit3-jax
)


class Stack(NamedTuple):
    """A model's stack of identical attention layers.

    Attributes:
      layout: The names of the layers' projections.
      attentions: Name of every layer in order, or a single name if `stacked`.
      stacked: Whether the arrays have a leading layer axis.
      stem: Prefix of all names of the model, if `params` hold other models too.
    """

    layout: Layout
    attentions: tuple[str, ...]
    stacked: bool = False
    stem: str = ""

    @property
    def blocks(self) -> tuple[str, ...]:
        """Prefixes of the blocks around the attention layers; '' if the block is the model."""
        return tuple(attention[: attention.rfind(".") + 1] for attention in self.attentions)


def find_stack(leaves: Leaves, projections: Sequence[str] | None) -> Stack:
    """Finds the attention layers of a model with a single grid of tokens; see `find_stacks`."""
    stacks = find_stacks(leaves, projections)
    # A single attention layer next to a stack pools tokens, unless it is named like a layer.
    several = [stack for stack in stacks if stack.stacked or len(stack.attentions) > 1] or stacks
    layers = {_NUMBER.sub("#", stack.attentions[0]) for stack in several}
    stacks = [stack for stack in stacks if _NUMBER.sub("#", stack.attentions[0]) in layers]
    if len(stacks) == 1:
        return stacks[0]
    names = [stack.attentions[0] for stack in stacks]
    level = len(_shared_parts(names)) + 1
    stems = [".".join(name.split(".")[:level]) + "." for name in names]
    visual = [
        stack._replace(stem=stem)
        for stack, stem in zip(stacks, stems, strict=True)
        if any(name.startswith(stem) and np.ndim(leaf) == 4 for name, leaf in leaves.items())
    ]
    if len(visual) == 1:
        return visual[0]
    raise InputError(
        f"params hold several kinds of attention layers ({', '.join(names)}): if these are several "
        "models, pass the subtree of one; models with several kinds or several stages are not "
        "supported, except Swin (but not SwinV2)"
    )


def find_stacks(leaves: Leaves, projections: Sequence[str] | None) -> list[Stack]:
    """Finds attention stacks with the given names of projections; None means all known ones.

    A model's towers can have different names.
    """
    tried = PROJECTIONS if projections is None else [tuple(projections)]
    if stacks := [stack for modules in tried for stack in _stacks(leaves, modules)]:
        return stacks
    kernels = [name for name, leaf in leaves.items() if np.ndim(leaf) > 1]
    similar = [n for n in kernels if re.search(r"att|qkv|query|q_proj|in_proj", n, re.IGNORECASE)]
    names = ", ".join((similar or kernels or list(leaves))[:6]) or "nothing"
    wanted = "known names" if projections is None else f"projections={tried[0]}"
    raise InputError(
        f"params hold no attention layers with {wanted}, only {names}: if all layers have linear "
        "projections of the same shape, from and to all channels, pass the names of these modules, "
        "which hold a 'weight' or 'kernel', as projections=(query, key, value, out); other "
        "attention is not supported"
    )


def _shared_parts(names: Sequence[str]) -> list[str]:
    """Returns the leading dot-separated parts that all names have in common."""
    columns = zip(*(name.split(".") for name in names), strict=False)
    return [column[0] for column in itertools.takewhile(lambda c: len(set(c)) == 1, columns)]


def _stacks(leaves: Leaves, modules: tuple[str, str, str, str]) -> Iterator[Stack]:
    """Yields the stacks whose projections have these names."""
    lead = "".join(f"{part}." for part in _shared_parts(modules))  # belongs to the layer's name
    own = tuple(module.removeprefix(lead) for module in modules)
    names = [f".{name}" for name in leaves]
    for layout in (Layout(own, "torch"), Layout(own, "heads")):
        found = [
            name.removesuffix(f".{weight}")[1:]
            for weight in dict.fromkeys(layout.weights(""))
            for name in names
            if name.endswith(f".{lead}{weight}")
        ]
        for group in _numbered(dict.fromkeys(found)):
            weights = {weight for attention in group for weight in layout.weights(attention)}
            if not weights <= leaves.keys():
                continue
            rank = np.ndim(leaves[layout.weights(group[0])[0]])
            if layout.kind == "torch" or rank == 3:
                yield Stack(layout, tuple(group))
            elif rank == 2:
                yield Stack(Layout(own, "linear"), tuple(group))
            elif rank == 4:
                yield from (Stack(layout, (attention,), stacked=True) for attention in group)


def _numbered(names: Iterable[str]) -> list[list[str]]:
    """Returns groups of names that differ only in their layer number, sorted by that number.

    The layer number is the last number in which otherwise equal names differ. If it is another one
    in each name, numbers before it only divide the layers into chunks, as in DINOv2.
    """
    templates: dict[str, list[tuple[list[int], str]]] = {}
    for name in names:
        # Keras gives no number to the first of several modules: attention, attention_1, ...
        numbered = re.sub(r"(?<=[a-z])(?=\.|$)", "_0", name)
        numbers = [int(number) for number in _NUMBER.findall(numbered)]
        templates.setdefault(_NUMBER.sub("#", numbered), []).append((numbers, name))
    groups: dict[tuple, list[str]] = {}
    for template, members in templates.items():
        columns = zip(*(numbers for numbers, _ in members), strict=True)
        differing = [i for i, column in enumerate(columns) if len(set(column)) > 1]
        layer = differing[-1] if differing else None
        in_chunks = layer is not None and len({n[layer] for n, _ in members}) == len(members)
        for numbers, name in sorted(members):
            others = [] if in_chunks else [n for i, n in enumerate(numbers) if i != layer]
            groups.setdefault((template, *others), []).append(name)
    return list(groups.values())
