"""Augmentation inside the jitted step: pure functions of keys and uint8 batches, on JAX alone.

`make_augment(AugmentOptions(...))` is a recipe's whole augmentation; the modules hold its pieces.
"""

from structinit_jax.augment.options import AugmentOptions
from structinit_jax.augment.pipeline import Augment, make_augment, normalize

__all__ = ["Augment", "AugmentOptions", "make_augment", "normalize"]
