"""Colour jitter, as torchvision's ColorJitter without a change of hue."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, UInt8

from structinit_jax.augment import enhance, tables


def color_jitter(
    keys: Key[Array, " B"],
    images: UInt8[Array, "B H W C"],
    strengths: tuple[float, float, float],
) -> UInt8[Array, "B H W C"]:
    """Changes brightness, contrast and saturation in random order.

    Args:
      keys: one for each image.
      images: of one or three channels. One channel has no saturation.
      strengths: each property's factor is uniform from max(0, 1 - strength) to 1 + strength.
    """
    low = jnp.maximum(1 - jnp.asarray(strengths, jnp.float32), 0)
    high = 1 + jnp.asarray(strengths, jnp.float32)

    def draw(key: Key[Array, ""]) -> tuple[Array, Float[Array, " 3"]]:
        order, size = jax.random.split(key)
        factors = low + (high - low) * jax.random.uniform(size, (3,))
        return jax.random.permutation(order, 3), factors

    order, factors = jax.vmap(draw)(keys)
    images = images.transpose(0, 3, 1, 2)
    for position in range(3):
        images = _jitter_one(images, order[:, position], factors)
    return images.transpose(0, 2, 3, 1)


def _jitter_one(images, which, factors) -> UInt8[Array, "B C H W"]:
    """Applies one property's factor: brightness (0), contrast (1) or saturation (2)."""
    factor = [jnp.where(which == i, factors[:, i], 1.0) for i in range(3)]
    table = jnp.where(
        (which == 0)[:, None, None],
        enhance.brightness_tables(factor[0]),
        enhance.contrast_tables(images, factor[1]),
    )
    table = jnp.broadcast_to(table, (len(images), images.shape[1], 256)).astype(jnp.uint8)
    return enhance.color(tables.apply_tables(images, table), factor[2])
