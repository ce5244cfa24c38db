"""Converts weights to and from timm, and selects a smaller model's weights from a larger model.

Each family lists the entries of timm's state dict: timm's name on the left, the paths of our arrays
on the right. Our arrays have a leading axis for the layers that timm numbers.

Our layouts are Flax's: kernels are [in, out] where torch has [out, in], and convolution kernels are
[rows, cols, in, out] where torch has [out, in, rows, cols]. Attention keeps heads h and their
channels d as separate axes: query, key and value [D, h, d], output projection [h, d, D].
"""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

from structinit_jax.attention_init import sincos_positions
from structinit_jax.errors import InputError, require
from structinit_jax.interop.layouts import as_array, like
from structinit_jax.models import ConvMixer, MlpMixer, Model, SwinTransformer, VisionTransformer

StateDict = Mapping[str, Any]  # The values are NumPy or JAX arrays or torch tensors.
# Older versions of timm saved these buffers with Swin's weights; they depend only on the sizes.
BUFFERS = ("attn.relative_position_index", "attn_mask")
# Axes of image channels and of places in a patch, window or image: teacher and student must agree.
PLACES = {
    "pos_embed": slice(1, 2),
    "patch_embed.proj.weight": slice(1, 4),
    "stem.proj.weight": slice(1, 4),
    "stem.0.weight": slice(1, 4),
    "relative_position_bias_table": slice(0, 1),
    "mlp_tokens.fc1.weight": slice(1, 2),
}


def to_timm(model: nnx.Module) -> dict[str, np.ndarray]:
    """Returns all weights and running statistics of a model as timm's state dict.

    Raises `InputError` for your own model classes and layers, which timm does not know.
    """
    entries = _entries(model)
    arrays = _arrays_by_path(model, entries)
    known = {path for entry in entries for path in entry.paths}
    needs = "left out: timm's model has no such array; nnx.state(model) holds all arrays"
    for path, array in arrays.items():
        require(f"model: {path}", array, needs, path in known)
    ours = {path: np.asarray(array) for path, array in arrays.items()}
    weights = {e.name: np.ascontiguousarray(np.concatenate(e.views(ours))) for e in entries}
    return weights | _computed(model)


def from_timm(model: nnx.Module, state_dict: StateDict) -> None:
    """Loads timm's weights into a model of the same architecture, in place.

    Names and shapes do not show all of the architecture, such as another pooling or activation.
    Arrays that timm's model does not have, such as those of adapters, keep their values. The model
    can be abstract, as `nnx.eval_shape` returns it, which avoids drawing initial weights.
    Name prefixes of torch's DataParallel and `torch.compile` are removed. Raises `InputError` and
    leaves the model unchanged if an entry is missing, unexpected, or of another shape.

    >>> sizes = dict(image_size=8, channels=1, num_classes=10, patch_size=2, width=16)
    >>> model = si.MlpMixer(**sizes, depth=2, rngs=nnx.Rngs(0))
    >>> other = si.MlpMixer(**sizes, depth=2, rngs=nnx.Rngs(1))
    >>> si.from_timm(model, si.to_timm(other))  # or the state_dict() of a timm model
    """
    entries = _entries(model)
    weights = _read_names(state_dict)
    computed = _computed(model)
    names = {entry.name for entry in entries} | computed.keys()
    _check_names(missing=names - weights.keys(), unexpected=weights.keys() - names)
    if "pos_embed" in computed:
        _check_sincos(np.asarray(weights["pos_embed"]), model)
    _write(model, entries, weights)


def _read_names(state_dict: StateDict) -> dict[str, Any]:
    """Returns the weights by timm's names, without buffers and wrapper prefixes."""
    needs = "a dict of arrays by timm's names, such as the state_dict() of a torch module"
    require("type(state_dict)", type(state_dict), needs, isinstance(state_dict, Mapping))
    wrappers = r"^(?:(?:module|_orig_mod)\.)+|(?<=\.)_orig_mod\."  # DataParallel, `torch.compile`
    return {
        re.sub(wrappers, "", name): as_array(leaf)
        for name, leaf in state_dict.items()
        if not name.endswith(BUFFERS)
    }


def _check_names(missing: Collection[str], unexpected: Collection[str]) -> None:
    if missing or unexpected:
        problem = "state_dict has no" if missing else "the model has no place for"
        raise InputError(
            f"{problem} {', '.join(sorted(missing or unexpected)[:5])}: use weights of the same "
            "family, pool and depth; select_weights also accepts the weights of a deeper model"
        )


