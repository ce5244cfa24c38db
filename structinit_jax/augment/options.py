"""What a training recipe says about augmentation, and the checks of it."""

import dataclasses
import math

from structinit_jax.augment.erase import MODES
from structinit_jax.augment.rand_augment import parse
from structinit_jax.errors import InputError

CROPS = ("none", "pad", "resized")
INTERPOLATIONS = ("bilinear", "bicubic", "random")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AugmentOptions:
    """A recipe. By default images are normalised and nothing else happens to them.

    Attributes:
      num_classes: columns of the targets.
      mean: of pixels scaled to 0…1, per channel.
      std: likewise.
      image_size: sides of what the crop 'resized' returns; other crops keep the size.
      crop: 'none', 'pad' (pad and cut the size out again), 'resized' (a random box, resized).
      crop_padding: pixels on each side for 'pad'.
      crop_scale: from which to which share of the area 'resized' cuts.
      crop_ratio: from which to which width over height.
      interpolation: of 'resized' and of RandAugment's warps: 'bilinear', 'bicubic', or 'random',
        which tosses a coin each time.
      flip: probability of a mirrored image.
      rand_augment: a string of timm's such as 'rand-m9-mstd0.5-inc1'; empty: none.
      color_jitter: strengths of brightness, contrast, saturation and, as a fourth number if there
        is one, hue (up to 0.5). Without effect where there is RandAugment, as in timm.
      erasing: probability of an erased box.
      erasing_mode: 'pixel', 'rand' or 'const'.
      erase_after_mixing: the order of timm's training script with its prefetcher (its default);
        DeiT's, and timm's without, is to erase first.
      mixup: α of mixup's λ; 0: no mixup.
      cutmix: α of cutmix's λ; 0: no cutmix.
      mix_probability: that a group is mixed.
      mix_switch: that it is cutmix, where both are on.
      mix_group: images that share one λ: 0 the whole batch, 1 none, N every N in turn. Reference
        programs draw for each process's own batch.
      label_smoothing: share of a target that is spread over all classes.

    Raises:
      InputError: a field is unusable.
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
        for field in ("flip", "erasing", "mix_probability", "mix_switch"):
            self._require(0 <= getattr(self, field) <= 1, field, "a probability in [0, 1]")
        self._require(0 <= self.label_smoothing < 1, "label_smoothing", "in [0, 1)")
        for field in ("mixup", "cutmix", "mix_group", "crop_padding"):
            self._require(getattr(self, field) >= 0, field, "zero or more")
        self._require(self.num_classes >= 1, "num_classes", "a positive whole number")
        self._require(
            len(self.std) == len(self.mean) and min(self.std) > 0,
            "std",
            f"one positive number for each of the {len(self.mean)} of augment.mean",
        )
        for field, choices in (
            ("crop", CROPS),
            ("interpolation", INTERPOLATIONS),
            ("erasing_mode", MODES),
        ):
            self._require(getattr(self, field) in choices, field, f"one of {', '.join(choices)}")
        for field, limit in (("crop_scale", 1.0), ("crop_ratio", math.inf)):
            pair = getattr(self, field)
            ordered = len(pair) == 2 and 0 < pair[0] <= pair[1] <= limit
            self._require(ordered, field, f"two numbers, the lower first, above 0, up to {limit}")
        self._require(
            self.crop != "resized" or self.image_size >= 1,
            "image_size",
            "the size of the images that augment.crop='resized' returns",
        )
        self._require(
            len(self.color_jitter) in (3, 4)
            and min(self.color_jitter) >= 0
            and max(self.color_jitter[3:], default=0) <= 0.5,
            "color_jitter",
            "three numbers of zero or more (brightness, contrast, saturation), or four with that "
            "of hue, at most 0.5",
        )
        if self.rand_augment:
            parse(self.rand_augment)
        self._require(
            len(self.mean) in (1, 3) or not (self.rand_augment or any(self.color_jitter)),
            "mean",
            "of one or three channels for augment.rand_augment and augment.color_jitter",
        )

    def _require(self, holds: bool, field: str, need: str) -> None:
        if not holds:
            value = getattr(self, field)
            raise InputError(f"augment.{field}={value!r} does not fit: it needs to be {need}")
