"""Color, contrast, brightness and sharpness, as in Pillow's ImageEnhance.

Each blends an image with a plain version of itself: its luminance, its mean grey, black, its
smoothed self. A factor of 1 leaves the image as it is, 0 gives the plain version, more than 1 goes
beyond.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from structinit_jax.augment.tables import LEVELS


def blend(plain: Array, levels: Array, factor: Float[Array, "..."]) -> Int[Array, "..."]:
    """`plain` + factor · (`levels` - `plain`) of integer arrays, cut off to whole levels."""
    difference = (levels - plain).astype(jnp.float32)
    # Pillow rounds the product before it adds. Fused into one multiply-add, a whole level may come
    # out one lower; compilers fuse no product that comes through a choice.
    product = jnp.where(difference == 0, 0.0, factor * difference)
    mixed = plain.astype(jnp.float32) + product
    return jnp.clip(mixed, 0, 255).astype(jnp.int32)


def luminance(images: UInt8[Array, "B C H W"]) -> Int[Array, "B 1 H W"]:
    """The ITU-R 601 luma in Pillow's 16-bit integer weights; a single channel is its own."""
    levels = images.astype(jnp.int32)
    if images.shape[1] == 1:
        return levels
    red, green, blue = (levels[:, i : i + 1] for i in range(3))
    return (19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16


def color(images: UInt8[Array, "B C H W"], factor: Float[Array, " B"]) -> UInt8[Array, "B C H W"]:
    """Blends with the luminance: the saturation. Images of one channel stay as they are."""
    if images.shape[1] == 1:
        return images
    mixed = blend(luminance(images), images.astype(jnp.int32), factor[:, None, None, None])
    return mixed.astype(jnp.uint8)


def sharpness(
    images: UInt8[Array, "B C H W"], factor: Float[Array, " B"]
) -> UInt8[Array, "B C H W"]:
    """Blends with the smoothed image: below 1 blurs, above sharpens."""
    mixed = blend(smooth(images), images.astype(jnp.int32), factor[:, None, None, None])
    return mixed.astype(jnp.uint8)


def smooth(images: UInt8[Array, "B C H W"]) -> Int[Array, "B C H W"]:
    """The 3×3 mean in which the centre counts five times; the border stays as it is."""
    H, W = images.shape[2:]
    levels = images.astype(jnp.float32)
    padded = jnp.pad(levels, ((0, 0), (0, 0), (1, 1), (1, 1)))
    box = padded[..., :-2, :] + padded[..., 1:-1, :] + padded[..., 2:, :]
    box = box[..., :-2] + box[..., 1:-1] + box[..., 2:]
    # No sum lies halfway between two multiples of 13, so single precision rounds it rightly.
    mean = jnp.floor((box + 4 * levels) * (1 / 13) + 0.5)
    y = jnp.arange(H)[None, None, :, None]
    x = jnp.arange(W)[None, None, None, :]
    inner = (y > 0) & (y < H - 1) & (x > 0) & (x < W - 1)
    return jnp.where(inner, mean, levels).astype(jnp.int32)


def brightness_tables(factor: Float[Array, " B"]) -> Int[Array, "B 1 256"]:
    """Blends with black."""
    level = jnp.asarray(LEVELS)[None, None, :]
    return blend(jnp.zeros_like(level), level, factor[:, None, None])


def contrast_tables(
    images: UInt8[Array, "B C H W"], factor: Float[Array, " B"]
) -> Int[Array, "B 1 256"]:
    """Blends with the mean luminance of the whole image, rounded to a level."""
    count = images.shape[2] * images.shape[3]
    total = jnp.sum(luminance(images), axis=(2, 3))
    mean = ((2 * total + count) // (2 * count))[..., None]
    return blend(mean, jnp.asarray(LEVELS)[None, None, :], factor[:, None, None])
