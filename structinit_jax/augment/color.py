"""Color operations on a single uint8 image, with the arithmetic of Pillow and torchvision.

Images have one or three channels; a single channel has neither saturation nor hue. Operations that
map each pixel value separately are lookup tables (`lut`) of 256 entries.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, Key, UInt8

VALUES = np.arange(256, dtype=np.int32)
"""All pixel values, the identity as a lookup table."""


def color_jitter(
    rng: Key[Array, ""], image: UInt8[Array, "H W C"], strengths: tuple[float, ...]
) -> UInt8[Array, "H W C"]:
    """Changes brightness, contrast, saturation and optionally hue in random order, as torchvision.

    The factors of the first three are uniform in `[max(0, 1 - strength), 1 + strength]`, the shift
    of the hue is uniform in `[-strength, strength]`, as a fraction of the color circle.
    """
    if not any(strengths[3:]):
        strengths = strengths[:3]  # a conversion to HSV and back would change the colors
    count = len(strengths)
    strength = jnp.asarray(strengths, jnp.float32)
    low = jnp.maximum(1 - strength, 0).at[3:].set(-strength[3:])
    high = (1 + strength).at[3:].set(strength[3:])
    order_rng, factor_rng = jax.random.split(rng)
    factors = low + (high - low) * jax.random.uniform(factor_rng, (count,))

    image = image.transpose(2, 0, 1)
    for operation in jax.random.permutation(order_rng, count):
        factor = jnp.where(jnp.arange(count) == operation, factors, 1.0)  # 1 has no effect
        lut = jnp.where(operation == 0, brightness_lut(factor[0]), contrast_lut(image, factor[1]))
        lut = jnp.broadcast_to(lut, (len(image), 256)).astype(jnp.uint8)
        jittered = adjust_saturation(apply_lut(image, lut), factor[2])
        if count > 3:
            jittered = jnp.where(operation == 3, adjust_hue(image, factors[3]), jittered)
        image = jittered
    return image.transpose(1, 2, 0)


def apply_lut(image: UInt8[Array, "C H W"], lut: UInt8[Array, "C 256"]) -> UInt8[Array, "C H W"]:
    """Looks up every pixel in the lookup table of its channel."""
    return lut.reshape(-1).at[_lut_index(image)].get(mode="promise_in_bounds")


def brightness_lut(factor: Float[Array, ""]) -> Int[Array, "256"]:
    """Returns the lookup table that blends with black."""
    return blend(jnp.zeros_like(VALUES), VALUES, factor)


def contrast_lut(image: UInt8[Array, "C H W"], factor: Float[Array, ""]) -> Int[Array, "256"]:
    """Returns the lookup table that blends with the mean luminance, rounded to an integer."""
    count = image.shape[1] * image.shape[2]
    total = jnp.sum(luminance(image))
    mean = (2 * total + count) // (2 * count)
    return blend(jnp.broadcast_to(mean, 256), VALUES, factor)


def autocontrast_lut(image: UInt8[Array, "C H W"]) -> Int[Array, "C 256"]:
    """Returns the lookup table that stretches the range of each channel to 0…255.

    Entries are exact quotients, rounded down. Pillow computes in double precision and truncates, so
    that a quotient that is an integer may come out one lower. This is reproduced.
    """
    low = image.min(axis=(1, 2)).astype(jnp.int32)[:, None]
    high = image.max(axis=(1, 2)).astype(jnp.int32)[:, None]
    span = jnp.maximum(high - low, 1)
    product = (VALUES[None, :] - low) * 255
    value = product // span
    products = jnp.asarray(_DOUBLE_PRODUCTS)[span[:, 0]]
    error = products - jnp.take_along_axis(products, low, axis=-1)
    half_gap = jnp.asarray(_HALF_GAPS)[jnp.clip(value, 0, 255)]
    one_lower = (product % span == 0) & (error.astype(jnp.float32) < -half_gap)
    value = value - one_lower.astype(jnp.int32)
    return jnp.where(high > low, jnp.clip(value, 0, 255), VALUES[None, :])


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

    As in Pillow's ImageEnhance, a factor of 0 gives the plain image, 1 leaves the image unchanged,
    and larger factors extrapolate.
    """
    difference = (values - plain).astype(jnp.float32)
    # Pillow rounds the product before the sum. A fused multiply-add could end one lower, and
    # compilers do not fuse through a select.
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
    """Blends with the luminance; Pillow's and timm's `Color`."""
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
    y, x = jnp.arange(H)[None, :, None], jnp.arange(W)[None, None, :]
    interior = (y > 0) & (y < H - 1) & (x > 0) & (x < W - 1)
    return jnp.where(interior, mean, pixels).astype(jnp.int32)


