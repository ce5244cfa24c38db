"""Turning the hue, in the whole levels of Pillow's HSV images."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

Channel = Int[Array, "B H W"]


def turn_hue(images: UInt8[Array, "B C H W"], turn: Float[Array, " B"]) -> UInt8[Array, "B C H W"]:
    """Moves each pixel's hue around the colour circle, as torchvision's adjust_hue.

    Args:
      images: of one or three channels. One channel has no hue.
      turn: part of the circle, from -0.5 to 0.5. Pillow's circle has 255 levels to a turn, and
        hues are kept in 256, so that a turn of 0 moves colours too, by as much as they lose.

    In whole numbers, where Pillow's single precision takes a hue that is just a whole level for one
    lower: 0.3 % of random colours come out of one hue level further.
    """
    if images.shape[1] == 1:
        return images
    hue, saturation, value = _to_hsv(*jnp.unstack(images.astype(jnp.int32), axis=1))
    levels = (255 * turn).astype(jnp.int32)  # cut off towards zero
    hue = (hue + levels[:, None, None]) % 256
    return jnp.stack(_to_rgb(hue, saturation, value), axis=1).astype(jnp.uint8)


def _to_hsv(red: Channel, green: Channel, blue: Channel) -> tuple[Channel, Channel, Channel]:
    value = jnp.maximum(red, jnp.maximum(green, blue))
    spread = value - jnp.minimum(red, jnp.minimum(green, blue))
    # Sixths of the circle from red, times the spread.
    sixths = jnp.where(
        red == value,
        green - blue,
        jnp.where(green == value, 2 * spread + blue - red, 4 * spread + red - green),
    )
    divisor = jnp.maximum(spread, 1)  # grey has neither hue nor saturation
    hue = 85 * (sixths % (6 * divisor)) // (2 * divisor)
    return hue, 255 * spread // jnp.maximum(value, 1), value


def _to_rgb(hue: Channel, saturation: Channel, value: Channel) -> tuple[Channel, ...]:
    sixth, rest = jnp.divmod(6 * hue, 255)

    def darkened(share: Channel) -> Channel:
        """Value · (1 - share / 255²), rounded."""
        return (2 * value * (65_025 - share) + 65_025) // 130_050

    low = darkened(255 * saturation)
    falling, rising = darkened(saturation * rest), darkened(saturation * (255 - rest))
    sixth = sixth % 6
    return (
        jnp.choose(sixth, [value, falling, low, low, rising, value], mode="clip"),
        jnp.choose(sixth, [rising, value, value, falling, low, low], mode="clip"),
        jnp.choose(sixth, [low, low, rising, value, value, falling], mode="clip"),
    )
