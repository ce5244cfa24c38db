"""Mixup, cutmix and random erasing, as in timm.

Zhang et al. 2018 (https://arxiv.org/abs/1710.09412), Yun et al. 2019
(https://arxiv.org/abs/1905.04899) and Zhong et al. 2017 (https://arxiv.org/abs/1708.04896).
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, Real

from structinit_jax.augment.transforms import apply_where
from structinit_jax.rngs import draw_flat

NUM_QUANTILES = 4097  # in the table of `beta_quantile`
ERASED_AREA = (0.02, 1 / 3)  # as a fraction of the image's area
ERASED_RATIO = (0.3, 1 / 0.3)  # height / width
ERASING_ATTEMPTS = 10


class Box(NamedTuple):
    """A rectangle within an image, in pixels."""

    top: Int[Array, ""]
    left: Int[Array, ""]
    height: Int[Array, ""]
    width: Int[Array, ""]


def box_mask(box: Box, height: int, width: int) -> Bool[Array, "H W"]:
    """Returns a mask of the pixels inside the box."""
    y = jnp.arange(height)[:, None]
    x = jnp.arange(width)[None, :]
    rows = (y >= box.top) & (y < box.top + box.height)
    return rows & (x >= box.left) & (x < box.left + box.width)


def mix(
    rng: Key[Array, ""],
    images: Real[Array, "B H W C"],
    targets: Float[Array, "B classes"],
    *,
    mixup: float = 0.0,
    cutmix: float = 0.0,
    group: int = 0,
) -> tuple[Float[Array, "B H W C"], Float[Array, "B classes"]]:
    """Mixes each image and its target with those of a partner.

    Consecutive images form groups that share one λ and one box. If mixup and cutmix are both
    enabled, a group uses one of them with equal probability. Within a group, the first image is
    mixed with the last, the second with the second-to-last, and so on.

    Args:
      rng: A random key for the whole batch.
      images: Images, normalized or not.
      targets: Class probabilities.
      mixup: α of mixup's λ ~ Beta(α, α); 0 disables mixup.
      cutmix: α of cutmix's λ; 0 disables cutmix.
      group: Number of images per group, a divisor of B; 0 is the whole batch. With 1, each image
        has its own λ and box, and partners are chosen as if the whole batch were one group.
    """
    B, H, W, _ = images.shape
    size = group or B
    switch = 0.5 if mixup and cutmix else float(cutmix > 0)
    # λ is drawn from both distributions. If one is disabled, any positive α will do.
    options = dict(mixup=mixup or 1.0, cutmix=cutmix or 1.0, switch=switch)
    draw = functools.partial(draw_mixing, height=H, width=W, **options)
    rngs = jax.vmap(jax.random.fold_in, (None, 0))(rng, jnp.arange(B // size))
    lam, use_cutmix, box = jax.tree.map(lambda x: jnp.repeat(x, size), jax.vmap(draw)(rngs))

    def mix_images(image, partner, lam, use_cutmix, box):
        # Converted only here, so that devices exchange single bytes.
        image = image.astype(jnp.float32)
        partner = partner.astype(jnp.float32)
        inside = box_mask(box, H, W)[..., None]
        interpolated = lam * image + (1 - lam) * partner
        return jnp.where(use_cutmix, jnp.where(inside, partner, image), interpolated)

    partners, partner_targets = (_mirror(x, size if size > 1 else B) for x in (images, targets))
    images = jax.vmap(mix_images)(images, partners, lam, use_cutmix, box)
    return images, lam[:, None] * targets + (1 - lam[:, None]) * partner_targets


def _mirror(array, size):
    """Reverses the order within groups of `size`."""
    groups = array.reshape(-1, size, *array.shape[1:])
    return groups[:, ::-1].reshape(array.shape)


def draw_mixing(
    rng: Key[Array, ""], *, height: int, width: int, mixup: float, cutmix: float, switch: float
) -> tuple[Float[Array, ""], Bool[Array, ""], Box]:
    """Draws λ, whether to use cutmix, and the box of one group of images.

    `mixup` and `cutmix` are the α of each, and `switch` is the probability of cutmix.
    """
    # Splitting into three keys would change the draws of every resumed run.
    _, switch_rng, lam_rng, box_rng = jax.random.split(rng, 4)
    use_cutmix = jax.random.bernoulli(switch_rng, switch)
    uniform = jax.random.uniform(lam_rng)
    lam = jnp.where(use_cutmix, beta_quantile(uniform, cutmix), beta_quantile(uniform, mixup))
    box = _cutmix_box(box_rng, lam, height, width)
    # The box may be clipped at the image's border, so λ follows from its actual area.
    outside = 1 - (box.height * box.width).astype(jnp.float32) / (height * width)
    return jnp.where(use_cutmix, outside, lam), use_cutmix, box


def _cutmix_box(rng, lam, height, width) -> Box:
    """Draws a box of area share 1 - λ around a uniformly drawn pixel; clips it to the image.

    As in timm, sides are rounded down to even numbers of pixels.
    """
    side = jnp.sqrt(1 - lam)
    box_height = jnp.floor(height * side).astype(jnp.int32)
    box_width = jnp.floor(width * side).astype(jnp.int32)
    y, x = jax.random.randint(rng, (2,), jnp.zeros(2, int), jnp.array([height, width]))
    top = jnp.clip(y - box_height // 2, 0, height)
    left = jnp.clip(x - box_width // 2, 0, width)
    bottom = jnp.clip(y + box_height // 2, 0, height)
    right = jnp.clip(x + box_width // 2, 0, width)
    return Box(top, left, bottom - top, right - left)


def beta_quantile(probability: Float[Array, ""], alpha: float) -> Float[Array, ""]:
    """Returns a quantile of Beta(α, α), interpolated from a table.

    `jax.random.beta` has a rejection loop, in which devices would communicate on every iteration.
    """
    table = jnp.asarray(_beta_quantiles(alpha))
    position = probability * (NUM_QUANTILES - 1)
    below = jnp.clip(position.astype(jnp.int32), 0, NUM_QUANTILES - 2)
    low = table[below]
    high = table[below + 1]
    return low + (position - below.astype(jnp.float32)) * (high - low)


@functools.cache
def _beta_quantiles(alpha: float) -> np.ndarray:
    from scipy.special import betaincinv  # slow to import, and not always needed

    return betaincinv(alpha, alpha, np.linspace(0, 1, NUM_QUANTILES)).astype(np.float32)


def random_erasing(
    rngs: Key[Array, " B"], images: Float[Array, "B H W C"], probability: float
) -> Float[Array, "B H W C"]:
    """Fills a random box of each normalized image with noise, with the given probability.

    The noise is normally distributed, and independent for each pixel and channel.
    """
    _, H, W, _ = images.shape
    split = jax.vmap(lambda rng: jax.random.split(rng, 3), out_axes=1)
    select_rngs, box_rngs, fill_rngs = split(rngs)
    mask = jax.vmap(lambda rng: jax.random.bernoulli(rng, probability))(select_rngs)

    def erase(image, box_rng, fill_rng):
        inside = box_mask(_erasing_box(box_rng, H, W), H, W)[..., None]
        noise = draw_flat(jax.random.normal, fill_rng, image.shape, image.dtype)
        return jnp.where(inside, noise, image)

    return apply_where(erase, mask, images, box_rngs, fill_rngs)


def _erasing_box(rng, height, width) -> Box:
    """Draws a box of uniform area and log-uniform aspect ratio at a uniform position.

    The box is empty if none of 10 attempts is smaller than the image in both directions.
    """
    uniform = draw_flat(jax.random.uniform, rng, (4, ERASING_ATTEMPTS))
    smallest, largest = ERASED_AREA
    low, high = map(math.log, ERASED_RATIO)
    pixels = (smallest + (largest - smallest) * uniform[0]) * (height * width)
    aspect = jnp.exp(low + (high - low) * uniform[1])
    box_height = jnp.round(jnp.sqrt(pixels * aspect)).astype(jnp.int32)
    box_width = jnp.round(jnp.sqrt(pixels / aspect)).astype(jnp.int32)
    fits = (box_height < height) & (box_width < width)
    first = jnp.argmax(fits)
    box_height, box_width = (jnp.where(fits, x, 0)[first] for x in (box_height, box_width))

    def start(uniform, room):
        return jnp.floor(uniform * (room + 1).astype(jnp.float32)).astype(jnp.int32)

    top = start(uniform[2, first], height - box_height)
    left = start(uniform[3, first], width - box_width)
    return Box(top, left, box_height, box_width)
