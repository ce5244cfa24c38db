"""Models by config."""

import difflib
from collections.abc import Mapping
from typing import Any

from flax import nnx

from structinit_jax.errors import InputError
from structinit_jax.models.mixer import MlpMixer
from structinit_jax.models.vit import VisionTransformer

MODELS = {"vit": VisionTransformer, "mixer": MlpMixer}


def create_model(
    options: Mapping[str, Any], *, image_size: int, channels: int, rngs: nnx.Rngs
) -> nnx.Module:
    """Builds the model that `config.model` describes, with its own default start values.

    Args:
      options: the fields of `config.model`: `name` and the model's own arguments.
      image_size: side of the input in pixels.
      channels: input channels.
      rngs: draws the start values.

    Raises:
      InputError: for an unknown model, or sizes that do not fit one another.
    """
    options = dict(options)
    name = options.pop("name")
    if name not in MODELS:
        near = difflib.get_close_matches(str(name), MODELS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise InputError(f"model.name={name!r} is no model: {hint}there are {', '.join(MODELS)}")
    return MODELS[name](**options, image_size=image_size, channels=channels, rngs=rngs)
