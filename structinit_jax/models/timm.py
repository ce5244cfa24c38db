"""Converts weights of our models to and from timm, and selects a smaller model's from a larger's.

A converter lists the entries of timm's state dict for a model: timm's name on the left, the path of
our arrays on the right. Our arrays have a leading axis for the layers that timm numbers.

Ours are Flax's: kernels are [in, out] where torch has [out, in], convolutions [rows, cols, in, out]
where it has [out, in, rows, cols], and attention keeps its heads h and their channels d as separate
axes: query, key and value [D, h, d], output projection [h, d, D].
"""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

from structinit_jax.attention_init import sincos_positions
from structinit_jax.errors import InputError
from structinit_jax.interop.layouts import (
    as_array,
    check_array,
    like,
    refuse_torch_module,
    unwrapped,
)
from structinit_jax.models.convmixer import ConvMixer
from structinit_jax.models.mixer import MlpMixer
from structinit_jax.models.swin import SwinTransformer
from structinit_jax.models.vit import VisionTransformer, resample_positions

Shape = tuple[int, ...]
StateDict = Mapping[str, Any]  # The values are NumPy or JAX arrays or torch tensors.
# Older versions of timm saved these functions of the sizes with the weights of Swin.
BUFFERS = ("attn.relative_position_index", "attn_mask")
# Teacher and student must have equal sizes along these axes, places in a patch, window or image.
PLACES = {
    "pos_embed": slice(1, 2),
    "patch_embed.proj.weight": slice(2, 4),
    "stem.proj.weight": slice(2, 4),
    "stem.0.weight": slice(2, 4),
    "relative_position_bias_table": slice(0, 1),
    "mlp_tokens.fc1.weight": slice(1, 2),
}


def to_timm(model: nnx.Module) -> dict[str, np.ndarray]:
    """Returns all weights and running statistics of a model as timm's state dict.

    Raises `InputError` for a model of your own, which timm does not know.
    """
    ours = {path: np.asarray(array) for path, array in _arrays_by_path(model).items()}
    return {
        entry.name: np.asarray(entry.encode(*entry.arrays(ours)), order="C")
        for entry in _timm_entries(model)
    }


def from_timm(model: nnx.Module, state_dict: StateDict) -> None:
    """Loads timm's weights into a model of the same architecture, in place.

    Prefixes of torch's DataParallel and `torch.compile` are removed from the names. Raises
    `InputError` and leaves the model as it was if an entry is missing, of another shape, or
    unexpected, such as register tokens.

    >>> sizes = dict(image_size=8, channels=1, num_classes=10, patch_size=2, width=16)
    >>> model = si.MlpMixer(**sizes, depth=2, rngs=nnx.Rngs(0))
    >>> other = si.MlpMixer(**sizes, depth=2, rngs=nnx.Rngs(1))
    >>> si.from_timm(model, si.to_timm(other))  # or the state_dict() of a model of timm
    """
    old = _arrays_by_path(model)
    ours = {path: np.array(array) for path, array in old.items()}
    weights = _read_names(state_dict)
    entries = list(_timm_entries(model))
    names = {entry.name for entry in entries}
    _check_names(missing=names - weights.keys(), unexpected=weights.keys() - names)
    for entry in entries:
        tensor = np.asarray(weights[entry.name])
        if entry.paths:
            check_array("state_dict", entry.name, tensor)
        targets = entry.arrays(ours)
        shapes = [target.shape for target in targets]
        if tensor.shape != entry.shape(shapes):
            raise InputError(
                f"state_dict[{entry.name!r}] has shape {tensor.shape}, but the model needs "
                f"{entry.shape(shapes)}: create the model for these weights, or use "
                "select_weights, which keeps the model's head and resamples the positions"
            )
        for target, value in zip(targets, entry.decode(tensor, shapes), strict=True):
            target[...] = value
    new = {path: like(array, old[path]) for path, array in ours.items()}
    state = nnx.state(model)
    nnx.replace_by_pure_dict(state, traverse_util.unflatten_dict(new, sep="/"))
    nnx.update(model, state)


def _read_names(state_dict: StateDict) -> dict[str, Any]:
    """Returns the weights by timm's names, without buffers and the prefixes of wrappers."""
    refuse_torch_module("state_dict", state_dict)
    return {
        unwrapped(name): as_array(leaf)
        for name, leaf in state_dict.items()
        if not name.endswith(BUFFERS)
    }


def _check_names(missing: Collection[str], unexpected: Collection[str]) -> None:
    """Raises `InputError` if there are names that only the model or only a state dict has."""
    problems = {"state_dict has no": missing, "the model has no place for": unexpected}
    for problem, names in problems.items():
        if names:
            raise InputError(
                f"{problem} {', '.join(sorted(names)[:5])}: use weights of the same family, pool "
                "and depth; select_weights takes those of a deeper model too"
            )


