"""Data augmentation that runs on the device, inside the jitted training step.

`make_augment(AugmentOptions(...))` returns the augmentation of a whole training recipe as one pure
function. The modules hold the individual operations, which follow timm, torchvision and Pillow:
`transforms` (crops, flips, warps and colors), `rand_augment` and `mix` (mixup, cutmix and erasing).
"""

from structinit_jax.augment.pipeline import (
    Augment,
    AugmentConfig,
    AugmentOptions,
    make_augment,
    normalize,
)

__all__ = ["Augment", "AugmentConfig", "AugmentOptions", "make_augment", "normalize"]
