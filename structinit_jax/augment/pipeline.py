"""The augmentation of a training recipe: its options and the function built from them."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Integer, Key, Real, UInt8

from structinit_jax.augment.color import color_jitter
from structinit_jax.augment.crop import random_flip, random_pad_crop, random_resized_crop
from structinit_jax.augment.erase import random_erasing
from structinit_jax.augment.mix import mix, smooth_one_hot
from structinit_jax.augment.rand_augment import parse, rand_augment
from structinit_jax.errors import InputError, is_below_one, is_count, is_positive_or_zero, require

# Each operation has its own random stream, so disabling one does not change the others' draws.
CROP, FLIP, RAND_AUGMENT, COLOR_JITTER, ERASING, MIXING = range(6)

Augment = Callable[
    [Key[Array, ""], UInt8[Array, "B H W C"], Integer[Array, " B"]],
    tuple[Float[Array, "B h w C"], Float[Array, "B classes"]],
]

# Config sections of the fields that are not part of `config.augment`.
_SECTIONS = {
    "num_classes": "config.model",
    "mean": "config.data",
    "std": "config.data",
    "image_size": "config.data",
    "label_smoothing": "config",
}
_PROBABILITIES = ("flip", "erasing", "mix_probability", "mix_switch")
# Whole numbers and their lowest valid values.
_COUNTS = {"num_classes": 1, "image_size": 0, "crop_padding": 0, "mix_group": 0}
_CHOICES = {
    "crop": ("none", "pad", "resized"),
    "interpolation": ("bilinear", "bicubic", "random"),
    "erasing_mode": ("const", "rand", "pixel"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AugmentOptions:
    """Options of the augmentation. By default images are only normalized.

    Attributes:
      num_classes: Number of classes.
      mean: Mean per channel of pixels scaled to [0, 1].
      std: Standard deviation per channel of pixels scaled to [0, 1].
      image_size: Height and width in pixels after `crop='resized'`. Other crops keep the size.
      crop: 'none', 'pad' (`random_pad_crop`) or 'resized' (`random_resized_crop`).
      crop_padding: Padding per side in pixels for `crop='pad'`.
      crop_scale: Range of the box's area for `crop='resized'`, as a fraction of the image's area.
      crop_ratio: Range of the box's aspect ratio for `crop='resized'`, width / height.
      interpolation: Interpolation of `crop='resized'` and of RandAugment's warps: 'bilinear',
        'bicubic' or 'random' (one of the two with equal probability).
      flip: Probability of a horizontal flip.
      rand_augment: RandAugment policy of timm, e.g. 'rand-m9-mstd0.5-inc1', or '' for none.
      color_jitter: Strengths of brightness, contrast and saturation and optionally of hue (at most
        0.5). Ignored if `rand_augment` is set, as in timm.
      erasing: Probability of random erasing.
      erasing_mode: Fill of erased boxes: 'const', 'rand' or 'pixel'.
      erase_after_mixing: Whether to erase after mixing, as timm's training script does with its
        default prefetcher, which also mixes the uint8 images before normalization and rounds the
        result. DeiT, and timm without the prefetcher, erase and then mix normalized images.
      mixup: α of mixup. 0 disables it.
      cutmix: α of cutmix. 0 disables it.
      mix_probability: Probability that a group of images is mixed.
      mix_switch: Probability of cutmix rather than mixup if both are enabled.
      mix_group: Number of consecutive images that share one λ, or 0 for the whole batch. timm and
        DeiT share it within the batch of each process.
      label_smoothing: Fraction of each target that is spread evenly over all classes.

    Raises:
      InputError: A field has an invalid value.
    """

    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    image_size: int = 0
    crop: str = "none"
    crop_padding: int = 4
    crop_scale: tuple[float, float] = (0.08, 1.0)
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    interpolation: str = "random"
    flip: float = 0.0
    rand_augment: str = ""
    color_jitter: tuple[float, ...] = (0.0, 0.0, 0.0)
    erasing: float = 0.0
    erasing_mode: str = "pixel"
    erase_after_mixing: bool = False
    mixup: float = 0.0
    cutmix: float = 0.0
    mix_probability: float = 1.0
    mix_switch: float = 0.5
    mix_group: int = 0
    label_smoothing: float = 0.0

    def __post_init__(self):
        channels = len(self.mean)
        self._require("mean", "one number for each channel", lambda x: len(x) > 0)
        for field in _PROBABILITIES:
            self._require(field, "a number in [0, 1]", lambda x: 0 <= x <= 1)
        for field in ("mixup", "cutmix"):
            self._require(field, "a finite number, 0 or more", is_positive_or_zero)
        for field, low in _COUNTS.items():
            text = f"a whole number, {low} or more"
            self._require(field, text, functools.partial(is_count, low=low))
        for field, choices in _CHOICES.items():
            self._require(field, f"one of {', '.join(choices)}", choices.__contains__)
        for field, limit in (("crop_scale", 1.0), ("crop_ratio", math.inf)):
            text = f"a pair with 0 < low <= high <= {limit}"
            self._require(field, text, functools.partial(_is_range, limit=limit))
        self._require("label_smoothing", "a number in [0, 1)", is_below_one)
        text = "three numbers >= 0, or four with hue <= 0.5"
        self._require("color_jitter", text, _are_strengths)
        self._require("erase_after_mixing", "true or false", lambda x: isinstance(x, bool))
        if self.rand_augment:
            parse(self.rand_augment)
        text = f"one positive number for each of {channels} channels"
        self._require("std", text, lambda x: len(x) == channels and min(x) > 0)
        gray_or_rgb = channels in (1, 3) or not (self.rand_augment or any(self.color_jitter))
        text = "of length 1 or 3, as RandAugment and color jitter require"
        self._require("mean", text, lambda _: gray_or_rgb)
        text = "positive, as config.augment.crop='resized' requires"
        self._require("image_size", text, lambda x: self.crop != "resized" or x >= 1)

    def _require(self, field, text, holds):
        name = f"{_SECTIONS.get(field, 'config.augment')}.{field}"
        require(name, getattr(self, field), text, holds)


def _is_range(pair, limit):
    return len(pair) == 2 and 0 < pair[0] <= pair[1] <= limit


def _are_strengths(x):
    return len(x) in (3, 4) and all(map(is_positive_or_zero, x)) and max(x[3:], default=0) <= 0.5


def make_augment(options: AugmentOptions, mesh: Mesh | None = None) -> Augment:
    """Builds the function `(rng, images, labels) -> (images, targets)` to call within jit.

    The order of operations is timm's: crop, flip, RandAugment or else color jitter, normalization,
    erasing, mixing; or with `erase_after_mixing` mixing, normalization, erasing. The random numbers
    for an image depend only on `rng` and on its index in the batch, so the result does not depend
    on the number of devices.

    Args:
      options: The recipe's options.
      mesh: Devices over which the batch is sharded, along all axes. None for a single device.

    Returns:
      A pure function of a random key, uint8 images `[B, H, W, C]` and integer labels `[B]`. It
      returns normalized float32 images and targets `[B, num_classes]`, and raises `InputError` for
      arrays of another type or shape, and for channels or a batch size that the options exclude.
    """
    before, after = (_shard(_chain(part), mesh) for part in _operations(options))

    def augment(rng, images, labels):
        images, labels = jnp.asarray(images), jnp.asarray(labels)
        _check_batch(images, labels, options)
        index = jnp.arange(len(images))
        images = before(rng, index, images)
        targets = smooth_one_hot(labels, options.num_classes, options.label_smoothing)
        if options.mixup or options.cutmix:
            images, targets = mix(
                jax.random.fold_in(rng, MIXING),
                images.astype(jnp.float32),
                targets,
                mixup=options.mixup,
                cutmix=options.cutmix,
                probability=options.mix_probability,
                switch=options.mix_switch,
                group=options.mix_group,
            )
            if options.erase_after_mixing:  # not normalized yet
                images = jnp.round(images)  # to a uint8 value, as in timm
        return after(rng, index, images), targets

    return augment


def describe(options: AugmentOptions) -> list[str]:
    """Lists the operations of `make_augment` in their order, such as 'flip 0.5'."""
    before, after = _operations(options)
    mixing = []
    if options.mixup or options.cutmix:
        group = options.mix_group or "batch"
        mixing = [f"mixup {options.mixup:g}, cutmix {options.cutmix:g}, one lambda per {group}"]
    return [*before, *mixing, *after]


def _check_batch(images, labels, options):
    shape = images.shape
    if images.dtype != np.uint8 or len(shape) != 4:
        raise InputError(
            f"images are {images.dtype} {list(shape)}: pass uint8 pixels [B, H, W, C] from 0 to "
            "255, which are normalized here"
        )
    if not np.issubdtype(labels.dtype, np.integer) or labels.shape != shape[:1]:
        raise InputError(
            f"labels are {labels.dtype} {list(labels.shape)}: pass the classes of the "
            f"{shape[0]} images as whole numbers [B]"
        )
    if shape[-1] != len(options.mean):
        raise InputError(
            f"config.data.mean={options.mean} does not match images of {shape[-1]} channels"
        )
    if options.mix_group and shape[0] % options.mix_group:
        raise InputError(
            f"config.augment.mix_group={options.mix_group} does not divide the batch size "
            f"{shape[0]}: choose a divisor, or 0 to mix within the whole batch"
        )


def _operations(options):
    """Returns the operations on single images before and after mixing, in order, by description."""

    def each(function, stream, **arguments):
        """Applies a function of one image and its key."""
        function = jax.vmap(functools.partial(function, **arguments))
        return lambda rng, index, images: function(_image_rngs(rng, stream, index), images)

    pixels = {}
    if options.crop == "pad":
        padding = options.crop_padding
        pixels[f"crop after padding {padding}"] = each(random_pad_crop, CROP, padding=padding)
    elif options.crop == "resized":
        smallest, largest = options.crop_scale
        pixels[f"crop area {smallest:g}-{largest:g}"] = each(
            random_resized_crop,
            CROP,
            size=options.image_size,
            scale=options.crop_scale,
            ratio=options.crop_ratio,
            interpolation=options.interpolation,
        )
    if options.flip:
        pixels[f"flip {options.flip:g}"] = each(random_flip, FLIP, probability=options.flip)
    if options.rand_augment:
        pixels[options.rand_augment] = lambda rng, index, images: rand_augment(
            _image_rngs(rng, RAND_AUGMENT, index),
            images,
            parse(options.rand_augment),
            fill=tuple(min(255, round(255 * mean)) for mean in options.mean),  # as in timm
            interpolation=options.interpolation,
        )
    elif any(options.color_jitter):
        jitter = options.color_jitter
        pixels[f"jitter {jitter}"] = each(color_jitter, COLOR_JITTER, strengths=jitter)

    def erase(rng, index, images):
        rngs = _image_rngs(rng, ERASING, index)
        return random_erasing(rngs, images, options.erasing, options.erasing_mode)

    normalized = {"normalize": lambda rng, index, x: normalize(x, options.mean, options.std)}
    if options.erasing:
        normalized[f"erase {options.erasing:g} {options.erasing_mode}"] = erase
    return (pixels, normalized) if options.erase_after_mixing else (pixels | normalized, {})


def _chain(operations):
    def apply(rng, index, images):
        for operation in operations.values():
            images = operation(rng, index, images)
        return images

    return apply


def _image_rngs(rng, stream, index):
    """Returns a random key per image, from its index in the global batch."""
    stream_rng = jax.random.fold_in(rng, stream)
    return jax.vmap(lambda i: jax.random.fold_in(stream_rng, i))(index)


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
    """Converts pixels from 0 to 255 to `(pixel / 255 - mean) / std`, per channel."""
    mean, std = (jnp.asarray(x, jnp.float32)[None, None, None, :] for x in (mean, std))
    return (images.astype(jnp.float32) / 255 - mean) / std
