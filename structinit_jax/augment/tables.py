"""Operations that map each level of a channel to another, as in Pillow's ImageOps."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt8

LEVELS = np.arange(256, dtype=np.int32)


def apply_tables(
    images: UInt8[Array, "B C H W"], tables: UInt8[Array, "B C 256"]
) -> UInt8[Array, "B C H W"]:
    """Looks every pixel up in the table of its image and channel."""
    B, C, _ = tables.shape
    look_up = jax.vmap(lambda table, entries: table.at[entries].get(mode="promise_in_bounds"))
    return look_up(tables.reshape(B, C * 256), _entries(images))


def channel_histograms(images: UInt8[Array, "B C H W"]) -> Int[Array, "B C 256"]:
    """How often each level occurs."""
    B, C, _, _ = images.shape

    def count(entries: Int[Array, "C H W"]) -> Int[Array, " bins"]:
        return jnp.zeros(C * 256, jnp.int32).at[entries].add(1, mode="promise_in_bounds")

    return jax.vmap(count)(_entries(images)).reshape(B, C, 256)


def autocontrast(images: UInt8[Array, "B C H W"]) -> Int[Array, "B C 256"]:
    """Stretches each channel's darkest to brightest level over 0…255.

    The exact quotient is rounded down. Pillow computes in double precision and cuts off, so that a
    quotient that should be whole may end one lower: this is reproduced too, by `_DOUBLE_REST`.
    """
    low = images.min(axis=(2, 3)).astype(jnp.int32)[..., None]
    high = images.max(axis=(2, 3)).astype(jnp.int32)[..., None]
    span = jnp.maximum(high - low, 1)
    level = jnp.asarray(LEVELS)[None, None, :]
    product = (level - low) * 255
    value = product // span
    rests = jnp.asarray(_DOUBLE_REST)[span[..., 0]]
    rest = rests - jnp.take_along_axis(rests, low, axis=-1)
    # Half the distance to the next double below the value, in units of 2**-52.
    half_gap = jnp.asarray(_HALF_GAP)[jnp.clip(value, 0, 255)]
    short = (product % span == 0) & (rest.astype(jnp.float32) < -half_gap)
    value = value - short.astype(jnp.int32)
    return jnp.where(high > low, jnp.clip(value, 0, 255), level)


def equalize(images: UInt8[Array, "B C H W"]) -> UInt8[Array, "B C H W"]:
    """Spreads each channel's levels so that every range of levels is about equally frequent."""
    level = jnp.asarray(LEVELS)[None, None, :]
    histograms = channel_histograms(images)
    highest = jnp.max(jnp.where(histograms > 0, level, 0), axis=-1, keepdims=True)
    total = jnp.sum(histograms, axis=-1, keepdims=True)
    last = jnp.take_along_axis(histograms, highest, axis=-1)
    step = (total - last) // 255
    below = jnp.cumsum(histograms, axis=-1) - histograms
    value = jnp.minimum((step // 2 + below) // jnp.maximum(step, 1), 255)
    return apply_tables(images, jnp.where(step > 0, value, level).astype(jnp.uint8))


def invert() -> Int[Array, "1 1 256"]:
    """Bright to dark."""
    return 255 - jnp.asarray(LEVELS)[None, None, :]


def posterize(bits: Int[Array, " B"]) -> Int[Array, "B 1 256"]:
    """Keeps the highest `bits` bits of each level; none for 0 and below."""
    dropped = 8 - jnp.clip(bits, 0, 8)[:, None, None]
    return (jnp.asarray(LEVELS)[None, None, :] >> dropped) << dropped


def solarize(threshold: Int[Array, " B"]) -> Int[Array, "B 1 256"]:
    """Inverts the levels from `threshold` on."""
    level = jnp.asarray(LEVELS)[None, None, :]
    return jnp.where(level < threshold[:, None, None], level, 255 - level)


def solarize_add(amount: Int[Array, " B"]) -> Int[Array, "B 1 256"]:
    """Adds `amount` to the levels of the darker half."""
    level = jnp.asarray(LEVELS)[None, None, :]
    return jnp.where(level < 128, jnp.minimum(level + amount[:, None, None], 255), level)


def _entries(images: UInt8[Array, "B C H W"]) -> Int[Array, "B C H W"]:
    """Where in an image's flat [C · 256] table each pixel's level is."""
    start = 256 * jnp.arange(images.shape[1])[None, :, None, None]
    return start + images.astype(jnp.int32)


def _double_rests() -> Int[np.ndarray, "256 256"]:
    """For span d and level v: the double v · (255 / d) in units of 2**-52, modulo 2**16.

    The difference of two entries of a row whose exact difference is a whole number is, as a signed
    16-bit number, the rounding error of the two doubles.
    """
    rests = np.zeros((256, 256), np.int16)
    for span in range(1, 256):
        products = [int(level * (255.0 / span) * 2**52) for level in range(256)]
        rests[span] = np.array([p & 0xFFFF for p in products], np.uint16).view(np.int16)
    return rests


def _half_gaps() -> np.ndarray:
    below = np.nextafter(LEVELS.astype(np.float64), -1)
    gaps = (LEVELS - below) * 2**51
    gaps[0] = 0
    return gaps.astype(np.float32)


_DOUBLE_REST = _double_rests()
_HALF_GAP = _half_gaps()
