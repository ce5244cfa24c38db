"""Weights of our models from timm and back: every name mapped, none left over.

    from safetensors.numpy import load_file, save_file

    timm.load(model, load_file("vit_tiny.safetensors"))
    save_file(timm.export(model), "ours.safetensors")

Torch is not needed: a state dict is names and NumPy arrays. For tensors of torch pass
`{name: tensor.numpy() for name, tensor in state_dict.items()}`.
"""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

from structinit_jax.errors import InputError
from structinit_jax.interop import timm_vit
from structinit_jax.models.vit import VisionTransformer

StateDict = Mapping[str, np.ndarray]
ENTRIES = {VisionTransformer: timm_vit.entries}


def export(model: nnx.Module) -> dict[str, np.ndarray]:
    """The model's weights under timm's names and in timm's layout."""
    ours = _weights(model)
    return {
        e.name: np.ascontiguousarray(
            e.encode(*(ours[p] if e.layer is None else ours[p][e.layer] for p in e.paths))
        )
        for e in ENTRIES[type(model)](model)
    }


def load(model: nnx.Module, state_dict: StateDict) -> None:
    """Puts timm's weights into a model of the same architecture, in place.

    Raises:
      InputError: if an entry is missing, left over or of another shape; nothing is changed then.
    """
    ours = {path: value.copy() for path, value in _weights(model).items()}
    remaining = dict(state_dict)
    filled: dict[str, int] = {}
    for entry in ENTRIES[type(model)](model):
        if entry.name not in remaining:
            raise InputError(
                f"state_dict has no {entry.name!r}, which the model needs for "
                f"{', '.join(entry.paths)}: is it of the same architecture and depth?"
            )
        array = np.asarray(remaining.pop(entry.name))
        targets = [ours[p] if entry.layer is None else ours[p][entry.layer] for p in entry.paths]
        expected = np.shape(entry.encode(*targets))
        if (
            array.size != np.prod(expected)
            or array.squeeze().shape != np.squeeze(np.empty(expected)).shape
        ):
            raise InputError(
                f"state_dict[{entry.name!r}] has shape {array.shape}, but the model needs {expected}"
            )
        decoded = entry.decode(array.reshape(expected), [t.shape for t in targets])
        for path, target, value in zip(entry.paths, targets, decoded, strict=True):
            target[...] = value
            filled[path] = filled.get(path, 0) + 1
    if remaining:
        raise InputError(
            f"state_dict has entries that the model has no place for: {', '.join(sorted(remaining))}"
        )
    state = nnx.state(model)
    flat = dict(nnx.to_flat_state(state))
    for keys in flat:
        flat[keys][...] = jnp.asarray(ours["/".join(map(str, keys))])
    nnx.update(model, nnx.from_flat_state(list(flat.items())))


def _weights(model: nnx.Module) -> dict[str, np.ndarray]:
    pure = nnx.to_pure_dict(nnx.state(model))
    return {p: np.asarray(v) for p, v in traverse_util.flatten_dict(pure, sep="/").items()}
