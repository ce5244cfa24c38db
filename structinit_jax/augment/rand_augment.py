"""RandAugment in timm's variant, through four batched kernels.

Cubuk et al. 2020 (https://arxiv.org/abs/1909.13719); strings such as 'rand-m9-mstd0.5-inc1' mean
what they mean in timm. Every operation is a case of an affine warp, a table per channel, a blend
with the luminance or a blend with the smoothed image: four kernels, of which each runs over its own
images only. A switch over 15 operations under vmap would run all 15 over all images.
"""

import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, UInt8

from structinit_jax.augment import enhance, tables
from structinit_jax.augment.affine import affine_warp, rotation_matrices
from structinit_jax.augment.chosen import apply_where
from structinit_jax.augment.levels import OPERATIONS, operation_arguments
from structinit_jax.errors import InputError

NO_OPERATION = len(OPERATIONS)
WARPS = ("Rotate", "ShearX", "ShearY", "TranslateXRel", "TranslateYRel")
TABLES = (
    "AutoContrast",
    "Invert",
    "Posterize",
    "Solarize",
    "SolarizeAdd",
    "Contrast",
    "Brightness",
)


class Policy(NamedTuple):
    """What a string says.

    Attributes:
      magnitude: the mean magnitude ('m').
      magnitude_std: its standard deviation ('mstd'); infinite: uniform from 0 to `magnitude`.
      magnitude_max: where drawn magnitudes are cut ('mmax').
      num_operations: operations in sequence ('n').
      probability: that each is applied ('p').
      increasing: timm's set of that name ('inc').
    """

    magnitude: float = 10.0
    magnitude_std: float = 0.0
    magnitude_max: float = 10.0
    num_operations: int = 2
    probability: float = 0.5
    increasing: bool = False


class DrawnOperations(NamedTuple):
    """What happens to each image, in sequence.

    Attributes:
      operation: index into `OPERATIONS`, or `NO_OPERATION`.
      argument: as `operation_arguments` gives it.
      bicubic: how a warp interpolates.
    """

    operation: Int[Array, "B n"]
    argument: Float[Array, "B n"]
    bicubic: Bool[Array, "B n"]


_SECTIONS = {
    "m": ("magnitude", float),
    "mstd": ("magnitude_std", float),
    "mmax": ("magnitude_max", float),
    "n": ("num_operations", int),
    "p": ("probability", float),
    "inc": ("increasing", lambda text: bool(int(text))),
}


def parse(text: str) -> Policy:
    """Reads a string of timm's.

    A deviation above 100 means uniform magnitudes, as in timm; 'mstdinf' says the same here, where
    timm passes over it.

    Raises:
      InputError: it is no such string, or names another set of operations ('t').
    """
    name, *sections = text.split("-")
    fields = {}
    for section in sections:
        match = re.fullmatch(r"([a-z]+?)(\d+\.?\d*|inf)", section)
        if name != "rand" or match is None or match[1] not in _SECTIONS:
            break
        field, read = _SECTIONS[match[1]]
        try:
            fields[field] = read(match[2])
        except ValueError:
            break
    else:
        policy = Policy(**fields)
        if name == "rand" and policy.num_operations > 0 and policy.probability <= 1:
            wide = policy.magnitude_std > 100
            upper = policy.magnitude_max or 10.0
            return policy._replace(
                magnitude_std=float("inf") if wide else policy.magnitude_std, magnitude_max=upper
            )
    raise InputError(
        f"augment.rand_augment={text!r} is not understood: it needs to be 'rand' followed by any "
        "of -mM (magnitude), -mstdS (its deviation), -mmaxX (its limit), -nN (operations), -pP "
        "(probability of each, at most 1) and -inc0 or -inc1, such as 'rand-m9-mstd0.5-inc1'"
    )


def draw_operations(
    keys: Key[Array, " B"], policy: Policy, interpolation: str = "random"
) -> DrawnOperations:
    """Draws each image's operations: uniformly and with replacement.

    Args:
      keys: one for each image.
      policy: what to draw from.
      interpolation: 'bilinear', 'bicubic' or 'random', which tosses a coin for each warp.
    """
    n = policy.num_operations

    def draw(key: Key[Array, ""]) -> DrawnOperations:
        choice, applied, size, sign, coin = jax.random.split(key, 5)
        operation = jax.random.randint(choice, (n,), 0, len(OPERATIONS))
        if policy.magnitude_std == float("inf"):
            magnitude = policy.magnitude * jax.random.uniform(size, (n,))
        else:
            magnitude = policy.magnitude + policy.magnitude_std * jax.random.normal(size, (n,))
        arguments = operation_arguments(
            jnp.clip(magnitude, 0, policy.magnitude_max),
            jax.random.bernoulli(sign, shape=(n,)),
            increasing=policy.increasing,
        )
        argument = jnp.take_along_axis(arguments, operation[:, None], axis=1)[:, 0]
        skipped = jax.random.uniform(applied, (n,)) >= policy.probability
        return DrawnOperations(
            operation=jnp.where(skipped, NO_OPERATION, operation),
            argument=argument,
            bicubic={
                "random": jax.random.bernoulli(coin, shape=(n,)),
                "bilinear": jnp.zeros((n,), bool),
                "bicubic": jnp.ones((n,), bool),
            }[interpolation],
        )

    return jax.vmap(draw)(keys)


