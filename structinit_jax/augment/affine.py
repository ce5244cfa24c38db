"""The affine warp of a batch of images, as Pillow's `Image.transform` computes it."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, UInt8


def affine_warp(
    images: UInt8[Array, "B H W C"],
    matrices: Float[Array, "B 6"],
    bicubic: Bool[Array, " B"] | None,
    fill: tuple[int, ...],
) -> UInt8[Array, "B H W C"]:
    """Moves each image's pixels by an affine map of its own.

    Pixel centres lie at half integers, an output pixel whose source lies off the image gets the
    fill colour, taps beyond the edge repeat the edge, bicubic means a = -1, and fractions are cut
    off: Pillow's conventions all. It computes in double precision, hence differences of one level
    where a value lies on a whole number.

    Args:
      images: of four channels at most.
      matrices: the inverse maps (a, b, c, d, e, f): output pixel (x, y) shows the source at
        (a x + b y + c, d x + e y + f). The identity leaves an image exactly as it is.
      bicubic: which images are interpolated bicubically; None interpolates all bilinearly, with 4
        taps in place of 16.
      fill: one level for each channel.

    Returns:
      The warped images.
    """
    _, H, W, C = images.shape
    a, b, c, d, e, f = (matrices[:, i, None, None] for i in range(6))
    x = (jnp.arange(W, dtype=jnp.float32) + 0.5)[None, None, :]
    y = (jnp.arange(H, dtype=jnp.float32) + 0.5)[None, :, None]
    source_x, source_y = a * x + b * y + c, d * x + e * y + f
    inside = (source_x >= 0) & (source_x < W) & (source_y >= 0) & (source_y < H)
    left, top = jnp.floor(source_x - 0.5), jnp.floor(source_y - 0.5)
    dx, dy = (source_x - 0.5 - left)[..., None], (source_y - 0.5 - top)[..., None]
    left, top = left.astype(jnp.int32), top.astype(jnp.int32)
    packed = _pack(images)

    def tap(row: int, column: int) -> Float32[Array, "B H W C"]:
        index = jnp.clip(top + row, 0, H - 1) * W + jnp.clip(left + column, 0, W - 1)
        return _unpack(_take(packed, index), C)

    def linear_row(row: int) -> Float32[Array, "B H W C"]:
        return _linear(tap(row, 0), tap(row, 1), dx)

    if bicubic is None:
        values = _linear(linear_row(0), linear_row(1), dy)
    else:
        choose = bicubic[:, None, None, None]

        def row_value(row: int) -> Float32[Array, "B H W C"]:
            taps = [tap(row, column) for column in (-1, 0, 1, 2)]
            return jnp.where(choose, _cubic(*taps, dx), _linear(taps[1], taps[2], dx))

        rows = [row_value(row) for row in (-1, 0, 1, 2)]
        values = jnp.where(choose, _cubic(*rows, dy), _linear(rows[1], rows[2], dy))
    values = jnp.clip(values, 0, 255).astype(jnp.uint8)
    background = jnp.asarray(fill, jnp.uint8)[None, None, None, :]
    return jnp.where(inside[..., None], values, background)


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


def _pack(images: UInt8[Array, "B H W C"]) -> Array:
    """Pixels [B, H·W] of all channels in one word: one memory access for each tap."""
    B, H, W, C = images.shape
    if C == 1:
        return images.reshape(B, H * W)
    shifts = (8 * jnp.arange(C, dtype=jnp.uint32))[None, None, None, :]
    return jnp.sum(images.astype(jnp.uint32) << shifts, axis=-1).reshape(B, H * W)


def _take(packed: Array, index: Int[Array, "B H W"]) -> Array:
    flat = index.reshape(index.shape[0], -1)
    taken = jnp.take_along_axis(packed, flat, axis=1, mode="promise_in_bounds")
    return taken.reshape(index.shape)


def _unpack(words: Array, channels: int) -> Float32[Array, "B H W C"]:
    if channels == 1:
        return words[..., None].astype(jnp.float32)
    shifts = (8 * jnp.arange(channels, dtype=jnp.uint32))[None, None, None, :]
    return ((words[..., None] >> shifts) & 255).astype(jnp.float32)
