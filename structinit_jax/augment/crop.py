"""Crops, flips and affine warps of a single image, as in torchvision, timm and Pillow."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, UInt8

ATTEMPTS = 10
# Probability of bicubic rather than bilinear interpolation.
BICUBIC_PROBABILITY = {"bilinear": 0.0, "bicubic": 1.0, "random": 0.5}


class Box(NamedTuple):
    """A rectangle within an image, in pixels."""

    top: Int[Array, ""]
    left: Int[Array, ""]
    height: Int[Array, ""]
    width: Int[Array, ""]


def box_mask(box: Box, height: int, width: int) -> Bool[Array, "H W"]:
    """Returns a mask of the pixels inside the box."""
    y, x = jnp.arange(height)[:, None], jnp.arange(width)[None, :]
    rows = (y >= box.top) & (y < box.top + box.height)
    return rows & (x >= box.left) & (x < box.left + box.width)


def random_flip(
    rng: Key[Array, ""], image: UInt8[Array, "H W C"], probability: float
) -> UInt8[Array, "H W C"]:
    """Mirrors the image horizontally with the given probability."""
    return jnp.where(jax.random.bernoulli(rng, probability), image[:, ::-1], image)


def random_pad_crop(
    rng: Key[Array, ""], image: UInt8[Array, "H W C"], padding: int
) -> UInt8[Array, "H W C"]:
    """Pads each side with `padding` black pixels and crops back to the original size."""
    padded = jnp.pad(image, ((padding, padding), (padding, padding), (0, 0)))
    top, left = jax.random.randint(rng, (2,), 0, 2 * padding + 1)
    return jax.lax.dynamic_slice(padded, (top, left, 0), image.shape)


def random_resized_crop(
    rng: Key[Array, ""],
    image: UInt8[Array, "H W C"],
    size: int,
    *,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    interpolation: str = "random",
) -> UInt8[Array, "size size C"]:
    """Crops a random box and resizes it, like torchvision's `RandomResizedCrop`.

    `scale` is the range of the box's area as a fraction of the image's, and `ratio` is the range of
    its width / height. The interpolation is 'bilinear', 'bicubic' or 'random', one of the two
    with equal probability.
    """
    box_rng, bicubic_rng = jax.random.split(rng)
    box = crop_box(box_rng, *image.shape[:2], scale, ratio)
    bicubic = jax.random.bernoulli(bicubic_rng, BICUBIC_PROBABILITY[interpolation])
    return resize_box(image, box, size, bicubic)


def crop_box(
    rng: Key[Array, ""],
    height: int,
    width: int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> Box:
    """Draws the box of `random_resized_crop` (Szegedy et al. 2015, https://arxiv.org/abs/1409.4842).

    If none of 10 attempts fits into the image, the result is the largest central box with an aspect
    ratio in the range, as in torchvision.
    """
    box_width, box_height, position = draw_attempts(rng, height * width, scale, ratio)
    fits = (box_width <= width) & (box_height <= height) & (box_width > 0) & (box_height > 0)
    box = place_first_fit(fits, box_height, box_width, position, height, width)

    central_height, central_width = height, width
    if width / height < ratio[0]:
        central_height = round(width / ratio[0])
    elif width / height > ratio[1]:
        central_width = round(height * ratio[1])
    top, left = (height - central_height) // 2, (width - central_width) // 2
    central = Box(*map(jnp.int32, (top, left, central_height, central_width)))
    return jax.tree.map(lambda a, b: jnp.where(fits.any(), a, b), box, central)


def draw_attempts(
    rng: Key[Array, ""], num_pixels: int, area: tuple[float, float], ratio: tuple[float, float]
) -> tuple[Int[Array, " n"], Int[Array, " n"], Float[Array, "2 n"]]:
    """Draws 10 candidate boxes of uniform area and log-uniform aspect ratio for `place_first_fit`.

    Returns two sides of each box in pixels (the aspect ratio is first / second) and uniform numbers
    in [0, 1) for its top and left.
    """
    uniform = jax.random.uniform(rng, (4, ATTEMPTS))
    low, high = math.log(ratio[0]), math.log(ratio[1])
    pixels = (area[0] + (area[1] - area[0]) * uniform[0]) * num_pixels
    aspect = jnp.exp(low + (high - low) * uniform[1])
    first = jnp.round(jnp.sqrt(pixels * aspect)).astype(jnp.int32)
    second = jnp.round(jnp.sqrt(pixels / aspect)).astype(jnp.int32)
    return first, second, uniform[2:]


def place_first_fit(
    fits: Bool[Array, " n"],
    box_height: Int[Array, " n"],
    box_width: Int[Array, " n"],
    position: Float[Array, "2 n"],
    height: int,
    width: int,
) -> Box:
    """Places the first box that fits uniformly within the image, or else the first box anywhere."""
    first = jnp.argmax(fits)
    box_height, box_width, (u, v) = box_height[first], box_width[first], position[:, first]

    def start(uniform, room):
        return jnp.floor(uniform * (room + 1).astype(jnp.float32)).astype(jnp.int32)

    return Box(start(u, height - box_height), start(v, width - box_width), box_height, box_width)


def resize_box(
    image: UInt8[Array, "H W C"], box: Box, size: int, bicubic: Bool[Array, ""]
) -> UInt8[Array, "size size C"]:
    """Crops a box and resizes it along x, then along y, each rounded to integers, as in Pillow.

    (From version 13 on, Pillow begins with y if that is much cheaper.)
    """
    H, W, _ = image.shape
    along_x = _resize_weights(box.left, box.width, W, size, bicubic)
    along_y = _resize_weights(box.top, box.height, H, size, bicubic)
    # TensorFloat-32 and bfloat16 products have too few bits to round correctly.
    precision = jax.lax.Precision.HIGHEST
    pixels = image.astype(jnp.float32)
    rows = _round(jnp.einsum("hwc,xw->hxc", pixels, along_x, precision=precision))
    return _round(jnp.einsum("hxc,yh->yxc", rows, along_y, precision=precision)).astype(jnp.uint8)


def _resize_weights(start, length, side, size, bicubic) -> Float[Array, "size side"]:
    """Weights of each input pixel in each output pixel; rows add up to 1."""
    scale = length.astype(jnp.float32) / size
    center = (jnp.arange(size, dtype=jnp.float32)[:, None] + 0.5) * scale
    place = jnp.arange(side)[None, :] - start
    distance = (place.astype(jnp.float32) + 0.5 - center) / jnp.maximum(scale, 1)
    t = jnp.abs(distance)
    linear = jnp.maximum(1 - t, 0)
    near = (1.5 * t - 2.5) * t * t + 1
    far = ((-0.5 * t + 2.5) * t - 4) * t + 2
    cubic = jnp.where(t < 1, near, jnp.where(t < 2, far, 0))
    weights = jnp.where(bicubic, cubic, linear)
    weights = jnp.where((place >= 0) & (place < length), weights, 0)
    return weights / jnp.sum(weights, axis=-1, keepdims=True)


def _round(values):
    return jnp.clip(jnp.floor(values + 0.5), 0, 255)


def affine_warp(
    image: UInt8[Array, "C H W"], matrix: Float[Array, "6"], bicubic: bool, fill: tuple[int, ...]
) -> UInt8[Array, "C H W"]:
    """Reads output pixel `(x, y)` from the input at `(a x + b y + c, d x + e y + f)`.

    Follows Pillow: pixel centers are at half integers, neighbors outside the image repeat its
    edge, the bicubic kernel has a = -1, and values are truncated to integers. Pillow computes in
    double precision, so results close to an integer may differ by 1. Pixels that are read from
    outside the image, of at most four channels, become `fill`.
    """
    C, H, W = image.shape
    a, b, c, d, e, f = matrix
    x = (jnp.arange(W, dtype=jnp.float32) + 0.5)[None, :]
    y = (jnp.arange(H, dtype=jnp.float32) + 0.5)[:, None]
    source_x, source_y = a * x + b * y + c, d * x + e * y + f
    inside = (source_x >= 0) & (source_x < W) & (source_y >= 0) & (source_y < H)
    left, top = jnp.floor(source_x - 0.5), jnp.floor(source_y - 0.5)
    dx, dy = source_x - 0.5 - left, source_y - 0.5 - top
    left, top = left.astype(jnp.int32), top.astype(jnp.int32)
    offsets, interpolate = ((-1, 0, 1, 2), _cubic) if bicubic else ((0, 1), _linear)
    # The channels of a pixel are packed into one integer, so that each neighbor is read once.
    shift = 8 * jnp.arange(C)[:, None, None]
    packed = jnp.sum(image.astype(jnp.int32) << shift, axis=0)

    def read(row, column):
        y, x = jnp.clip(top + row, 0, H - 1), jnp.clip(left + column, 0, W - 1)
        pixel = packed.reshape(H * W).at[y * W + x].get(mode="promise_in_bounds")
        return ((pixel[None] >> shift) & 255).astype(jnp.float32)

    rows = [interpolate(*(read(row, column) for column in offsets), dx[None]) for row in offsets]
    value = jnp.clip(interpolate(*rows, dy[None]), 0, 255).astype(jnp.uint8)
    return jnp.where(inside[None], value, jnp.asarray(fill, jnp.uint8)[:, None, None])


def rotation_matrix(degrees: Float[Array, ""], height: int, width: int) -> Float[Array, "6"]:
    """Returns the inverse map of a counterclockwise rotation about the center of an image."""
    radians = -degrees * (jnp.pi / 180)
    cos, sin = jnp.cos(radians), jnp.sin(radians)
    x, y = width / 2, height / 2
    return jnp.stack([cos, sin, x - (cos * x + sin * y), -sin, cos, y - (cos * y - sin * x)])


# Both interpolations are written as a value plus differences: equal neighbors give that very value,
# whereas weights that sum to slightly less than 1 would darken plain areas by 1.


def _linear(a, b, fraction):
    return a + (b - a) * fraction


def _cubic(a, b, c, d, fraction):
    first, second, third = c - a, 2 * (a - b) + c - d, b - a - c + d
    return b + fraction * (first + fraction * (second + fraction * third))