def apply_operation(
    images: UInt8[Array, "B C H W"],
    operation: Int[Array, " B"],
    argument: Float[Array, " B"],
    bicubic: Bool[Array, " B"],
    fill: tuple[int, ...],
) -> UInt8[Array, "B C H W"]:
    """Applies to each image an operation of its own.

    Args:
      images: of one or three channels. Color leaves images of one channel as they are.
      operation: indices into `OPERATIONS`; `NO_OPERATION` leaves an image as it is.
      argument: as `operation_arguments` gives it.
      bicubic: which warps interpolate bicubically.
      fill: the colour that warps show beyond the edge, one level for each channel.
    """

    def chosen(*names: str) -> Bool[Array, " B"]:
        return jnp.isin(operation, jnp.array([OPERATIONS.index(name) for name in names]))

    for cubic in (False, True):
        warp = functools.partial(_warp, bicubic=cubic, fill=fill)
        warped = chosen(*WARPS) & (bicubic == cubic)
        images = apply_where(warp, warped, images, operation, argument)
    images = apply_where(_look_up, chosen(*TABLES), images, operation, argument)
    images = apply_where(tables.equalize, chosen("Equalize"), images)
    images = apply_where(enhance.color, chosen("Color"), images, argument)
    return apply_where(enhance.sharpness, chosen("Sharpness"), images, argument)


def rand_augment(
    keys: Key[Array, " B"],
    images: UInt8[Array, "B H W C"],
    policy: Policy,
    *,
    fill: tuple[int, ...],
    interpolation: str = "random",
) -> UInt8[Array, "B H W C"]:
    """Draws and applies each image's operations; arguments as of the functions above."""
    drawn = draw_operations(keys, policy, interpolation)

    def apply(images, drawn):
        return apply_operation(images, *drawn, fill), None

    in_turn = jax.tree.map(jnp.transpose, drawn)
    images, _ = jax.lax.scan(apply, images.transpose(0, 3, 1, 2), in_turn)
    return images.transpose(0, 2, 3, 1)


def _warp(images, operation, argument, bicubic: bool, fill) -> UInt8[Array, "B C H W"]:
    """Applies operations that are each an affine map."""
    H, W = images.shape[2:]
    zero = jnp.zeros_like(argument)

    def pick(name: str) -> Float[Array, " B"]:
        return jnp.where(operation == OPERATIONS.index(name), argument, zero)

    # No angle gives the identity exactly, as cos 0 = 1 and sin 0 = 0.
    turns = rotation_matrices(pick("Rotate"), H, W)
    moves = [
        zero,
        pick("ShearX"),
        pick("TranslateXRel") * W,
        pick("ShearY"),
        zero,
        pick("TranslateYRel") * H,
    ]
    return affine_warp(images, turns + jnp.stack(moves, axis=1), bicubic, fill)


def _look_up(images, operation, argument) -> UInt8[Array, "B C H W"]:
    """Applies operations that are each a table."""
    B, C, _, _ = images.shape
    whole = argument.astype(jnp.int32)
    by_name = {
        "AutoContrast": tables.autocontrast(images),
        "Invert": tables.invert(),
        "Posterize": tables.posterize(whole),
        "Solarize": tables.solarize(whole),
        "SolarizeAdd": tables.solarize_add(whole),
        "Contrast": enhance.contrast_tables(images, argument),
        "Brightness": enhance.brightness_tables(argument),
    }
    flags = jnp.stack([operation == OPERATIONS.index(name) for name in by_name], axis=1)
    candidates = [jnp.broadcast_to(table, (B, C, 256)) for table in by_name.values()]
    # Chosen by a product: XLA would fuse `where` into the look-up and build the tables anew for
    # every pixel. Levels are exact in any floating-point format that a product may use.
    table = jnp.einsum(
        "bt,tbcl->bcl", flags.astype(jnp.float32), jnp.stack(candidates).astype(jnp.float32)
    )
    return tables.apply_tables(images, table.astype(jnp.uint8))
