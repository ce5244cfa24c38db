"""Converts weights of our models to and from timm, with one converter per family.

    from safetensors.numpy import load_file, save_file

    from_timm(model, load_file("vit_tiny.safetensors"))
    save_file(to_timm(model), "ours.safetensors")

A converter lists the entries of timm's state dict for a model: timm's name on the left, the path of
our arrays on the right. Our arrays have a leading axis for the layers that timm numbers.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

from structinit_jax.attention_init import sincos_positions
from structinit_jax.errors import InputError
from structinit_jax.interop.entries import Entry, conv, like, linear, norm, same
from structinit_jax.interop.layouts import TIMM
from structinit_jax.models.convmixer import ConvMixer
from structinit_jax.models.mixer import MlpMixer
from structinit_jax.models.swin import SwinTransformer
from structinit_jax.models.vit import VisionTransformer


def to_timm(model: nnx.Module) -> dict[str, np.ndarray]:
    """Returns a model's weights, fixed ones and running statistics included, as timm's state dict.

    Raises:
      InputError: The model's family has no converter.
    """
    ours = {path: np.asarray(array) for path, array in _arrays_by_path(model).items()}
    return {
        entry.name: np.asarray(entry.encode(*entry.arrays(ours)), order="C")
        for entry in timm_entries(model)
        if entry.encode is not None
    }


def from_timm(model: nnx.Module, state_dict: Mapping[str, np.ndarray]) -> None:
    """Loads timm's weights into a model of the same architecture, in place.

    Raises:
      InputError: The model's family has no converter, or an entry is missing, unexpected or of
        another shape. The model is then unchanged.
    """
    old = _arrays_by_path(model)
    ours = {path: np.array(array) for path, array in old.items()}
    remaining = dict(state_dict)
    for entry in timm_entries(model):
        if entry.encode is None:
            remaining.pop(entry.name, None)
            continue
        if entry.name not in remaining:
            raise InputError(
                f"state_dict has no {entry.name!r}: is it of the same architecture and depth?"
            )
        tensor = np.asarray(remaining.pop(entry.name))
        targets = entry.arrays(ours)
        shapes = [target.shape for target in targets]
        if tensor.shape != entry.shape(shapes):
            raise InputError(
                f"state_dict[{entry.name!r}] has shape {tensor.shape}, but the model needs "
                f"{entry.shape(shapes)}: create the model for these weights (num_classes, "
                "image_size), or train from them with config.start_from, which draws a new head "
                "and resamples the positions"
            )
        for target, value in zip(targets, entry.decode(tensor, shapes), strict=True):
            target[...] = value
    if remaining:
        raise InputError(f"the model has no place for: {', '.join(sorted(remaining))}")
    new = {path: like(array, old[path]) for path, array in ours.items()}
    state = nnx.state(model)
    nnx.replace_by_pure_dict(state, traverse_util.unflatten_dict(new, sep="/"))
    nnx.update(model, state)


def timm_entries(model: nnx.Module) -> Iterator[Entry]:
    """Yields the entries of timm's state dict for a model; `InputError` without a converter."""
    if type(model) not in CONVERTERS:
        families = ", ".join(family.__name__ for family in CONVERTERS)
        raise InputError(f"no converter to timm for {type(model).__name__}, only for {families}")
    return CONVERTERS[type(model)](model)


def vit(model: VisionTransformer) -> Iterator[Entry]:
    """Maps timm's `VisionTransformer`, or with rotary positions its `Eva`."""
    yield from conv("patch_embed.proj", "patch_embedding")
    if model.config.pool == "class_token":
        yield same("cls_token", "class_token", lead=2)
    if model.config.num_registers:
        yield same("reg_token", "registers", lead=1)
    if model.positions is not None:
        yield same("pos_embed", "positions", lead=1)
    elif model.config.positions != "rope":  # timm does not save rotations
        yield _fixed_positions(model)
    for i in range(model.config.depth):
        yield from _block(f"blocks.{i}", "blocks", i)
        if model.blocks.attention.query_norm is not None:
            yield from norm(f"blocks.{i}.attn.q_norm", "blocks/attention/query_norm", i)
            yield from norm(f"blocks.{i}.attn.k_norm", "blocks/attention/key_norm", i)
        if model.blocks.scale1 is not None:
            scales = (
                ("gamma_1", "gamma_2")
                if model.config.positions == "rope"
                else ("ls1.gamma", "ls2.gamma")
            )
            yield same(f"blocks.{i}.{scales[0]}", "blocks/scale1", i)
            yield same(f"blocks.{i}.{scales[1]}", "blocks/scale2", i)
    yield from norm("fc_norm" if model.config.pool == "mean" else "norm", "norm")
    yield from linear("head", "head")


