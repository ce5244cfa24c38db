"""Random erasing of normalised images, as in timm."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from structinit_jax.augment.boxes import erasing_boxes, inside
from structinit_jax.augment.chosen import apply_where

MODES = ("const", "rand", "pixel")


def random_erasing(
    keys: Key[Array, " B"],
    images: Float[Array, "B H W C"],
    probability: float,
    mode: str,
) -> Float[Array, "B H W C"]:
    """Fills one box of an image (Zhong et al. 2017, https://arxiv.org/abs/1708.04896).

    Args:
      keys: one for each image.
      images: normalised: 0 is the mean colour.
      probability: that an image gets a box.
      mode: what fills it: 'const' zeros, 'rand' one normal colour for a box, 'pixel' a normal
        colour for each pixel.
    """
    _, H, W, C = images.shape
    coins, places, colours = jax.vmap(lambda k: jax.random.split(k, 3), out_axes=1)(keys)
    chosen = jax.vmap(lambda key: jax.random.bernoulli(key, probability))(coins)
    shape = {"const": None, "rand": (1, 1, C), "pixel": (H, W, C)}[mode]

    def erase(images, places, colours):
        fill = jnp.zeros((1, 1, 1, 1), images.dtype)
        if shape is not None:
            fill = jax.vmap(lambda key: jax.random.normal(key, shape, images.dtype))(colours)
        return jnp.where(inside(erasing_boxes(places, H, W), H, W)[..., None], fill, images)

    return apply_where(erase, chosen, images, places, colours)
