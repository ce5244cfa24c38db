"""The model families, and their creation by the name of a family or your own class."""

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
    """Returns the options of `create_model` for a model, with every field at its default.

    The name is a family such as 'vit', a variant such as 'vit_tiny_patch16_224', or your own class
    as 'module:Class' (see `model.Model`). Raises `InputError` for other names.
    """
    family, changes = VARIANTS.get(name, (name, {}))
    model = errors.find(family, FAMILIES | VARIANTS, "name")
    return {"name": family} | model.default_config() | changes


def check_fields(fields: Mapping[str, Any]) -> None:
    """Raises `InputError` unless these are a name and valid fields of its family."""
    fields = dict(fields)
    name = fields.pop("name")
    model = errors.find(name, FAMILIES, "name")
    if name in FAMILIES:  # a class of your own checks its fields itself
        errors.check_fields(model.__init__, fields)


def create_model(
    options: Mapping[str, Any], *, image_size: int | None = None, channels: int, rngs: nnx.Rngs
) -> nnx.Module:
    """Builds a model with its default initial values, drawn from the `params` stream of `rngs`.

    `model.initialize_attention(scheme, rng)` then writes a scheme's values into the model.

    Args:
      options: The `name` of a model, as in `default_config`, and fields in place of its defaults.
      image_size: Height and width of the images in pixels. None takes the options' `image_size`.
      channels: Number of channels of the images.
      rngs: Random streams.

    Raises:
      InputError: The model is unknown, or its sizes do not fit each other.
    """
    options = dict(options)
    name = options.pop("name")
    family, changes = VARIANTS.get(name, (name, {}))
    options = {**changes, **options}
    if image_size is not None:
        options["image_size"] = image_size
    model = errors.find(family, FAMILIES | VARIANTS, "name")
    return model(**options, channels=channels, rngs=rngs)
