"""What timm's RandAugment makes of a magnitude: the argument of each operation."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

OPERATIONS = (
    "AutoContrast",
    "Equalize",
    "Invert",
    "Rotate",
    "Posterize",
    "Solarize",
    "SolarizeAdd",
    "Color",
    "Contrast",
    "Brightness",
    "Sharpness",
    "ShearX",
    "ShearY",
    "TranslateXRel",
    "TranslateYRel",
)
"""In timm's order. Its increasing set has the same names but for a suffix 'Increasing' on six."""


def operation_arguments(
    magnitude: Float[Array, "*n"], negative: Bool[Array, "*n"], *, increasing: bool
) -> Float[Array, "*n 15"]:
    """The argument that each of `OPERATIONS` takes at a magnitude.

    Args:
      magnitude: 0…10, or more where the policy allows it.
      negative: turns the sign of what has a direction: angles, shears, translations, and in the
        increasing set whether an enhancement goes below or beyond 1.
      increasing: whether a higher magnitude always means a stronger change. In timm's other set
        Posterize and Solarize weaken, and Color, Contrast, Brightness and Sharpness pass through
        'no change' at magnitude 5.

    Returns:
      Degrees, bits kept, thresholds, amounts added, enhancement factors, shears, and translations
      as fractions of the image; 0 for operations without an argument.
    """
    level = magnitude / 10
    sign = jnp.where(negative, -1.0, 1.0)
    bits = jnp.floor(level * 4)
    threshold = jnp.minimum(jnp.floor(level * 256), 256)
    enhance = level * 1.8 + 0.1
    if increasing:
        bits, threshold = 4 - bits, 256 - threshold
        enhance = jnp.maximum(1 + sign * (level * 0.9), 0.1)
    zero = jnp.zeros_like(level)
    shear, translation = sign * (level * 0.3), sign * (level * 0.45)
    arguments = {
        "AutoContrast": zero,
        "Equalize": zero,
        "Invert": zero,
        "Rotate": sign * (level * 30),
        "Posterize": bits,
        "Solarize": threshold,
        "SolarizeAdd": jnp.minimum(jnp.floor(level * 110), 128),
        "Color": enhance,
        "Contrast": enhance,
        "Brightness": enhance,
        "Sharpness": enhance,
        "ShearX": shear,
        "ShearY": shear,
        "TranslateXRel": translation,
        "TranslateYRel": translation,
    }
    return jnp.stack([arguments[name] for name in OPERATIONS], axis=-1)
