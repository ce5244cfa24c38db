"""Random erasing of normalized images, as in timm."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from structinit_jax.augment.apply_where import apply_where
from structinit_jax.augment.crop import Box, box_mask, draw_attempts, place_first_fit

AREA = (0.02, 1 / 3)  # as a fraction of the image's area
RATIO = (0.3, 1 / 0.3)  # height / width


def random_erasing(
    rngs: Key[Array, " B"], images: Float[Array, "B H W C"], probability: float, mode: str
) -> Float[Array, "B H W C"]:
    """Fills a random box of some images (Zhong et al. 2017, https://arxiv.org/abs/1708.04896).

    Args:
      rngs: A random key per image.
      images: Normalized images, for which 0 is the mean color.
      probability: Probability that an image is changed.
      mode: Fill of the box: 'const' (zeros), 'rand' (one normally distributed color) or 'pixel' (a
        normally distributed color per pixel).
    """
    _, H, W, C = images.shape
    split = jax.vmap(lambda rng: jax.random.split(rng, 3), out_axes=1)
    select_rngs, box_rngs, fill_rngs = split(rngs)
    mask = jax.vmap(lambda rng: jax.random.bernoulli(rng, probability))(select_rngs)
    fill_shape = (H, W, C) if mode == "pixel" else (1, 1, C)

    def erase(image, box_rng, fill_rng):
        inside = box_mask(_erasing_box(box_rng, H, W), H, W)[..., None]
        if mode == "const":
            return jnp.where(inside, 0.0, image)
        return jnp.where(inside, jax.random.normal(fill_rng, fill_shape, image.dtype), image)

    return apply_where(erase, mask, images, box_rngs, fill_rngs)


def _erasing_box(rng, height, width) -> Box:
    """Draws a box, empty if none of 10 attempts is smaller than the image in both directions."""
    box_height, box_width, position = draw_attempts(rng, height * width, AREA, RATIO)
    fits = (box_height < height) & (box_width < width)
    box_height, box_width = jnp.where(fits, box_height, 0), jnp.where(fits, box_width, 0)
    return place_first_fit(fits, box_height, box_width, position, height, width)
