"""RandAugment as in timm (Cubuk et al. 2020, https://arxiv.org/abs/1909.13719).

Under `vmap`, a `lax.switch` over the 15 operations would compute all of them for every image. Here
they are reduced to five kernels, each of which runs only on the images that need it.
"""

import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, UInt8

from structinit_jax.augment import transforms
from structinit_jax.augment.transforms import apply_where

PROBABILITY = 0.5  # of applying each drawn operation
MAX_MAGNITUDE = 10.0
# The operations in timm's order, and the kernel that computes each (see `_apply_operation`).
# timm's increasing set appends 'Increasing' to six of the names.
_KERNELS = {
    "AutoContrast": "lut",
    "Equalize": "equalize",
    "Invert": "lut",
    "Rotate": "warp",
    "Posterize": "lut",
    "Solarize": "lut",
    "SolarizeAdd": "lut",
    "Color": "saturation",
    "Contrast": "lut",
    "Brightness": "lut",
    "Sharpness": "sharpness",
    "ShearX": "warp",
    "ShearY": "warp",
    "TranslateXRel": "warp",
    "TranslateYRel": "warp",
}
OPERATIONS = tuple(_KERNELS)
NO_OPERATION = len(OPERATIONS)


class Policy(NamedTuple):
    """A parsed policy string."""

    magnitude: float  # 'm', the mean
    magnitude_std: float  # 'mstd'
    num_operations: int  # 'n', drawn for each image
    increasing: bool  # 'inc', whether a higher magnitude always means a stronger change


class DrawnOperations(NamedTuple):
    """The `n` operations drawn for an image."""

    operation: Int[Array, " n"]  # indices into `OPERATIONS`, or `NO_OPERATION`
    argument: Float[Array, " n"]  # see `operation_arguments`
    bicubic: Bool[Array, " n"]  # whether a warp interpolates bicubically rather than bilinearly


POLICY = (
    "a RandAugment policy: 'rand' followed by any of -mM, -mstdS (S <= 100), -nN (N >= 1), -inc0 "
    "or -inc1, for example 'rand-m9-mstd0.5-inc1'"
)
_PATTERN = re.compile(r"rand(-(m|mstd)\d+\.?\d*|-n\d+|-inc[01])*")


def parse(text: str) -> Policy | None:
    """Parses a timm policy string, such as 'rand-m9-mstd0.5-inc1'.

    Returns None if the string is malformed or contains something unsupported: timm's keys 'p',
    'mmax' and 't', or an 'mstd' above 100, which means uniform magnitudes in timm.
    """
    if not _PATTERN.fullmatch(text):
        return None
    numbers = dict(re.findall(r"-([a-z]+)(\d+\.?\d*)", text))
    policy = Policy(
        magnitude=float(numbers.get("m", 10)),
        magnitude_std=float(numbers.get("mstd", 0)),
        num_operations=int(numbers.get("n", 2)),
        increasing=numbers.get("inc") == "1",
    )
    return policy if policy.num_operations > 0 and policy.magnitude_std <= 100 else None


def draw_operations(rng: Key[Array, ""], policy: Policy) -> DrawnOperations:
    """Draws the operations for an image, uniformly and with replacement.

    Warps interpolate bilinearly or bicubically with equal probability.
    """
    n = policy.num_operations
    operation_rng, apply_rng, magnitude_rng, sign_rng, bicubic_rng = jax.random.split(rng, 5)
    operation = jax.random.randint(operation_rng, (n,), 0, len(OPERATIONS))
    noise = jax.random.normal(magnitude_rng, (n,))
    magnitude = jnp.clip(policy.magnitude + policy.magnitude_std * noise, 0, MAX_MAGNITUDE)
    negative = jax.random.bernoulli(sign_rng, shape=(n,))
    arguments = operation_arguments(magnitude, negative, increasing=policy.increasing)
    skip = jax.random.uniform(apply_rng, (n,)) >= PROBABILITY
    return DrawnOperations(
        operation=jnp.where(skip, NO_OPERATION, operation),
        argument=jnp.take_along_axis(arguments, operation[:, None], axis=1)[:, 0],
        bicubic=jax.random.bernoulli(bicubic_rng, shape=(n,)),
    )


