"""Colour jitter, as torchvision's ColorJitter."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, UInt8

from structinit_jax.augment import enhance, tables
from structinit_jax.augment.hue import turn_hue


def color_jitter(
    keys: Key[Array, " B"],
    images: UInt8[Array, "B H W C"],
    strengths: tuple[float, ...],
) -> UInt8[Array, "B H W C"]:
    """Changes brightness, contrast, saturation and, where it has a strength, hue in random order.

    Args:
      keys: one for each image.
      images: of one or three channels. One channel has neither saturation nor hue.
      strengths: of brightness, contrast and saturation, whose factors are uniform from
        max(0, 1 - strength) to 1 + strength; of hue as a fourth, if it is to change, which is
        turned by -strength to strength of the colour circle.
    """
    count = len(strengths)
    strength = jnp.asarray(strengths, jnp.float32)
    low = jnp.maximum(1 - strength, 0).at[3:].set(-strength[3:])
    high = (1 + strength).at[3:].set(strength[3:])

    def draw(key: Key[Array, ""]) -> tuple[Int[Array, " p"], Float[Array, " p"]]:
        order, size = jax.random.split(key)
        factors = low + (high - low) * jax.random.uniform(size, (count,))
        return jax.random.permutation(order, count), factors

    order, factors = jax.vmap(draw)(keys)
    images = images.transpose(0, 3, 1, 2)
    for position in range(count):
        images = _jitter_one(images, order[:, position], factors)
    return images.transpose(0, 2, 3, 1)


def _jitter_one(images, which, factors) -> UInt8[Array, "B C H W"]:
    """Changes one property: brightness (0), contrast (1), saturation (2) or hue (3)."""
    factor = [jnp.where(which == i, factors[:, i], 1.0) for i in range(3)]
    table = jnp.where(
        (which == 0)[:, None, None],
        enhance.brightness_tables(factor[0]),
        enhance.contrast_tables(images, factor[1]),
    )
    table = jnp.broadcast_to(table, (len(images), images.shape[1], 256)).astype(jnp.uint8)
    jittered = enhance.color(tables.apply_tables(images, table), factor[2])
    if factors.shape[1] == 3:
        return jittered
    turned = turn_hue(images, factors[:, 3])
    return jnp.where((which == 3)[:, None, None, None], turned, jittered)