def _fixed_positions(model: VisionTransformer) -> Entry:
    """The sin-cos encoding, which timm stores as a weight and our model computes."""

    def encoding(grid, width):
        return np.pad(sincos_positions(grid, width), ((model.config.num_prefix, 0), (0, 0)))[None]

    def decode(tensor, shapes):
        rounding = jnp.finfo(tensor.dtype).eps  # weights may be stored in half precision
        *_, num_tokens, width = tensor.shape
        side = math.isqrt(max(num_tokens - model.config.num_prefix, 0))
        for grid in (model.grid, (side, side)):  # the weights may be of another image size
            expected = encoding(grid, width)
            if tensor.shape != expected.shape:
                continue
            if np.allclose(tensor.astype(np.float32), expected, atol=max(1e-5, rounding)):
                return []
        raise InputError(
            "state_dict['pos_embed'] is not the sin-cos encoding of a grid: load it into a model "
            "with positions='learned'"
        )

    return Entry("pos_embed", (), lambda: encoding(model.grid, model.norm.scale.shape[0]), decode)


def swin(model: SwinTransformer) -> Iterator[Entry]:
    """Maps timm's `SwinTransformer`."""
    yield from conv("patch_embed.proj", "patch_embedding")
    yield from norm("patch_embed.norm", "patch_norm")
    for s in range(len(model.config.depths)):
        stage, ours = f"layers.{s}", f"stage{s + 1}"
        if s:
            yield from norm(f"{stage}.downsample.norm", f"{ours}/merging/norm")
            reduction = f"{stage}.downsample.reduction"
            yield from linear(reduction, f"{ours}/merging/reduction", bias=False)
        for i in range(model.config.depths[s]):
            block, blocks = f"{stage}.blocks.{i}", f"{ours}/blocks"
            yield from _block(block, blocks, i)
            table = f"{block}.attn.relative_position_bias_table"
            yield same(table, f"{blocks}/relative_position_bias", i)
            # Buffers that timm no longer saves; both are functions of the sizes.
            for buffer in ("attn.relative_position_index", "attn_mask"):
                yield Entry(f"{block}.{buffer}", (), None, lambda tensor, shapes: [])
    yield from norm("norm", "norm")
    yield from linear("head.fc", "head")


def mixer(model: MlpMixer) -> Iterator[Entry]:
    """Maps timm's `MlpMixer`."""
    yield from conv("stem.proj", "patch_embedding")
    for i in range(model.config.depth):
        yield from norm(f"blocks.{i}.norm1", "blocks/norm1", i)
        yield from linear(f"blocks.{i}.mlp_tokens.fc1", "blocks/token_mlp/fc1", layer=i)
        yield from linear(f"blocks.{i}.mlp_tokens.fc2", "blocks/token_mlp/fc2", layer=i)
        yield from norm(f"blocks.{i}.norm2", "blocks/norm2", i)
        yield from linear(f"blocks.{i}.mlp_channels.fc1", "blocks/mlp/fc1", layer=i)
        yield from linear(f"blocks.{i}.mlp_channels.fc2", "blocks/mlp/fc2", layer=i)
    yield from norm("norm", "norm")
    yield from linear("head", "head")


def convmixer(model: ConvMixer) -> Iterator[Entry]:
    """Maps timm's `ConvMixer`."""
    yield from conv("stem.0", "patch_embedding")
    yield from _batch_norm("stem.2", "stem_norm")
    for i in range(model.config.depth):
        yield from conv(f"blocks.{i}.0.fn.0", "blocks/spatial", i)
        yield from _batch_norm(f"blocks.{i}.0.fn.2", "blocks/norm1", i)
        yield from conv(f"blocks.{i}.1", "blocks/channel", i)
        yield from _batch_norm(f"blocks.{i}.3", "blocks/norm2", i)
    yield from linear("head", "head")


def _block(name: str, path: str, layer: int) -> Iterator[Entry]:
    """The parts of a transformer block that ViT and Swin have in common."""
    yield from norm(f"{name}.norm1", f"{path}/norm1", layer)
    yield from TIMM.entries(f"{name}.attn", f"{path}/attention", layer)
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


CONVERTERS: Mapping[type[nnx.Module], Callable[..., Iterator[Entry]]] = {
    VisionTransformer: vit,
    SwinTransformer: swin,
    MlpMixer: mixer,
    ConvMixer: convmixer,
}
