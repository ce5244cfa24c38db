"""Affine warps as computed by Pillow's `Image.transform`."""

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8


def affine_warp(
    image: UInt8[Array, "C H W"], matrix: Float[Array, "6"], bicubic: bool, fill: tuple[int, ...]
) -> UInt8[Array, "C H W"]:
    """Warps an image by an affine map.

    Follows Pillow: pixel centers are at half integers, neighbors outside the image repeat its
    edge, the bicubic kernel has a = -1, and values are truncated to integers. Pillow computes in
    double precision, so results close to an integer may differ by 1.

    Args:
      image: An image of at most four channels.
      matrix: The inverse map `(a, b, c, d, e, f)`: output pixel `(x, y)` is read from the input at
        `(a x + b y + c, d x + e y + f)`, in pixels. The identity returns the image unchanged.
      bicubic: Whether to interpolate between 16 pixels (bicubic) or 4 (bilinear).
      fill: Value per channel for output pixels that are read from outside the image.
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
# whereas weights whose sum is rounded below 1 would darken plain areas by 1.


def _linear(a, b, fraction):
    return a + (b - a) * fraction


def _cubic(a, b, c, d, fraction):
    first, second, third = c - a, 2 * (a - b) + c - d, b - a - c + d
    return b + fraction * (first + fraction * (second + fraction * third))