def adjust_hue(image: UInt8[Array, "C H W"], shift: Float[Array, ""]) -> UInt8[Array, "C H W"]:
    """Shifts the hue of every pixel by a fraction of the color circle, like torchvision.

    Pillow's HSV images divide the color circle into 255 steps and store hues modulo 256, so colors
    change slightly even if the shift is 0. Pillow converts in single precision, in which some hues
    come out one step lower than in the exact integer arithmetic used here (0.3 % of random colors).
    """
    if len(image) == 1:
        return image
    hue, saturation, value = _rgb_to_hsv(*image.astype(jnp.int32))
    steps = (255 * shift).astype(jnp.int32)  # truncated toward zero
    return jnp.stack(_hsv_to_rgb((hue + steps) % 256, saturation, value)).astype(jnp.uint8)


def _rgb_to_hsv(red, green, blue):
    value = jnp.maximum(red, jnp.maximum(green, blue))
    spread = value - jnp.minimum(red, jnp.minimum(green, blue))
    # Sixths of the circle from red, times the spread.
    green_or_blue = jnp.where(green == value, 2 * spread + blue - red, 4 * spread + red - green)
    sixths = jnp.where(red == value, green - blue, green_or_blue)
    divisor = jnp.maximum(spread, 1)  # gray has neither hue nor saturation
    hue = 85 * (sixths % (6 * divisor)) // (2 * divisor)
    return hue, 255 * spread // jnp.maximum(value, 1), value


def _hsv_to_rgb(hue, saturation, value):
    sixth, rest = jnp.divmod(6 * hue, 255)

    def darken(amount):
        """Returns `value * (1 - amount / 255²)`, rounded."""
        return (2 * value * (65_025 - amount) + 65_025) // 130_050

    low = darken(255 * saturation)
    falling, rising = darken(saturation * rest), darken(saturation * (255 - rest))
    sixth = sixth % 6
    return (
        jnp.choose(sixth, [value, falling, low, low, rising, value], mode="clip"),
        jnp.choose(sixth, [rising, value, value, falling, low, low], mode="clip"),
        jnp.choose(sixth, [low, low, rising, value, value, falling], mode="clip"),
    )


def _lut_index(image):
    """Index of each pixel's value in a flattened `[C, 256]` table."""
    return 256 * jnp.arange(len(image))[:, None, None] + image.astype(jnp.int32)


def _double_products() -> Int[np.ndarray, "256 256"]:
    """The doubles v * (255 / d) for each range d and pixel value v, in units of 2**-52, mod 2**16.

    If the exact difference of two products is an integer, then the 16-bit difference of their
    entries is the rounding error.
    """
    ranges = np.maximum(VALUES, 1)[:, None]
    products = np.floor(VALUES * (255.0 / ranges) * 2.0**52)
    return (products % 2**16).astype(np.uint16).view(np.int16)


def _half_gaps() -> Float[np.ndarray, "256"]:
    """Half of the distance from each pixel value to the next lower double, in units of 2**-52."""
    gaps = (VALUES - np.nextafter(VALUES.astype(np.float64), -1)) * 2**51
    return gaps.astype(np.float32)


_DOUBLE_PRODUCTS = _double_products()
_HALF_GAPS = _half_gaps()