# -- entries ---------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """One tensor of timm.

    Attributes:
      name: Its name there, with dots.
      paths: Paths of our arrays that it holds, with slashes: several if they are fused, none if the
        tensor is computed rather than trained.
      encode: Turns our arrays into the tensor.
      decode: Turns the tensor and the shapes of our arrays into our arrays.
      layer: Index on the leading axis of our arrays if they stack all layers, else None.
    """

    name: str
    paths: tuple[str, ...]
    encode: Callable[..., Any]
    decode: Callable[[Any, Sequence[Shape]], list[Any]]
    layer: int | None = None

    def arrays(self, ours: Mapping[str, Any]) -> list[Any]:
        """Returns our arrays of this entry, without the layer axis; NumPy's as views."""
        arrays = [ours[path] for path in self.paths]
        return arrays if self.layer is None else [array[self.layer, ...] for array in arrays]

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        """Returns the shape of the tensor, given the shapes of our arrays."""
        return np.shape(self.encode(*(np.empty(shape, np.int8) for shape in shapes)))


def same(name: str, path: str, layer: int | None = None, *, lead: int = 0) -> Entry:
    """Maps an array with the same axes, except for `lead` leading axes of length 1 in theirs."""

    def encode(array):
        return array.reshape((1,) * lead + array.shape)

    return Entry(name, (path,), encode, lambda tensor, shapes: [tensor.reshape(shapes[0])], layer)


def norm(name: str, path: str, layer: int | None = None) -> Iterator[Entry]:
    """Maps the scale and bias of a normalization."""
    yield same(f"{name}.weight", f"{path}/scale", layer)
    yield same(f"{name}.bias", f"{path}/bias", layer)


