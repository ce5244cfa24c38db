"""Crops, flips and affine warps of a single image, as in torchvision, timm and Pillow."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, UInt8


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
