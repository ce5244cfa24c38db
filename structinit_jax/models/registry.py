"""Models by config, and by timm's names."""

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

from flax import nnx

from structinit_jax.errors import InputError
from structinit_jax.models import convmixer, mixer, swin, vit

FAMILIES = {
    "vit": vit.VisionTransformer,
    "swin": swin.SwinTransformer,
    "mixer": mixer.MlpMixer,
    "convmixer": convmixer.ConvMixer,
}
VARIANTS = {
    name: (family, options)
    for family, module in (
        ("vit", vit),
        ("swin", swin),
        ("mixer", mixer),
        ("convmixer", convmixer),
    )
    for name, options in module.VARIANTS.items()
}
# What a family is where a config names no variant.
DEFAULT_SIZES = {
    "vit": dict(width=192, depth=12, num_heads=3, patch_size=16),
    "swin": swin.VARIANTS["swin_tiny_patch4_window7_224"],
    "mixer": mixer.VARIANTS["mixer_s16_224"],
    "convmixer": convmixer.VARIANTS["convmixer_256_8"],
}
NOT_OPTIONS = ("image_size", "channels", "attention_init", "rngs")  # config.model lacks them


def default_options(name: str) -> dict[str, Any]:
    """Every field of `config.model` for a family ('vit') or a variant ('vit_tiny_patch16_224').

    The variant's `image_size` is among them; it belongs in `config.data`.

    Raises:
      InputError: for an unknown name; it lists the near ones.
    """
    if name in FAMILIES:
        family, options = name, DEFAULT_SIZES[name]
    else:
        _check_known(name, [*FAMILIES, *VARIANTS])
        family, options = VARIANTS[name]
    # Of `__init__`: NNX gives the class itself a signature of `*args, **kwargs`.
    parameters = inspect.signature(FAMILIES[family].__init__).parameters
    defaults = {
        field: parameter.default
        for field, parameter in parameters.items()
        if field not in NOT_OPTIONS and parameter.default is not parameter.empty
    }
    return {"name": family, "num_classes": 1000} | defaults | options


def create_model(
    options: Mapping[str, Any], *, image_size: int, channels: int, rngs: nnx.Rngs
) -> nnx.Module:
    """Builds the model that `config.model` describes, with its own default start values.

    Args:
      options: the fields of `config.model`: the family's `name` and the model's own arguments.
      image_size: side of the input in pixels.
      channels: input channels.
      rngs: draws the start values.

    Raises:
      InputError: for an unknown model, or sizes that do not fit one another.
    """
    options = dict(options)
    name = options.pop("name")
    if name in VARIANTS:
        family, sizes = VARIANTS[name]
        raise InputError(
            f"model.name={name!r} is a variant of {family!r}: start the config from "
            f"base_config({name!r}), or set {', '.join(f'{k}={v}' for k, v in sizes.items())}"
        )
    _check_known(name, list(FAMILIES))
    return FAMILIES[name](**options, image_size=image_size, channels=channels, rngs=rngs)


def _check_known(name: str, known: list[str]) -> None:
    if name in known:
        return
    near = difflib.get_close_matches(str(name), known, n=5, cutoff=0.4)
    hint = f"near ones are {', '.join(near)}" if near else f"there are {', '.join(known)}"
    raise InputError(f"model.name={name!r} is no model: {hint}")