# -- entries ---------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """One tensor of timm's state dict.

    Attributes:
      name: timm's name, with dots.
      paths: Paths of our arrays in this tensor, with slashes; several are fused along axis 0.
      view: Returns a view, with timm's axes, of our array without its layer axis.
      layer: Index along the leading axis of our arrays if they stack all layers, else None.
    """

    name: str
    paths: tuple[str, ...]
    view: Callable[[np.ndarray], np.ndarray] = np.ndarray.view
    layer: int | None = None

    def views(self, ours: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Returns views of our arrays with timm's axes; writing to a view changes our array."""
        arrays = [ours[path] for path in self.paths]
        if self.layer is not None:
            arrays = [array[self.layer] for array in arrays]
        return [self.view(array) for array in arrays]

    def shape(self, ours: Mapping[str, np.ndarray]) -> tuple[int, ...]:
        """Returns timm's shape of the tensor."""
        views = self.views(ours)
        return (sum(map(len, views)), *views[0].shape[1:])


def _arrays_by_path(model: nnx.Module, entries: Sequence[Entry]) -> dict[str, Any]:
    """Returns all arrays of a model; raises `InputError` if it lacks one that the entries name."""
    state = nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngState)))
    flat = traverse_util.flatten_dict(state)
    arrays = {"/".join(map(str, path)): array for path, array in flat.items()}
    for entry in entries:
        needs = f"an array, as in a new model: timm's {entry.name}"
        for path in entry.paths:
            require(f"model: {path}", arrays.get(path), needs, path in arrays)
    return arrays


def _zeros(arrays: Mapping[str, Any], entries: Sequence[Entry]) -> dict[str, np.ndarray]:
    """Returns zeros of the shapes and types of the arrays that the entries name."""
    paths = {path for entry in entries for path in entry.paths}
    return {path: np.zeros(arrays[path].shape, arrays[path].dtype) for path in paths}


def _write(model: nnx.Module, entries: Sequence[Entry], weights: StateDict) -> None:
    """Writes the entries into a model; raises `InputError` if a weight has another shape."""
    old = _arrays_by_path(model, entries)
    ours = _zeros(old, entries)
    for entry in entries:
        tensor = np.asarray(weights[entry.name])
        views = entry.views(ours)
        shape = entry.shape(ours)
        needs = (
            f"of the model's shape, {shape}: create a model that fits these weights, or use "
            "select_weights, which keeps the model's head and resamples the positions"
        )
        require(f"state_dict[{entry.name!r}]", tensor, needs, tensor.shape == shape)
        for view, part in zip(views, np.split(tensor, len(views)), strict=True):
            view[...] = part
    new = {path: like(array, old[path]) for path, array in ours.items()}
    nnx.update(model, traverse_util.unflatten_dict(new, sep="/"))


def _dense(kernel):  # [in, *out] -> [out, in]
    return kernel.reshape(len(kernel), -1).T


def _heads_to_width(kernel):  # [h, d, D] -> [D, h d]
    return kernel.reshape(-1, kernel.shape[-1]).T


def _conv(kernel):  # [rows, cols, in, out] -> [out, in, rows, cols]
    return kernel.transpose(3, 2, 0, 1)


def _depthwise(kernel):  # [rows, cols, D] -> [D, 1, rows, cols]
    return kernel.transpose(2, 0, 1)[:, None]


def _pointwise(kernel):  # [in, out] -> [out, in, 1, 1]
    return kernel.T[:, :, None, None]


def _layer(name: str, *paths: str, kernel: Callable[[np.ndarray], np.ndarray]) -> list[Entry]:
    """Returns the entries of a linear layer or convolution; `kernel` is the kernel's view."""
    kernels = tuple(f"{path}/kernel" for path in paths)
    biases = tuple(f"{path}/bias" for path in paths)
    return [Entry(f"{name}.weight", kernels, kernel), Entry(f"{name}.bias", biases, np.ravel)]


def _norm(name: str, path: str) -> list[Entry]:
    return [Entry(f"{name}.weight", (f"{path}/scale",)), Entry(f"{name}.bias", (f"{path}/bias",))]


def _batch_norm(name: str, path: str) -> list[Entry]:
    return [
        *_norm(name, path),
        Entry(f"{name}.running_mean", (f"{path}/mean",)),
        Entry(f"{name}.running_var", (f"{path}/variance",)),
    ]


def _stack(name: str, path: str, depth: int, block: Collection[Entry]) -> Iterator[Entry]:
    """Repeats the entries of a block for every layer of our stack."""
    for layer in range(depth):
        for entry in block:
            paths = tuple(f"{path}/{end}" for end in entry.paths)
            yield Entry(f"{name}.{layer}.{entry.name}", paths, entry.view, layer)


# -- the entries of every family -------------------------------------------------------------------

