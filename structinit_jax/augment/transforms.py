"""Transforms of a uint8 image: crops, flips and, for one or three channels, warps and colors.

They follow the arithmetic of Pillow and torchvision; docstrings say where the rounding may differ.
Operations that map each pixel value separately are lookup tables (`lut`) of 256 entries.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, Key, UInt8

VALUES = np.arange(256, dtype=np.int32)  # all pixel values: also the identity lookup table
CHUNKS = 16  # into which `apply_where` divides a batch


# -- crops, flips and warps ------------------------------------------------------------------------


def random_flip(
    rng: Key[Array, ""], image: UInt8[Array, "H W C"], probability: float, axis: int = 1
) -> UInt8[Array, "H W C"]:
    """Mirrors the image along an axis, by default horizontally, with the given probability."""
    return jnp.where(jax.random.bernoulli(rng, probability), jnp.flip(image, axis), image)


def random_pad_crop(rng: Key[Array, ""], image: UInt8[Array, "H W C"]) -> UInt8[Array, "H W C"]:
    """Pads each side with 4 black pixels and crops back to the original size."""
    padded = jnp.pad(image, ((4, 4), (4, 4), (0, 0)))
    top, left = jax.random.randint(rng, (2,), 0, 2 * 4 + 1)
    return jax.lax.dynamic_slice(padded, (top, left, 0), image.shape)


def affine_warp(
    image: UInt8[Array, "C H W"], matrix: Float[Array, "6"], bicubic: bool, fill: tuple[int, ...]
) -> UInt8[Array, "C H W"]:
    """Reads output pixel `(x, y)` from the input at `(a x + b y + c, d x + e y + f)`.

    Follows Pillow: pixel centers are at half integers, neighbors outside the image repeat its
    edge, the bicubic kernel has a = -1, and values are truncated to integers. Pillow computes in
    double precision, so results close to an integer may differ by 1. Where `(x, y)` maps to a point
    outside the image, the output is `fill`, one value per channel. Supports up to 4 channels.
    """
    C, H, W = image.shape
    a, b, c, d, e, f = matrix
    x = (jnp.arange(W, dtype=jnp.float32) + 0.5)[None, :]
    y = (jnp.arange(H, dtype=jnp.float32) + 0.5)[:, None]
    source_x = a * x + b * y + c
    source_y = d * x + e * y + f
    inside = (source_x >= 0) & (source_x < W) & (source_y >= 0) & (source_y < H)
    left = jnp.floor(source_x - 0.5)
    top = jnp.floor(source_y - 0.5)
    dx = source_x - 0.5 - left
    dy = source_y - 0.5 - top
    left = left.astype(jnp.int32)
    top = top.astype(jnp.int32)
    offsets, interpolate = ((-1, 0, 1, 2), _cubic) if bicubic else ((0, 1), _linear)
    # The channels of a pixel are packed into one integer, so that each neighbor is read once.
    shift = 8 * jnp.arange(C)[:, None, None]
    packed = jnp.sum(image.astype(jnp.int32) << shift, axis=0)

    def read(row, column):
        y = jnp.clip(top + row, 0, H - 1)
        x = jnp.clip(left + column, 0, W - 1)
        pixel = packed.reshape(H * W).at[y * W + x].get(mode="promise_in_bounds")
        return ((pixel[None] >> shift) & 255).astype(jnp.float32)

    rows = [interpolate(*(read(row, column) for column in offsets), dx[None]) for row in offsets]
    value = jnp.clip(interpolate(*rows, dy[None]), 0, 255).astype(jnp.uint8)
    return jnp.where(inside[None], value, jnp.asarray(fill, jnp.uint8)[:, None, None])


def rotation_matrix(degrees: Float[Array, ""], height: int, width: int) -> Float[Array, "6"]:
    """Returns the inverse map of a counterclockwise rotation about the center of an image."""
    radians = -degrees * (jnp.pi / 180)
    cos = jnp.cos(radians)
    sin = jnp.sin(radians)
    x = width / 2
    y = height / 2
    return jnp.stack([cos, sin, x - (cos * x + sin * y), -sin, cos, y - (cos * y - sin * x)])


# Both interpolations are written as a value plus differences: equal neighbors give exactly that
# value, whereas weights that sum to slightly less than 1 would darken plain areas by 1.


def _linear(a, b, fraction):
    return a + (b - a) * fraction


def _cubic(a, b, c, d, fraction):
    first = c - a
    second = 2 * (a - b) + c - d
    third = b - a - c + d
    return b + fraction * (first + fraction * (second + fraction * third))


# -- colors ----------------------------------------------------------------------------------------


def apply_lut(image: UInt8[Array, "C H W"], lut: UInt8[Array, "C 256"]) -> UInt8[Array, "C H W"]:
    """Looks up every pixel in the lookup table of its channel."""
    return lut.reshape(-1).at[_lut_index(image)].get(mode="promise_in_bounds")


def contrast_lut(image: UInt8[Array, "C H W"], factor: Float[Array, ""]) -> Int[Array, "256"]:
    """Returns the lookup table that blends with the mean luminance, rounded to an integer."""
    count = image.shape[1] * image.shape[2]
    mean = (2 * jnp.sum(luminance(image)) + count) // (2 * count)
    return blend(jnp.broadcast_to(mean, 256), VALUES, factor)


def autocontrast_lut(image: UInt8[Array, "C H W"]) -> Int[Array, "C 256"]:
    """Returns the lookup table that stretches the range of each channel to 0…255.

    Entries are exact quotients, rounded down. Pillow truncates the result of floating-point
    operations, so where the quotient is an integer, an entry may be 1 above Pillow's.
    """
    low = image.min(axis=(1, 2)).astype(jnp.int32)[:, None]
    high = image.max(axis=(1, 2)).astype(jnp.int32)[:, None]
    stretched = (VALUES[None, :] - low) * 255 // jnp.maximum(high - low, 1)
    return jnp.where(high > low, jnp.clip(stretched, 0, 255), VALUES[None, :])


def equalize(image: UInt8[Array, "C H W"]) -> UInt8[Array, "C H W"]:
    """Equalizes the histogram of each channel."""
    C = len(image)
    counts = jnp.zeros(C * 256, jnp.int32).at[_lut_index(image)].add(1, mode="promise_in_bounds")
    counts = counts.reshape(C, 256)
    values = VALUES[None, :]
    highest = jnp.max(jnp.where(counts > 0, values, 0), axis=-1, keepdims=True)
    total = jnp.sum(counts, axis=-1, keepdims=True)
    step = (total - jnp.take_along_axis(counts, highest, axis=-1)) // 255
    below = jnp.cumsum(counts, axis=-1) - counts
    lut = jnp.minimum((step // 2 + below) // jnp.maximum(step, 1), 255)
    return apply_lut(image, jnp.where(step > 0, lut, values).astype(jnp.uint8))


def blend(plain: ArrayLike, values: ArrayLike, factor: Float[Array, ""]) -> Int[Array, "..."]:
    """Returns `plain + factor * (values - plain)` of integer arrays, truncated and clipped.

    As in Pillow's ImageEnhance, a factor of 0 gives the plain image, and 1 the original one.
    """
    difference = (values - plain).astype(jnp.float32)
    # Pillow rounds the product before the sum. The select keeps compilers from fusing the two.
    product = jnp.where(difference == 0, 0.0, factor * difference)
    return jnp.clip(plain.astype(jnp.float32) + product, 0, 255).astype(jnp.int32)


def luminance(image: UInt8[Array, "C H W"]) -> Int[Array, "1 H W"]:
    """Returns the ITU-R 601 luma with Pillow's 16-bit weights; a single channel is unchanged."""
    pixels = image.astype(jnp.int32)
    if len(image) == 1:
        return pixels
    red, green, blue = (pixels[i : i + 1] for i in range(3))
    return (19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16


def adjust_saturation(
    image: UInt8[Array, "C H W"], factor: Float[Array, ""]
) -> UInt8[Array, "C H W"]:
    """Blends with the luminance, like `Color` in Pillow and timm; a single channel is unchanged."""
    if len(image) == 1:
        return image
    return blend(luminance(image), image.astype(jnp.int32), factor).astype(jnp.uint8)


def adjust_sharpness(
    image: UInt8[Array, "C H W"], factor: Float[Array, ""]
) -> UInt8[Array, "C H W"]:
    """Blends with the smoothed image: factors below 1 blur, factors above 1 sharpen."""
    return blend(smooth(image), image.astype(jnp.int32), factor).astype(jnp.uint8)


def smooth(image: UInt8[Array, "C H W"]) -> Int[Array, "C H W"]:
    """Returns the 3×3 mean with a center weight of 5; pixels at the border are unchanged."""
    _, H, W = image.shape
    pixels = image.astype(jnp.float32)
    padded = jnp.pad(pixels, ((0, 0), (1, 1), (1, 1)))
    box = padded[:, :-2, :] + padded[:, 1:-1, :] + padded[:, 2:, :]
    box = box[..., :-2] + box[..., 1:-1] + box[..., 2:]
    # No sum is halfway between two multiples of 13, so single precision rounds correctly.
    mean = jnp.floor((box + 4 * pixels) * (1 / 13) + 0.5)
    y = jnp.arange(H)[None, :, None]
    x = jnp.arange(W)[None, None, :]
    interior = (y > 0) & (y < H - 1) & (x > 0) & (x < W - 1)
    return jnp.where(interior, mean, pixels).astype(jnp.int32)


def _lut_index(image):
    """Returns the index of each pixel's value in a flattened `[C, 256]` table."""
    return 256 * jnp.arange(len(image))[:, None, None] + image.astype(jnp.int32)


# -- on a part of a batch --------------------------------------------------------------------------


def apply_where(
    function: Callable[..., Array], mask: Bool[Array, " B"], images: Array, *arguments: Array
) -> Array:
    """Applies a function to the images selected by a mask; leaves the others unchanged.

    The selected images are gathered into chunks of a sixteenth of the batch, and a loop runs over
    as many chunks as they fill. If the batch is sharded over devices, call this within
    `jax.shard_map`, because the number of selected images differs between devices. `function` maps
    `(image, *arguments)` of a single example to an image of the same shape.
    """
    B = len(images)
    size = -(-B // CHUNKS)
    # Indices are padded to full chunks with B. It is out of bounds: reads clip it, writes drop it.
    selected = jnp.nonzero(mask, size=CHUNKS * size, fill_value=B)[0]

    def update_chunk(chunk, images):
        index = jax.lax.dynamic_slice_in_dim(selected, chunk * size, size)
        inputs = (x.at[index].get(mode="clip") for x in (images, *arguments))
        return images.at[index].set(jax.vmap(function)(*inputs), mode="drop")

    count = jnp.sum(mask, dtype=jnp.int32)
    return jax.lax.fori_loop(0, (count + size - 1) // size, update_chunk, images)
