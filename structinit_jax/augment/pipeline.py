"""A whole training recipe's augmentation as one function of a key and a batch."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int, Integer, Key, UInt8

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


def make_augment(options: AugmentOptions, mesh: Mesh | None = None) -> Augment:
    """Builds `(key, images, labels) -> (normalised images, targets)`, to be called under jit.

    The order is timm's: crop, flip, RandAugment or else colour jitter, normalisation, erasing,
    mixing. An image's randomness depends on the key and on its place in the batch alone, so a batch
    spread over any number of devices gives what one device gives. Flips and crops draw from keys of
    their own: turning one piece off leaves the others' draws as they are.

    Args:
      options: the recipe.
      mesh: the devices over all of which the batch is split; None: it lies on one.

    Returns:
      A pure function. Images are uint8, all of one size; labels are class numbers.
    """
    mixing = MixOptions(
        options.mixup,
        options.cutmix,
        options.mix_probability,
        options.mix_switch,
        options.mix_group,
    )
    change, erase = (
        _on_each_device(functools.partial(function, options), mesh)
        for function in (_change, _erase)
    )

    def augment(key, images, labels):
        _check_batch(images.shape, len(options.mean), options)
        places = jnp.arange(images.shape[0])
        images = change(key, places, images)
        targets = smooth_one_hot(labels, options.num_classes, options.label_smoothing)
        if not options.erase_after_mixing:
            images = erase(key, places, images)
        if mixing.mixup or mixing.cutmix:
            images, targets = mix(jax.random.fold_in(key, 5), images, targets, mixing)
        if options.erase_after_mixing:
            images = erase(key, places, images)
        return images, targets

    return augment


def _change(
    options: AugmentOptions, key: Key[Array, ""], places: Int[Array, " B"], images: Array
) -> Float[Array, "B h w C"]:
    """All that comes before erasing."""
    if options.crop == "pad":
        images = random_pad_crop(_keys(key, 0, places), images, options.crop_padding)
    elif options.crop == "resized":
        images = random_resized_crop(
            _keys(key, 0, places),
            images,
            options.image_size,
            scale=options.crop_scale,
            ratio=options.crop_ratio,
            interpolation=options.interpolation,
        )
    if options.flip:
        images = random_flip(_keys(key, 1, places), images, options.flip)
    if options.rand_augment:
        images = rand_augment(
            _keys(key, 2, places),
            images,
            parse(options.rand_augment),
            # timm's: the mean colour, as a level.
            fill=tuple(min(255, round(255 * value)) for value in options.mean),
            interpolation=options.interpolation,
        )
    elif any(options.color_jitter):
        images = color_jitter(_keys(key, 3, places), images, options.color_jitter)
    return normalize(images, options.mean, options.std)


def _erase(
    options: AugmentOptions, key: Key[Array, ""], places: Int[Array, " B"], images: Array
) -> Float[Array, "B h w C"]:
    if not options.erasing:
        return images
    return random_erasing(_keys(key, 4, places), images, options.erasing, options.erasing_mode)


def _keys(key: Key[Array, ""], piece: int, places: Int[Array, " B"]) -> Key[Array, " B"]:
    """A key for each image, by its place in the whole batch."""
    stream = jax.random.fold_in(key, piece)
    return jax.vmap(lambda place: jax.random.fold_in(stream, place))(places)


def _on_each_device(function: Callable[..., Array], mesh: Mesh | None) -> Callable[..., Array]:
    """Each device works on its own images, as if there were no others."""
    if mesh is None:
        return function
    split = PartitionSpec(mesh.axis_names)
    return jax.shard_map(
        function, mesh=mesh, in_specs=(PartitionSpec(), split, split), out_specs=split
    )


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
