"""Data augmentation that runs on the device, inside the jitted training step.

`make_augment` returns the augmentation of a whole training recipe as one pure function. The modules
hold the individual operations, which follow timm, torchvision and Pillow: `transforms` (crops,
flips, warps and colors), `rand_augment` and `mix` (mixup, cutmix and erasing).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Integer, Key, Real, UInt8
from ml_collections import ConfigDict

from structinit_jax.augment import mix, rand_augment, transforms
from structinit_jax.errors import Check, NonNegativeFloat, NonNegativeInt, Probability

# Each operation has its own random stream, so disabling one does not change the others' draws.
# Other numbers would change the draws of a seed.
CROP = 0
FLIP = 1
RAND_AUGMENT = 2
VERTICAL_FLIP = 3
ERASING = 4
MIXING = 5

Augment = Callable[
    [Key[Array, ""], UInt8[Array, "B H W C"], Integer[Array, " B"]],
    tuple[Float[Array, "B h w C"], Float[Array, "B classes"]],
]

Shares = Annotated[
    tuple[float, float],
    Check("a pair with 0 < low <= high <= 1", lambda x: len(x) == 2 and 0 < x[0] <= x[1] <= 1),
]
PolicyText = Annotated[
    str, Check(f"empty or {rand_augment.POLICY}", lambda x: x == "" or rand_augment.parse(x))
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AugmentFields:
    """Fields of `config.augment`. By default images are only normalized."""

    # 'pad' pads by 4 pixels, then crops to the image's size. 'resized' resizes a random box to
    # image_size; the loader does this when decoding (`data.images.RandomCrop`), not `make_augment`.
    crop: Literal["none", "pad", "resized"] = "none"
    crop_scale: Shares = (0.08, 1.0)  # range of the box's share of the image area, if 'resized'
    flip: Probability = 0.0  # probability of a horizontal flip
    vertical_flip: Probability = 0.0
    # A timm policy with any of m, mstd, n and inc, such as 'rand-m9-mstd0.5-inc1'; '' disables it.
    rand_augment: PolicyText = ""
    erasing: Probability = 0.0  # probability of random erasing, with noise
    # Alphas; 0 disables. If both are enabled, a group uses one of them with equal probability.
    mixup: NonNegativeFloat = 0.0
    cutmix: NonNegativeFloat = 0.0
    # Consecutive images that share one lambda; 0 is the whole batch, and 1 is timm's mode 'elem'.
    # By default, timm and DeiT share lambda within each process's batch.
    mix_group: NonNegativeInt = 0


def make_augment(
    config: ConfigDict,
    *,
    num_classes: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    label_smoothing: float = 0.0,
    mesh: Mesh | None = None,
) -> Augment:
    """Builds the function `(rng, images, labels) -> (images, targets)` to call within jit.

    The order of operations is that of timm's train script with its prefetcher: crop, flips,
    RandAugment, mixing, rounding, normalization, erasing. With a Threefry key, which is JAX's
    default, the random numbers for an image depend only on `rng` and the image's index in the
    batch, so the result does not depend on the number of devices. The function returns normalized
    images and targets in float32. `config.mix_group` must divide the batch size.

    Args:
      config: The section `config.augment`, with the fields of `AugmentFields`.
      num_classes: Number of classes.
      mean: Mean of each channel, for pixels scaled to [0, 1].
      std: Standard deviation of each channel, for pixels scaled to [0, 1].
      label_smoothing: Share of each target that is spread evenly over all classes.
      mesh: Device mesh; the batch is sharded over all of its axes. None for a single device.
    """

    def change_pixels(rng, index, images):
        if config.crop == "pad":
            images = jax.vmap(transforms.random_pad_crop)(_image_rngs(rng, CROP, index), images)
        flips = ((FLIP, config.flip, 1), (VERTICAL_FLIP, config.vertical_flip, 0))
        for stream, probability, axis in flips:
            if probability:
                flip = functools.partial(transforms.random_flip, probability=probability, axis=axis)
                images = jax.vmap(flip)(_image_rngs(rng, stream, index), images)
        if config.rand_augment:
            policy = rand_augment.parse(config.rand_augment)
            draw = functools.partial(rand_augment.draw_operations, policy=policy)
            drawn = jax.vmap(draw)(_image_rngs(rng, RAND_AUGMENT, index))
            fill = tuple(min(255, round(255 * x)) for x in mean)  # as in timm
            images = rand_augment.apply_operations(images, drawn, fill)
        return images

    def normalize_and_erase(rng, index, images):
        images = normalize(images, mean, std)
        if config.erasing:
            images = mix.random_erasing(_image_rngs(rng, ERASING, index), images, config.erasing)
        return images

    def augment(rng, images, labels):
        index = jnp.arange(len(images))
        images = _shard(change_pixels, mesh)(rng, index, images)
        targets = optax.smooth_labels(jax.nn.one_hot(labels, num_classes), label_smoothing)
        if config.mixup or config.cutmix:
            mixing_rng = jax.random.fold_in(rng, MIXING)
            options = dict(mixup=config.mixup, cutmix=config.cutmix, group=config.mix_group)
            images, targets = mix.mix(mixing_rng, images, targets, **options)
            images = jnp.round(images)  # timm stores them as uint8
        return _shard(normalize_and_erase, mesh)(rng, index, images), targets

    return augment


def _image_rngs(rng, stream, index):
    """Returns a random key per image, from its index in the global batch."""
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(rng, stream), index)


def _shard(function, mesh):
    """Runs a function of `(rng, index, images)` on each device's own part of the batch."""
    if mesh is None:
        return function
    batch = PartitionSpec(mesh.axis_names)
    return jax.shard_map(
        function, mesh=mesh, in_specs=(PartitionSpec(), batch, batch), out_specs=batch
    )


def normalize(
    images: Real[Array, "B H W C"], mean: tuple[float, ...], std: tuple[float, ...]
) -> Float[Array, "B H W C"]:
    """Converts pixels in [0, 255] to `(pixel / 255 - mean) / std`, per channel."""
    mean, std = (jnp.asarray(x, jnp.float32)[None, None, None, :] for x in (mean, std))
    return (images.astype(jnp.float32) / 255 - mean) / std
