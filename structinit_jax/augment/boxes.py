"""Random boxes: crops as torchvision draws them, erasing and cutmix boxes as timm does."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

ATTEMPTS = 10


class Boxes(NamedTuple):
    """One box for each of n images, in whole pixels."""

    top: Int[Array, " n"]
    left: Int[Array, " n"]
    height: Int[Array, " n"]
    width: Int[Array, " n"]


def inside(boxes: Boxes, height: int, width: int) -> Bool[Array, "n H W"]:
    """Which pixels of images of a size lie in the boxes."""
    top, left, box_height, box_width = (field[:, None, None] for field in boxes)
    y = jnp.arange(height)[None, :, None]
    x = jnp.arange(width)[None, None, :]
    rows = (y >= top) & (y < top + box_height)
    return rows & (x >= left) & (x < left + box_width)


def crop_boxes(
    keys: Key[Array, " B"],
    height: int,
    width: int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> Boxes:
    """Boxes of RandomResizedCrop (Szegedy et al. 2015, https://arxiv.org/abs/1409.4842).

    Args:
      keys: one for each image.
      height: of the images.
      width: likewise.
      scale: from which to which share of the image's area, uniformly.
      ratio: from which to which width over height, uniformly in the logarithm. After 10 boxes that
        do not fit, the largest central one within these ratios is taken.
    """
    area, aspect, u, v = _draw_attempts(keys, scale, ratio)
    area = area * (height * width)
    box_width = jnp.round(jnp.sqrt(area * aspect)).astype(jnp.int32)
    box_height = jnp.round(jnp.sqrt(area / aspect)).astype(jnp.int32)
    fits = (box_width <= width) & (box_height <= height)
    box_height, box_width, u, v = _first(fits, box_height, box_width, u, v)
    top = _uniform_start(u, height - box_height)
    left = _uniform_start(v, width - box_width)

    central_height, central_width = height, width
    if width / height < ratio[0]:
        central_height = round(width / ratio[0])
    elif width / height > ratio[1]:
        central_width = round(height * ratio[1])
    none = ~fits.any(axis=1)
    return Boxes(
        jnp.where(none, (height - central_height) // 2, top),
        jnp.where(none, (width - central_width) // 2, left),
        jnp.where(none, central_height, box_height),
        jnp.where(none, central_width, box_width),
    )


def erasing_boxes(
    keys: Key[Array, " B"],
    height: int,
    width: int,
    *,
    area: tuple[float, float] = (0.02, 1 / 3),
    ratio: tuple[float, float] = (0.3, 1 / 0.3),
) -> Boxes:
    """Boxes of random erasing (Zhong et al. 2017, https://arxiv.org/abs/1708.04896).

    Args:
      keys: one for each image.
      height: of the images.
      width: likewise.
      area: from which to which share of the image's area, uniformly.
      ratio: from which to which height over width, uniformly in the logarithm. A box is empty after
        10 that are not smaller than the image in both directions.
    """
    share, aspect, u, v = _draw_attempts(keys, area, ratio)
    share = share * (height * width)
    box_height = jnp.round(jnp.sqrt(share * aspect)).astype(jnp.int32)
    box_width = jnp.round(jnp.sqrt(share / aspect)).astype(jnp.int32)
    fits = (box_height < height) & (box_width < width)
    box_height, box_width, u, v = _first(
        fits, jnp.where(fits, box_height, 0), jnp.where(fits, box_width, 0), u, v
    )
    top = _uniform_start(u, height - box_height)
    left = _uniform_start(v, width - box_width)
    return Boxes(top, left, box_height, box_width)


def cutmix_boxes(
    keys: Key[Array, " n"], kept: Float[Array, " n"], height: int, width: int
) -> Boxes:
    """Boxes of cutmix (Yun et al. 2019, https://arxiv.org/abs/1905.04899), cut at the edges.

    Args:
      keys: one for each box.
      kept: the share λ of the area that lies outside of the whole box. The centre is uniform over
        the image, so that what is left of a box may be smaller.
      height: of the images.
      width: likewise.
    """
    side = jnp.sqrt(1 - kept)
    box_height = jnp.floor(height * side).astype(jnp.int32)
    box_width = jnp.floor(width * side).astype(jnp.int32)

    def centre(key: Key[Array, ""]) -> Int[Array, " 2"]:
        return jax.random.randint(key, (2,), jnp.zeros(2, int), jnp.array([height, width]))

    y, x = jax.vmap(centre)(keys).T
    top = jnp.clip(y - box_height // 2, 0, height)
    left = jnp.clip(x - box_width // 2, 0, width)
    bottom = jnp.clip(y + (box_height + 1) // 2, 0, height)
    right = jnp.clip(x + (box_width + 1) // 2, 0, width)
    return Boxes(top, left, bottom - top, right - left)


def _draw_attempts(keys, area, ratio) -> Float[Array, "4 B attempts"]:
    """Area shares, aspect ratios and two uniform numbers for the place."""
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (4, ATTEMPTS)))(keys)
    low, high = math.log(ratio[0]), math.log(ratio[1])
    shares = area[0] + (area[1] - area[0]) * uniform[:, 0]
    aspects = jnp.exp(low + (high - low) * uniform[:, 1])
    return jnp.stack([shares, aspects, uniform[:, 2], uniform[:, 3]])


def _first(fits: Bool[Array, "B attempts"], *draws: Array) -> list[Array]:
    """Of each array the entry of the first attempt that fits, or else of the first."""
    index = jnp.argmax(fits, axis=1)[:, None]
    return [jnp.take_along_axis(draw, index, axis=1)[:, 0] for draw in draws]


def _uniform_start(uniform: Float[Array, " B"], room: Int[Array, " B"]) -> Int[Array, " B"]:
    """A whole number in 0…room."""
    start = jnp.floor(uniform * (room + 1).astype(jnp.float32)).astype(jnp.int32)
    return jnp.clip(start, 0, jnp.maximum(room, 0))
