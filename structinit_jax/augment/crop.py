"""Flips and crops of uint8 batches whose images lie whole on the device."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, UInt8

from structinit_jax.augment.boxes import Boxes, crop_boxes


def random_flip(
    keys: Key[Array, " B"], images: UInt8[Array, "B H W C"], probability: float
) -> UInt8[Array, "B H W C"]:
    """Mirrors images left to right."""
    flipped = jax.vmap(lambda key: jax.random.bernoulli(key, probability))(keys)
    return jnp.where(flipped[:, None, None, None], images[:, :, ::-1], images)


def random_pad_crop(
    keys: Key[Array, " B"], images: UInt8[Array, "B H W C"], padding: int
) -> UInt8[Array, "B H W C"]:
    """Pads every side with black and cuts the original size out at a random place."""
    _, H, W, _ = images.shape
    padded = jnp.pad(images, ((0, 0), (padding, padding), (padding, padding), (0, 0)))

    def cut(key: Key[Array, ""], image: UInt8[Array, "h w C"]) -> UInt8[Array, "H W C"]:
        top, left = jax.random.randint(key, (2,), 0, 2 * padding + 1)
        return jax.lax.dynamic_slice(image, (top, left, 0), (H, W, image.shape[-1]))

    return jax.vmap(cut)(keys, padded)


def random_resized_crop(
    keys: Key[Array, " B"],
    images: UInt8[Array, "B H W C"],
    size: int,
    *,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    interpolation: str = "random",
) -> UInt8[Array, "B size size C"]:
    """Cuts a random box out and resizes it, as torchvision's and timm's transform of that name.

    Args:
      keys: one for each image.
      images: all of one size.
      size: of the sides of what is returned.
      scale: from which to which share of the area.
      ratio: from which to which width over height.
      interpolation: 'bilinear', 'bicubic' or 'random', which tosses a coin for each image.
    """
    places, coins = jax.vmap(jax.random.split, out_axes=1)(keys)
    boxes = crop_boxes(places, *images.shape[1:3], scale, ratio)
    bicubic = {
        "random": jax.vmap(jax.random.bernoulli)(coins),
        "bilinear": jnp.zeros(len(images), bool),
        "bicubic": jnp.ones(len(images), bool),
    }[interpolation]
    return resize_boxes(images, boxes, size, bicubic)


def resize_boxes(
    images: UInt8[Array, "B H W C"], boxes: Boxes, size: int, bicubic: Bool[Array, " B"]
) -> UInt8[Array, "B size size C"]:
    """Cuts the boxes out and resizes them with an antialiasing filter, as Pillow does.

    Two products with a matrix for each image, first along rows, then along columns, rounded to
    whole levels after each.
    """
    _, H, W, _ = images.shape
    across = _resize_weights(boxes.left, boxes.width, W, size, bicubic)
    down = _resize_weights(boxes.top, boxes.height, H, size, bicubic)
    # Whole levels need more than the 8 bits of TensorFloat-32 and bfloat16 products.
    precision = jax.lax.Precision.HIGHEST
    levels = images.astype(jnp.float32)
    rows = _round(jnp.einsum("bhwc,bxw->bhxc", levels, across, precision=precision))
    return _round(jnp.einsum("bhxc,byh->byxc", rows, down, precision=precision)).astype(jnp.uint8)


def _resize_weights(
    start: Int[Array, " B"],
    length: Int[Array, " B"],
    side: int,
    size: int,
    bicubic: Bool[Array, " B"],
) -> Float[Array, "B size side"]:
    """How much each input pixel of the box gives to each output pixel; rows of sum 1."""
    scale = (length.astype(jnp.float32) / size)[:, None, None]
    centre = (jnp.arange(size, dtype=jnp.float32)[None, :, None] + 0.5) * scale
    place = jnp.arange(side)[None, None, :] - start[:, None, None]
    distance = (place.astype(jnp.float32) + 0.5 - centre) / jnp.maximum(scale, 1)
    t = jnp.abs(distance)
    triangle = jnp.maximum(1 - t, 0)
    near = (1.5 * t - 2.5) * t * t + 1
    far = ((-0.5 * t + 2.5) * t - 4) * t + 2
    cubic = jnp.where(t < 1, near, jnp.where(t < 2, far, 0))
    weights = jnp.where(bicubic[:, None, None], cubic, triangle)
    weights = jnp.where((place >= 0) & (place < length[:, None, None]), weights, 0)
    return weights / jnp.sum(weights, axis=-1, keepdims=True)


def _round(levels: Float[Array, "..."]) -> Float[Array, "..."]:
    return jnp.clip(jnp.floor(levels + 0.5), 0, 255)
