"""Weights of our models from timm and back: every name mapped, none left over.

    from safetensors.numpy import load_file, save_file

    from_timm(model, load_file("vit_tiny.safetensors"))
    save_file(to_timm(model), "ours.safetensors")

Torch is not needed: a state dict is names and NumPy arrays. For tensors of torch pass
`{name: tensor.numpy() for name, tensor in state_dict.items()}`.
"""

from collections.abc import Mapping

import numpy as np
from flax import nnx, traverse_util

from structinit_jax.errors import InputError
from structinit_jax.interop import timm_convmixer, timm_mixer, timm_swin, timm_vit
from structinit_jax.models.convmixer import ConvMixer
from structinit_jax.models.mixer import MlpMixer
from structinit_jax.models.swin import SwinTransformer
from structinit_jax.models.vit import VisionTransformer

StateDict = Mapping[str, np.ndarray]
ENTRIES = {
    VisionTransformer: timm_vit.entries,
    SwinTransformer: timm_swin.entries,
    MlpMixer: timm_mixer.entries,
    ConvMixer: timm_convmixer.entries,
}
# Names of entries that hold no weights, which `load` passes over.
BUFFERS = {SwinTransformer: timm_swin.buffers}


def to_timm(model: nnx.Module) -> dict[str, np.ndarray]:
    """The model's weights, fixed ones and running statistics too, in timm's names and layout."""
    ours = _weights(model)
    return {
        entry.name: np.asarray(entry.encode(*_arrays(ours, entry)), order="C")
        for entry in ENTRIES[type(model)](model)
    }


def from_timm(model: nnx.Module, state_dict: StateDict) -> None:
    """Puts timm's weights into a model of the same architecture, in place.

    Raises:
      InputError: if an entry is missing, left over or of another shape; nothing is changed then.
    """
    ours = {path: value.copy() for path, value in _weights(model).items()}
    remaining = dict(state_dict)
    if type(model) in BUFFERS:
        for name in BUFFERS[type(model)](model):
            remaining.pop(name, None)
    for entry in ENTRIES[type(model)](model):
        if entry.name not in remaining:
            raise InputError(
                f"state_dict has no {entry.name!r}, which the model needs for "
                f"{', '.join(entry.paths)}: is it of the same architecture and depth?"
            )
        array = np.asarray(remaining.pop(entry.name))
        targets = _arrays(ours, entry)
        expected = np.shape(entry.encode(*targets))
        if array.shape != expected:
            raise InputError(
                f"state_dict[{entry.name!r}] has shape {array.shape}: the model needs {expected}"
            )
        decoded = entry.decode(array, [target.shape for target in targets])
        for target, value in zip(targets, decoded, strict=True):
            target[...] = value
    if remaining:
        names = ", ".join(sorted(remaining))
        raise InputError(f"state_dict has entries that the model has no place for: {names}")
    state = nnx.state(model)
    nnx.replace_by_pure_dict(state, traverse_util.unflatten_dict(ours, sep="/"))
    nnx.update(model, state)


def _weights(model: nnx.Module) -> dict[str, np.ndarray]:
    pure = nnx.to_pure_dict(nnx.state(model))
    return {p: np.asarray(v) for p, v in traverse_util.flatten_dict(pure, sep="/").items()}


def _arrays(ours, entry):
    """The entry's arrays, as views."""
    return [
        ours[path] if entry.layer is None else ours[path][entry.layer, ...] for path in entry.paths
    ]