def operation_arguments(
    magnitude: Float[Array, "*n"], negative: Bool[Array, "*n"], *, increasing: bool
) -> Float[Array, "*n 15"]:
    """Returns the argument of each of `OPERATIONS` at a magnitude in [0, 10]; 0 if it has none.

    These are degrees, numbers of bits, thresholds, added pixel values, enhancement factors, shears,
    and translations as fractions of the image size. `negative` negates rotations, shears and
    translations and, in the increasing set, reduces color, contrast, brightness and sharpness. In
    timm's default set, Posterize and Solarize are weaker at higher magnitudes, and enhancement
    factors are 1 at magnitude 5.
    """
    level = magnitude / MAX_MAGNITUDE
    sign = jnp.where(negative, -1.0, 1.0)
    bits = jnp.floor(level * 4)
    threshold = jnp.floor(level * 256)
    factor = level * 1.8 + 0.1
    if increasing:
        bits = 4 - bits
        threshold = 256 - threshold
        factor = 1 + sign * (level * 0.9)
    shear = sign * (level * 0.3)
    translation = sign * (level * 0.45)
    arguments = {
        "Rotate": sign * (level * 30),
        "Posterize": bits,
        "Solarize": threshold,
        "SolarizeAdd": jnp.floor(level * 110),
        "Color": factor,
        "Contrast": factor,
        "Brightness": factor,
        "Sharpness": factor,
        "ShearX": shear,
        "ShearY": shear,
        "TranslateXRel": translation,
        "TranslateYRel": translation,
    }
    none = jnp.zeros_like(level)
    return jnp.stack([arguments.get(name, none) for name in OPERATIONS], axis=-1)


def apply_operations(
    images: UInt8[Array, "B H W C"], drawn: DrawnOperations, fill: tuple[int, ...]
) -> UInt8[Array, "B H W C"]:
    """Applies the `n` operations drawn for each image in sequence.

    Images have one or three channels, and the fields of `drawn` have shape [B, n]. Warps fill the
    area outside the image with `fill`, one value per channel.
    """

    def apply(images, drawn):
        return _apply_operation(images, drawn, fill), None

    images = images.transpose(0, 3, 1, 2)
    images, _ = jax.lax.scan(apply, images, jax.tree.map(jnp.transpose, drawn))
    return images.transpose(0, 2, 3, 1)


def _apply_operation(images, drawn, fill):
    """Applies one operation to each image `[B, C, H, W]`; fields of `drawn` have shape `[B]`."""
    operation, argument, bicubic = drawn

    def computed_by(kernel):
        indices = [i for i, name in enumerate(OPERATIONS) if _KERNELS[name] == kernel]
        return jnp.isin(operation, jnp.array(indices))

    for cubic in (False, True):
        warp = functools.partial(_warp, bicubic=cubic, fill=fill)
        mask = computed_by("warp") & (bicubic == cubic)
        images = apply_where(warp, mask, images, operation, argument)
    images = apply_where(_apply_lut, computed_by("lut"), images, operation, argument)
    images = apply_where(transforms.equalize, computed_by("equalize"), images)
    images = apply_where(transforms.adjust_saturation, computed_by("saturation"), images, argument)
    return apply_where(transforms.adjust_sharpness, computed_by("sharpness"), images, argument)


def _warp(image, operation, argument, bicubic, fill):
    """Applies an operation that is an affine map."""
    _, H, W = image.shape
    zero = jnp.zeros_like(argument)

    def argument_of(name):
        return jnp.where(operation == OPERATIONS.index(name), argument, zero)

    # Rotation by 0 degrees is exactly the identity, since cos 0 = 1 and sin 0 = 0.
    rotation = transforms.rotation_matrix(argument_of("Rotate"), H, W)
    x = [zero, argument_of("ShearX"), argument_of("TranslateXRel") * W]
    y = [argument_of("ShearY"), zero, argument_of("TranslateYRel") * H]
    return transforms.affine_warp(image, rotation + jnp.stack(x + y), bicubic, fill)


def _apply_lut(image, operation, argument):
    """Applies an operation that is a lookup table."""
    pixel = transforms.VALUES
    whole = argument.astype(jnp.int32)
    low_bits = 8 - jnp.clip(whole, 0, 8)
    luts = {
        "AutoContrast": transforms.autocontrast_lut(image),
        "Invert": 255 - pixel,
        "Posterize": (pixel >> low_bits) << low_bits,
        "Solarize": jnp.where(pixel < whole, pixel, 255 - pixel),
        "SolarizeAdd": jnp.where(pixel < 128, jnp.minimum(pixel + whole, 255), pixel),
        "Contrast": transforms.contrast_lut(image, argument),
        "Brightness": transforms.blend(jnp.zeros_like(pixel), pixel, argument),
    }
    selected = jnp.stack([operation == OPERATIONS.index(name) for name in luts])
    candidates = jnp.stack([jnp.broadcast_to(lut, (len(image), 256)) for lut in luts.values()])
    # Select by a product: XLA would fuse a `where` into the lookup and recompute the tables for
    # every pixel. Pixel values are exact in any floating-point format that a product may use.
    lut = jnp.einsum("t,tcv->cv", selected.astype(jnp.float32), candidates.astype(jnp.float32))
    return transforms.apply_lut(image, lut.astype(jnp.uint8))
