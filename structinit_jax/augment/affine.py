"""The affine warp of a batch of images, as Pillow's `Image.transform` computes it."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8


def affine_warp(
    images: UInt8[Array, "B C H W"],
    matrices: Float[Array, "B 6"],
    bicubic: bool,
    fill: tuple[int, ...],
) -> UInt8[Array, "B C H W"]:
    """Moves each image's pixels by an affine map of its own.

    Pixel centres lie at half integers, an output pixel whose source lies off the image gets the
    fill colour, taps beyond the edge repeat the edge, bicubic means a = -1, and fractions are cut
    off: Pillow's conventions all. It computes in double precision, hence differences of one level
    where a value lies on a whole number.

    Args:
      images: of four channels at most.
      matrices: the inverse maps (a, b, c, d, e, f): output pixel (x, y) shows the source at
        (a x + b y + c, d x + e y + f). The identity leaves an image exactly as it is.
      bicubic: whether to interpolate between 16 pixels, or else bilinearly between 4.
      fill: one level for each channel.

    Returns:
      The warped images.
    """
    B, C, H, W = images.shape
    a, b, c, d, e, f = (matrices[:, i, None, None] for i in range(6))
    x = (jnp.arange(W, dtype=jnp.float32) + 0.5)[None, None, :]
    y = (jnp.arange(H, dtype=jnp.float32) + 0.5)[None, :, None]
    source_x, source_y = a * x + b * y + c, d * x + e * y + f
    inside = (source_x >= 0) & (source_x < W) & (source_y >= 0) & (source_y < H)
    left, top = jnp.floor(source_x - 0.5), jnp.floor(source_y - 0.5)
    dx, dy = source_x - 0.5 - left, source_y - 0.5 - top
    left, top = left.astype(jnp.int32), top.astype(jnp.int32)
    reach, interpolate = ((-1, 0, 1, 2), _cubic) if bicubic else ((0, 1), _linear)
    # All channels of a pixel in one word: one memory access for each tap.
    words = sum(images[:, i].astype(jnp.int32) << 8 * i for i in range(C)).reshape(B, H * W)

    def tap(row: int, column: int) -> Int[Array, "B H W"]:
        index = jnp.clip(top + row, 0, H - 1) * W + jnp.clip(left + column, 0, W - 1)
        flat = index.reshape(B, H * W)
        taken = jnp.take_along_axis(words, flat, axis=1, mode="promise_in_bounds")
        return taken.reshape(B, H, W)

    taps = [[tap(row, column) for column in reach] for row in reach]

    def channel(i: int) -> UInt8[Array, "B H W"]:
        levels = [[((word >> 8 * i) & 255).astype(jnp.float32) for word in row] for row in taps]
        value = interpolate(*(interpolate(*row, dx) for row in levels), dy)
        return jnp.where(inside, jnp.clip(value, 0, 255).astype(jnp.uint8), jnp.uint8(fill[i]))

    return jnp.stack([channel(i) for i in range(C)], axis=1)


def rotation_matrices(degrees: Float[Array, " B"], height: int, width: int) -> Float[Array, "B 6"]:
    """The inverse maps of counterclockwise turns about the centre."""
    radians = -degrees * (jnp.pi / 180)
    cos, sin = jnp.cos(radians), jnp.sin(radians)
    x, y = width / 2, height / 2
    return jnp.stack(
        [cos, sin, x - (cos * x + sin * y), -sin, cos, y - (cos * y - sin * x)], axis=1
    )


def _linear(a: Array, b: Array, fraction: Array) -> Array:
    # In this form, and `_cubic` in its own, equal taps give exactly themselves: weights whose sum
    # rounds below 1 would turn plain areas one level darker.
    return a + (b - a) * fraction


def _cubic(a: Array, b: Array, c: Array, d: Array, fraction: Array) -> Array:
    first, second, third = c - a, 2 * (a - b) + c - d, b - a - c + d
    return b + fraction * (first + fraction * (second + fraction * third))
