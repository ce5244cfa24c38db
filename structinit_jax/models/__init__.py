"""The model families, and functions that create a model by name."""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from structinit_jax import errors
from structinit_jax.models.convmixer import ConvMixer
from structinit_jax.models.mixer import MlpMixer
from structinit_jax.models.model import Model
from structinit_jax.models.swin import SwinTransformer
from structinit_jax.models.vit import VisionTransformer

FAMILIES: dict[str, type[Model]] = {
    "vit": VisionTransformer,
    "swin": SwinTransformer,
    "mixer": MlpMixer,
    "convmixer": ConvMixer,
}
VARIANTS = {
    name: (family, changes)
    for family, model in FAMILIES.items()
    for name, changes in model.VARIANTS.items()
}


def default_config(name: str) -> dict[str, Any]:
    """Returns the `create_model` options of a model, with every field at its default.

    The name is a family such as 'vit', a variant such as 'vit_tiny_patch16_224', or your own class,
    written 'module:Class' (see `model.Model`). Raises `InputError` for other names.
    """
    family, changes = VARIANTS.get(name, (name, {}))
    return {"name": family} | _find(family, FAMILIES | VARIANTS).default_config() | changes


def check_fields(fields: Mapping[str, Any]) -> None:
    """Raises `InputError` unless `fields` holds a model name and valid fields for that model."""
    fields = dict(fields)
    name = fields.pop("name", "")
    model = _find(name, FAMILIES)
    if name in FAMILIES:  # your own classes check their fields themselves
        errors.check_fields(model.__init__, fields)


def create_model(options: Mapping[str, Any], *, channels: int, rngs: nnx.Rngs) -> Model:
    """Builds a model with its default initial values, drawn from the `params` stream of `rngs`.

    To apply a scheme afterwards, call `model.initialize_attention(scheme, rng)`.

    Args:
      options: The `name` of a family or class, and its fields, as from `default_config`.
      channels: Number of channels of the images.
      rngs: Random streams.

    Raises:
      InputError: The model is unknown, or its sizes are inconsistent.
    """
    options = dict(options)
    model = _find(options.pop("name", ""), FAMILIES)
    return model(**options, channels=channels, rngs=rngs)


def _find(name: str, known: Mapping[str, Any]) -> type[Model]:
    """Returns the model that a family's name or 'module:Class' refers to; suggests `known` ones."""
    model = errors.find(name, known, "name")
    is_model = isinstance(model, type) and issubclass(model, Model)
    errors.require("name", name, "the name of a subclass of structinit_jax.Model", is_model)
    return model
