"""Mixup, cutmix and the choice between them, as in timm.

Zhang et al. 2018 (https://arxiv.org/abs/1710.09412) and Yun et al. 2019
(https://arxiv.org/abs/1905.04899).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Integer, Key
from scipy.special import betaincinv

from structinit_jax.augment.boxes import Boxes, cutmix_boxes, inside

NUM_QUANTILES = 4097


class MixOptions(NamedTuple):
    """How images are mixed.

    Attributes:
      mixup: α of mixup's λ ~ Beta(α, α); 0 turns mixup off.
      cutmix: likewise for cutmix.
      probability: that a group is mixed.
      switch: that it is cutmix, where both are on.
      group: how many consecutive images share one λ and one box. Each is mixed with its mirror
        image in the group: the first with the last. 0 makes the whole batch one group; 1 draws for
        each image, whose partner is then its mirror image in the batch. With 0 and 1 devices that
        share a batch exchange images.
    """

    mixup: float = 0.0
    cutmix: float = 0.0
    probability: float = 1.0
    switch: float = 0.5
    group: int = 0


class Mixing(NamedTuple):
    """What is drawn for each group.

    Attributes:
      kept: the share λ of an image's own pixels and label.
      use_cutmix: whether the rest comes as a box.
      boxes: where.
    """

    kept: Float[Array, " G"]
    use_cutmix: Bool[Array, " G"]
    boxes: Boxes


def draw_mixing(
    key: Key[Array, ""], num_groups: int, height: int, width: int, options: MixOptions
) -> Mixing:
    """Draws λ and boxes for groups of images; λ of a box cut at the edge is its real share."""
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(num_groups))
    both = options.mixup and options.cutmix
    switch = options.switch if both else float(options.cutmix > 0)

    def draw(key: Key[Array, ""]) -> tuple[Array, Array, Array]:
        coin, which, beta, place = jax.random.split(key, 4)
        use_cutmix = jax.random.bernoulli(which, switch)
        level = jax.random.uniform(beta)
        # Where one is off its α is not used, but Beta needs a positive one.
        kept = jnp.where(
            use_cutmix,
            beta_quantile(level, options.cutmix or 1.0),
            beta_quantile(level, options.mixup or 1.0),
        )
        mixed = jax.random.bernoulli(coin, options.probability)
        return jnp.where(mixed, kept, 1.0), use_cutmix, place

    kept, use_cutmix, places = jax.vmap(draw)(keys)
    boxes = cutmix_boxes(places, kept, height, width)
    outside = 1 - (boxes.height * boxes.width).astype(jnp.float32) / (height * width)
    return Mixing(jnp.where(use_cutmix, outside, kept), use_cutmix, boxes)


def beta_quantile(level: Float[Array, ""], alpha: float) -> Float[Array, ""]:
    """The value below which a Beta(α, α) variable stays with this probability, from a table.

    `jax.random.beta` rejects samples in a loop, at every turn of which a GPU's host waits and
    devices that share a batch exchange whether to go on.
    """
    table = jnp.asarray(_beta_quantiles(alpha))
    position = level * (NUM_QUANTILES - 1)
    below = jnp.clip(position.astype(jnp.int32), 0, NUM_QUANTILES - 2)
    low, high = table[below], table[below + 1]
    return low + (position - below.astype(jnp.float32)) * (high - low)


@functools.cache
def _beta_quantiles(alpha: float) -> np.ndarray:
    return betaincinv(alpha, alpha, np.linspace(0, 1, NUM_QUANTILES)).astype(np.float32)


def mix(
    key: Key[Array, ""],
    images: Float[Array, "B H W C"],
    targets: Float[Array, "B classes"],
    options: MixOptions,
) -> tuple[Float[Array, "B H W C"], Float[Array, "B classes"]]:
    """Mixes each image and its target with a partner's.

    Args:
      key: of the whole batch.
      images: a multiple of `options.group` of them.
      targets: one row for each image.
      options: how.

    Returns:
      Images and targets.
    """
    B, H, W, _ = images.shape
    size = options.group or B
    drawn = draw_mixing(key, B // size, H, W, options)
    kept, use_cutmix, *edges = (
        jnp.broadcast_to(field[:, None], (B // size, size)).reshape(B)
        for field in (drawn.kept, drawn.use_cutmix, *drawn.boxes)
    )
    within = size if size > 1 else B
    partners, partner_targets = (_mirror(x, within) for x in (images, targets))
    share = kept[:, None, None, None]
    box = inside(Boxes(*edges), H, W)[..., None]
    mixed = jnp.where(
        use_cutmix[:, None, None, None],
        jnp.where(box, partners, images),
        share * images + (1 - share) * partners,
    )
    return mixed, kept[:, None] * targets + (1 - kept[:, None]) * partner_targets


def smooth_one_hot(
    labels: Integer[Array, " B"], num_classes: int, smoothing: float
) -> Float[Array, "B classes"]:
    """Targets of which `smoothing` is spread over all classes."""
    return jax.nn.one_hot(labels, num_classes) * (1 - smoothing) + smoothing / num_classes


def _mirror(array: Array, size: int) -> Array:
    """Reverses the order within groups of `size`."""
    groups = array.reshape(-1, size, *array.shape[1:])
    return groups[:, ::-1].reshape(array.shape)