TRANSFORMER_BLOCK = (
    *_norm("norm1", "norm1"),
    *_layer("attn.qkv", "attention/query", "attention/key", "attention/value", kernel=_dense),
    *_layer("attn.proj", "attention/out", kernel=_heads_to_width),
    *_norm("norm2", "norm2"),
    *_layer("mlp.fc1", "mlp/fc1", kernel=_dense),
    *_layer("mlp.fc2", "mlp/fc2", kernel=_dense),
)
SWIN_BLOCK = (
    *TRANSFORMER_BLOCK,
    Entry("attn.relative_position_bias_table", ("relative_position_bias",)),
)
MIXER_BLOCK = (
    *_norm("norm1", "norm1"),
    *_layer("mlp_tokens.fc1", "token_mlp/fc1", kernel=_dense),
    *_layer("mlp_tokens.fc2", "token_mlp/fc2", kernel=_dense),
    *_norm("norm2", "norm2"),
    *_layer("mlp_channels.fc1", "mlp/fc1", kernel=_dense),
    *_layer("mlp_channels.fc2", "mlp/fc2", kernel=_dense),
)
CONVMIXER_BLOCK = (
    *_layer("0.fn.0", "spatial", kernel=_depthwise),
    *_batch_norm("0.fn.2", "norm1"),
    *_layer("1", "channel", kernel=_pointwise),
    *_batch_norm("3", "norm2"),
)


def _entries(model: nnx.Module) -> list[Entry]:
    family = type(model)
    needs = f"one of {', '.join(known.__name__ for known in _FAMILIES)}"
    require("type(model)", family, needs, family in _FAMILIES)
    return list(_FAMILIES[family](model))


def _vit(model: VisionTransformer) -> Iterator[Entry]:
    """Lists the entries of timm's `VisionTransformer` or, with rotary positions, `Eva`."""
    yield from _layer("patch_embed.proj", "patch_embedding", kernel=_conv)
    if model.pool == "class_token":
        yield Entry("cls_token", ("class_token",), lambda token: token[None, None])
    if model.positions is not None:
        yield Entry("pos_embed", ("positions",), lambda table: table[None])
    yield from _stack("blocks", "blocks", model.depth, TRANSFORMER_BLOCK)
    if model.blocks.scale1 is not None:
        eva = model.position_kind == "rope"
        scale1 = Entry("gamma_1" if eva else "ls1.gamma", ("scale1",))
        scale2 = Entry("gamma_2" if eva else "ls2.gamma", ("scale2",))
        yield from _stack("blocks", "blocks", model.depth, (scale1, scale2))
    yield from _norm("fc_norm" if model.pool == "mean" else "norm", "norm")
    yield from _layer("head", "head", kernel=_dense)


def _swin(model: SwinTransformer) -> Iterator[Entry]:
    """Lists the entries of timm's `SwinTransformer`."""
    yield from _layer("patch_embed.proj", "patch_embedding", kernel=_conv)
    yield from _norm("patch_embed.norm", "patch_norm")
    for i, depth in enumerate(model.depths):
        stage = f"stage{i + 1}"
        if i:
            merging = f"layers.{i}.downsample"
            yield from _norm(f"{merging}.norm", f"{stage}/merging/norm")
            kernel = f"{stage}/merging/reduction/kernel"
            yield Entry(f"{merging}.reduction.weight", (kernel,), _dense)
        yield from _stack(f"layers.{i}.blocks", f"{stage}/blocks", depth, SWIN_BLOCK)
    yield from _norm("norm", "norm")
    yield from _layer("head.fc", "head", kernel=_dense)


def _mixer(model: MlpMixer) -> Iterator[Entry]:
    """Lists the entries of timm's `MlpMixer`."""
    yield from _layer("stem.proj", "patch_embedding", kernel=_conv)
    yield from _stack("blocks", "blocks", model.depth, MIXER_BLOCK)
    yield from _norm("norm", "norm")
    yield from _layer("head", "head", kernel=_dense)


def _convmixer(model: ConvMixer) -> Iterator[Entry]:
    """Lists the entries of timm's `ConvMixer`."""
    yield from _layer("stem.0", "patch_embedding", kernel=_conv)
    yield from _batch_norm("stem.2", "stem_norm")
    yield from _stack("blocks", "blocks", model.depth, CONVMIXER_BLOCK)
    yield from _layer("head", "head", kernel=_dense)


_FAMILIES: Mapping[type[Model], Callable[..., Iterator[Entry]]] = {
    VisionTransformer: _vit,
    SwinTransformer: _swin,
    MlpMixer: _mixer,
    ConvMixer: _convmixer,
}


def _computed(model: Model) -> dict[str, np.ndarray]:
    """Returns the tensors that timm saves but our model computes or does not need."""
    if isinstance(model, VisionTransformer) and model.position_kind == "sincos":
        return {"pos_embed": _sincos(model.grid, model.width, model.num_prefix)}
    if isinstance(model, ConvMixer):
        # PyTorch uses the number of batches only with momentum=None, which timm does not set.
        names = [entry.name for entry in _convmixer(model) if "running_mean" in entry.name]
        counts = [name.replace("running_mean", "num_batches_tracked") for name in names]
        return {count: np.zeros((), np.int64) for count in counts}
    return {}


