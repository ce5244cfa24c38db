"""A whole training recipe's augmentation as one function of a key and a batch."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer, Key, UInt8

from structinit_jax.augment.crop import random_flip, random_pad_crop, random_resized_crop
from structinit_jax.augment.erase import random_erasing
from structinit_jax.augment.jitter import color_jitter
from structinit_jax.augment.mix import MixOptions, mix, smooth_one_hot
from structinit_jax.augment.options import AugmentOptions
from structinit_jax.augment.rand_augment import parse, rand_augment
from structinit_jax.errors import InputError

Augment = Callable[
    [Key[Array, ""], UInt8[Array, "B H W C"], Integer[Array, " B"]],
    tuple[Float[Array, "B h w C"], Float[Array, "B classes"]],
]


def make_augment(options: AugmentOptions) -> Augment:
    """Builds `(key, images, labels) -> (normalised images, targets)`, to be called under jit.

    The order is timm's: crop, flip, RandAugment or else colour jitter, normalisation, erasing,
    mixing. An image's randomness depends on the key and on its place in the batch alone, so a batch
    spread over any number of devices gives what one device gives. Flips and crops draw from keys of
    their own: turning one piece off leaves the others' draws as they are.

    Args:
      options: the recipe.

    Returns:
      A pure function. Images are uint8, all of one size; labels are class numbers.
    """
    channels = len(options.mean)
    policy = parse(options.rand_augment) if options.rand_augment else None
    # timm's: the mean colour, as a level.
    fill = tuple(min(255, round(255 * value)) for value in options.mean)
    mixing = MixOptions(
        options.mixup,
        options.cutmix,
        options.mix_probability,
        options.mix_switch,
        options.mix_group,
    )

    def augment(key, images, labels):
        _check_batch(images.shape, channels, options)
        index = jnp.arange(images.shape[0])

        def image_keys(piece: int) -> Key[Array, " B"]:
            stream = jax.random.fold_in(key, piece)
            return jax.vmap(lambda i: jax.random.fold_in(stream, i))(index)

        if options.crop == "pad":
            images = random_pad_crop(image_keys(0), images, options.crop_padding)
        elif options.crop == "resized":
            images = random_resized_crop(
                image_keys(0),
                images,
                options.image_size,
                scale=options.crop_scale,
                ratio=options.crop_ratio,
                interpolation=options.interpolation,
            )
        if options.flip:
            images = random_flip(image_keys(1), images, options.flip)
        if policy is not None:
            images = rand_augment(
                image_keys(2), images, policy, fill=fill, interpolation=options.interpolation
            )
        elif any(options.color_jitter):
            images = color_jitter(image_keys(3), images, options.color_jitter)
        images = normalize(images, options.mean, options.std)
        targets = smooth_one_hot(labels, options.num_classes, options.label_smoothing)

        def erase(images):
            if not options.erasing:
                return images
            return random_erasing(image_keys(4), images, options.erasing, options.erasing_mode)

        if not options.erase_after_mixing:
            images = erase(images)
        if mixing.mixup or mixing.cutmix:
            images, targets = mix(jax.random.fold_in(key, 5), images, targets, mixing)
        if options.erase_after_mixing:
            images = erase(images)
        return images, targets

    return augment


def normalize(
    images: UInt8[Array, "B H W C"], mean: tuple[float, ...], std: tuple[float, ...]
) -> Float[Array, "B H W C"]:
    """Turns uint8 pixels into (pixel / 255 - mean) / std, per channel."""
    mean, std = (jnp.asarray(x, jnp.float32)[None, None, None, :] for x in (mean, std))
    return (images.astype(jnp.float32) / 255 - mean) / std


def _check_batch(shape: tuple[int, ...], channels: int, options: AugmentOptions) -> None:
    if shape[-1] != channels:
        raise InputError(
            f"images of {shape[-1]} channels do not fit augment.mean of {channels} numbers: give "
            "mean and std one number for each channel"
        )
    size = options.mix_group
    if size and shape[0] % size:
        raise InputError(
            f"augment.mix_group={size} does not divide the batch of {shape[0]} images: take a "
            "divisor of the batch, or 0 for the whole batch"
        )