def linear(
    name: str, *paths: str, layer: int | None = None, in_axes: int = 1, bias: bool = True
) -> Iterator[Entry]:
    """Maps a linear layer that holds one or more of ours, of equal sizes, fused along `out`.

    Our kernels have `in_axes` input axes; the others are output axes.
    """

    def encode(*kernels):
        return np.concatenate([k.reshape(math.prod(k.shape[:in_axes]), -1).T for k in kernels])

    def encode_bias(*biases):
        return np.concatenate([bias.reshape(-1) for bias in biases])

    def decode(tensor, shapes):  # a weight or a bias, which `.T` leaves as it is
        parts = np.split(tensor, len(shapes))
        return [part.T.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    kernels = tuple(f"{path}/kernel" for path in paths)
    yield Entry(f"{name}.weight", kernels, encode, decode, layer)
    if bias:
        biases = tuple(f"{path}/bias" for path in paths)
        yield Entry(f"{name}.bias", biases, encode_bias, decode, layer)


def conv(name: str, path: str, layer: int | None = None) -> Iterator[Entry]:
    """Maps a convolution. Ours may be [rows, cols, out] if depthwise, [in, out] if pointwise."""

    def encode(kernel):
        if kernel.ndim == 3:
            kernel = kernel[:, :, None]
        elif kernel.ndim == 2:
            kernel = kernel[None, None]
        return kernel.transpose(3, 2, 0, 1)

    def decode(weight, shapes):
        return [weight.transpose(2, 3, 1, 0).reshape(shapes[0])]

    yield Entry(f"{name}.weight", (f"{path}/kernel",), encode, decode, layer)
    yield same(f"{name}.bias", f"{path}/bias", layer)


# -- the entries of every family -------------------------------------------------------------------


def _timm_entries(model: nnx.Module) -> Iterator[Entry]:
    if type(model) not in _CONVERTERS:
        families = ", ".join(family.__name__ for family in _CONVERTERS)
        raise InputError(f"no converter to timm for {type(model).__name__}, only for {families}")
    return _CONVERTERS[type(model)](model)


def _vit_entries(model: VisionTransformer) -> Iterator[Entry]:
    """Maps timm's `VisionTransformer`, or with rotary positions its `Eva`."""
    rope = model.position_kind == "rope"
    scales = ("gamma_1", "gamma_2") if rope else ("ls1.gamma", "ls2.gamma")
    yield from conv("patch_embed.proj", "patch_embedding")
    if model.pool == "class_token":
        yield same("cls_token", "class_token", lead=2)
    if model.positions is not None:
        yield same("pos_embed", "positions", lead=1)
    elif not rope:  # timm does not save rotations
        yield _fixed_positions(model)
    for i in range(model.depth):
        yield from _block(f"blocks.{i}", "blocks", i)
        if model.blocks.scale1 is not None:
            yield same(f"blocks.{i}.{scales[0]}", "blocks/scale1", i)
            yield same(f"blocks.{i}.{scales[1]}", "blocks/scale2", i)
    yield from norm("fc_norm" if model.pool == "mean" else "norm", "norm")
    yield from linear("head", "head")


def _fixed_positions(model: VisionTransformer) -> Entry:
    """Maps the sin-cos encoding, which timm stores as a weight and our model computes."""
    num_prefix = model.num_prefix

    def encoding(grid, width):
        return np.pad(sincos_positions(grid, width), ((num_prefix, 0), (0, 0)))[None]

    def decode(tensor, shapes):
        *_, num_tokens, width = tensor.shape
        side = math.isqrt(max(num_tokens - num_prefix, 0))
        rounding = jnp.finfo(tensor.dtype).eps  # weights may be stored in half precision
        for grid in (model.grid, (side, side)):  # the weights may be of another image size
            expected = encoding(grid, width)
            close = dict(atol=max(1e-5, rounding))
            if tensor.shape == expected.shape and np.allclose(
                np.float32(tensor), expected, **close
            ):
                return []
        raise InputError(
            "state_dict['pos_embed'] is not the sin-cos encoding of a grid: load it into a model "
            "with positions='learned'"
        )

    return Entry("pos_embed", (), lambda: encoding(model.grid, model.width), decode)


def _swin_entries(model: SwinTransformer) -> Iterator[Entry]:
    """Maps timm's `SwinTransformer`."""
    yield from conv("patch_embed.proj", "patch_embedding")
    yield from norm("patch_embed.norm", "patch_norm")
    for s in range(len(model.depths)):
        stage = f"layers.{s}"
        ours = f"stage{s + 1}"
        if s:
            yield from norm(f"{stage}.downsample.norm", f"{ours}/merging/norm")
            reduction = f"{stage}.downsample.reduction"
            yield from linear(reduction, f"{ours}/merging/reduction", bias=False)
        for i in range(model.depths[s]):
            block = f"{stage}.blocks.{i}"
            blocks = f"{ours}/blocks"
            yield from _block(block, blocks, i)
            table = f"{block}.attn.relative_position_bias_table"
            yield same(table, f"{blocks}/relative_position_bias", i)
    yield from norm("norm", "norm")
    yield from linear("head.fc", "head")


def _mixer_entries(model: MlpMixer) -> Iterator[Entry]:
    """Maps timm's `MlpMixer`."""
    yield from conv("stem.proj", "patch_embedding")
    for i in range(model.depth):
        yield from norm(f"blocks.{i}.norm1", "blocks/norm1", i)
        yield from linear(f"blocks.{i}.mlp_tokens.fc1", "blocks/token_mlp/fc1", layer=i)
        yield from linear(f"blocks.{i}.mlp_tokens.fc2", "blocks/token_mlp/fc2", layer=i)
        yield from norm(f"blocks.{i}.norm2", "blocks/norm2", i)
        yield from linear(f"blocks.{i}.mlp_channels.fc1", "blocks/mlp/fc1", layer=i)
        yield from linear(f"blocks.{i}.mlp_channels.fc2", "blocks/mlp/fc2", layer=i)
    yield from norm("norm", "norm")
    yield from linear("head", "head")


def _convmixer_entries(model: ConvMixer) -> Iterator[Entry]:
    """Maps timm's `ConvMixer`."""
    yield from conv("stem.0", "patch_embedding")
    yield from _batch_norm("stem.2", "stem_norm")
    for i in range(model.depth):
        yield from conv(f"blocks.{i}.0.fn.0", "blocks/spatial", i)
        yield from _batch_norm(f"blocks.{i}.0.fn.2", "blocks/norm1", i)
        yield from conv(f"blocks.{i}.1", "blocks/channel", i)
        yield from _batch_norm(f"blocks.{i}.3", "blocks/norm2", i)
    yield from linear("head", "head")


def _block(name: str, path: str, layer: int) -> Iterator[Entry]:
    """Maps the parts of a transformer block that ViT and Swin have in common."""
    yield from norm(f"{name}.norm1", f"{path}/norm1", layer)
    qkv = [f"{path}/attention/{field}" for field in ("query", "key", "value")]
    yield from linear(f"{name}.attn.qkv", *qkv, layer=layer)
    yield from linear(f"{name}.attn.proj", f"{path}/attention/out", layer=layer, in_axes=2)
    yield from norm(f"{name}.norm2", f"{path}/norm2", layer)
    yield from linear(f"{name}.mlp.fc1", f"{path}/mlp/fc1", layer=layer)
    yield from linear(f"{name}.mlp.fc2", f"{path}/mlp/fc2", layer=layer)


def _batch_norm(name: str, path: str, layer: int | None = None) -> Iterator[Entry]:
    yield from norm(name, path, layer)
    yield same(f"{name}.running_mean", f"{path}/mean", layer)
    yield same(f"{name}.running_var", f"{path}/variance", layer)
    # PyTorch uses the number of batches only with momentum=None, which timm does not set.
    count = np.zeros((), np.int64)
    yield Entry(f"{name}.num_batches_tracked", (), lambda: count, lambda tensor, shapes: [])


def _arrays_by_path(model: nnx.Module) -> dict[str, Any]:
    return traverse_util.flatten_dict(nnx.to_pure_dict(nnx.state(model)), sep="/")


_CONVERTERS: Mapping[type[nnx.Module], Callable[..., Iterator[Entry]]] = {
    VisionTransformer: _vit_entries,
    SwinTransformer: _swin_entries,
    MlpMixer: _mixer_entries,
    ConvMixer: _convmixer_entries,
}

# -- weight selection ------------------------------------------------------------------------------


def select_weights(teacher: StateDict, student: nnx.Module) -> nnx.Module:
    """Returns a copy of one of our models with the weights selected from a larger model of timm.

    This is the method of Xu et al. 2024, "Initializing Models with Larger Ones" (arXiv:2311.18823).
    The student takes the teacher's first layers. If it has m of the teacher's n elements along an
    axis, it takes every (n / m)-th element from the first on if m divides n, else the elements
    nearest to m evenly spaced points from the first to the last.

    Weights are selected in timm's layout. As in the published program, query, key and value are
    then 3 h d outputs of one linear layer, so a student's head may mix channels of several heads.

    Patch and window size must be equal. A learned position table of another grid is first
    resampled, as timm does it; the table's grid is taken to be square. The head, fixed position
    encodings and integers stay the student's.

    >>> sizes = dict(image_size=8, channels=1, num_classes=10, patch_size=2)
    >>> teacher = si.to_timm(si.MlpMixer(**sizes, width=32, depth=3, rngs=nnx.Rngs(0)))
    >>> student = si.MlpMixer(**sizes, width=16, depth=2, rngs=nnx.Rngs(1))
    >>> model = si.select_weights(teacher, student)

    Args:
      teacher: The larger model's state dict in timm's layout.
      student: The smaller model, of the same family. It is not changed.

    Raises:
      InputError: The student is larger than the teacher or of another family.
    """
    large = _read_names(teacher)
    small = to_timm(student)
    if getattr(student, "positions", None) is not None and "pos_embed" in large:
        large["pos_embed"] = _fit_positions(large["pos_embed"], student)
    layers = {_without_numbers(name) for name in small}  # the teacher may have more of them
    _check_names(
        missing={name for name in small if not _is_own(name)} - large.keys(),
        unexpected={k for k in large if not _is_own(k) and _without_numbers(k) not in layers},
    )
    selected = dict(small)
    for entry in _timm_entries(student):
        if _is_own(entry.name):
            continue
        tensor = np.asarray(large[entry.name])
        if entry.paths:
            tensor = _select(entry.name, tensor, small[entry.name].shape)
            selected[entry.name] = tensor
        else:
            entry.decode(tensor, [])  # It refuses another position encoding.
    model = nnx.clone(student)
    from_timm(model, selected)
    return model


def _fit_positions(table: Any, student: VisionTransformer) -> Any:
    """Resamples learned positions to the student's grid."""
    num_tokens = table.shape[-2] - student.num_prefix
    side = math.isqrt(max(num_tokens, 0))
    if num_tokens == math.prod(student.grid) or side**2 != num_tokens:
        return table
    return resample_positions(jnp.asarray(table[0], jnp.float32), (side, side), student.grid)[None]


def _select(name, teacher, shape):
    """Takes evenly spaced elements along every axis."""
    places = next((axes for end, axes in PLACES.items() if name.endswith(end)), slice(0))
    fits = teacher.ndim == len(shape) and teacher.shape[places] == shape[places]
    if not fits or any(m > n for n, m in zip(teacher.shape, shape, strict=True)):
        raise InputError(
            f"{name} has shape {teacher.shape} in teacher and {shape} in student: the student must "
            "be the smaller model, with the same patch size, window size and number of tokens"
        )
    for axis, (n, m) in enumerate(zip(teacher.shape, shape, strict=True)):
        even = np.arange(0, n, n // m) if n % m == 0 else np.linspace(0, n - 1, m)
        teacher = teacher.take(np.round(even).astype(np.int32), axis=axis)
    return teacher


def _is_own(name: str) -> bool:
    """Whether a weight belongs to a head, so that the student keeps its own."""
    return name.startswith("head.")


def _without_numbers(name: str) -> str:
    """Replaces the numbers of layers in a name."""
    return re.sub(r"(?:(?<=\.)|(?<=_)|^)\d+(?=\.)", "*", name)