def _sincos(grid, width, num_prefix):
    return np.pad(sincos_positions(grid, width), ((num_prefix, 0), (0, 0)))[None]


def _check_sincos(table: np.ndarray, model: VisionTransformer) -> None:
    """Raises `InputError` unless a table encodes the model's grid, or a square one of any size."""
    *_, num_tokens, width = table.shape
    side = math.isqrt(max(num_tokens - model.num_prefix, 0))
    tolerance = max(1e-5, float(jnp.finfo(table.dtype).eps))  # for half precision
    for grid in (model.grid, (side, side)):
        expected = _sincos(grid, width, model.num_prefix)
        same_shape = table.shape == expected.shape
        if same_shape and np.allclose(np.float32(table), expected, atol=tolerance):
            return
    raise InputError(
        "state_dict['pos_embed'] is not the sin-cos encoding of a grid: load it into a model with "
        "positions='learned'"
    )


# -- weight selection ------------------------------------------------------------------------------


def select_weights(teacher: StateDict, student: nnx.Module) -> nnx.Module:
    """Returns a copy of one of our models with weights selected from a larger timm model.

    This is the method of Xu et al. 2024, "Initializing Models with Larger Ones" (arXiv:2311.18823).
    The student takes the teacher's first layers. Along an axis of n elements in the teacher and m
    in the student, it takes every (n / m)-th element, starting with the first, if m divides n, else
    the elements nearest to m evenly spaced points from the first to the last.

    Weights are selected in timm's layout. As in the published code, query, key and value are then
    3 h d outputs of one linear layer, so a student's head can mix channels of several heads.

    Patch and window size must be equal. A learned position table of another grid, assumed to be
    square, is resampled as in timm. The student keeps its head, fixed positions and integers.

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
    entries = [entry for entry in _entries(student) if not entry.name.startswith("head.")]
    computed = _computed(student)
    names = {entry.name for entry in entries} | computed.keys()
    read = _read_names(teacher)
    large = {name: array for name, array in read.items() if not name.startswith("head.")}
    layers = {_without_numbers(name) for name in names}  # the teacher can have more layers
    unexpected = {name for name in large if _without_numbers(name) not in layers}
    _check_names(missing=names - large.keys(), unexpected=unexpected)
    if "pos_embed" in computed:
        _check_sincos(np.asarray(large["pos_embed"]), student)
    elif "pos_embed" in large:
        large["pos_embed"] = _fit_positions(large["pos_embed"], student)
    small = _zeros(_arrays_by_path(student, entries), entries)
    selected = {e.name: _select(e.name, np.asarray(large[e.name]), e.shape(small)) for e in entries}
    model = nnx.clone(student)
    _write(model, entries, selected)
    return model


def _fit_positions(table: Any, student: VisionTransformer) -> Any:
    """Resamples learned positions to the student's grid, bicubically with antialiasing as in timm.

    The position of a class token comes first and is kept.
    """
    num_tokens = table.shape[-2] - student.num_prefix
    side = math.isqrt(max(num_tokens, 0))
    if num_tokens == math.prod(student.grid) or side**2 != num_tokens:
        return table
    width = table.shape[-1]
    positions = jnp.asarray(table[0], jnp.float32)
    grid = positions[student.num_prefix :].reshape(side, side, width)
    grid = jax.image.resize(grid, (*student.grid, width), "cubic", antialias=True)
    return jnp.concatenate([positions[: student.num_prefix], grid.reshape(-1, width)])[None]


def _select(name, teacher, shape):
    """Takes evenly spaced elements along every axis."""
    places = next((axes for end, axes in PLACES.items() if name.endswith(end)), slice(0))
    needs = (
        f"at least the student's, {shape}: use a smaller student with the same channels, patch "
        "size, window size and number of tokens"
    )
    same_places = teacher.ndim == len(shape) and teacher.shape[places] == shape[places]
    fits = same_places and all(n >= m for n, m in zip(teacher.shape, shape, strict=True))
    require(f"teacher[{name!r}].shape", teacher.shape, needs, fits)
    for axis, (n, m) in enumerate(zip(teacher.shape, shape, strict=True)):
        even = np.arange(0, n, n // m) if n % m == 0 else np.linspace(0, n - 1, m)
        teacher = teacher.take(np.round(even).astype(np.int32), axis=axis)
    return teacher


def _without_numbers(name: str) -> str:
    """Replaces the layer numbers in a name."""
    return re.sub(r"\.\d+(?=\.)", ".*", name)
