"""timm's random draws: magnitudes, operations, λ, boxes and erased areas."""

import random

import numpy as np
import torch
from PIL import Image
from timm.data import auto_augment, mixup, random_erasing

SAMPLES = 4000
STRINGS = ("rand-m9-mstd0.5-inc1", "rand-m7-mstd3-n3")


def level_arguments():
    """Arguments without noise `[increasing, magnitude 0…10, operation, sign]`; 0 for none."""
    random_random = random.random
    arguments = np.zeros((2, 11, 15, 2))
    sets = (auto_augment._RAND_TRANSFORMS, auto_augment._RAND_INCREASING_TRANSFORMS)
    for increasing, names in enumerate(sets):
        for index, name in enumerate(names):
            function = auto_augment.LEVEL_TO_ARG[name]
            for magnitude in range(11):
                for sign in range(2):
                    auto_augment.random.random = lambda sign=sign: float(sign)
                    if function is not None:
                        value = function(magnitude, {})[0]
                        arguments[increasing, magnitude, index, sign] = value
    auto_augment.random.random = random_random
    return arguments


def drawn_operations(string):
    """Operations (15: none) and their arguments, each `[samples, n]`."""
    seen = []
    transform = auto_augment.rand_augment_transform(string)

    def spy(index):
        def function(img, *args, **_):
            seen[-1].append((index, args[0] if args else 0.0))
            return img

        return function

    for index, operation in enumerate(transform.ops):
        operation.aug_fn = spy(index)
    image = Image.new("RGB", (4, 4))
    operations = np.full((SAMPLES, transform.num_layers), 15, np.int8)
    arguments = np.zeros((SAMPLES, transform.num_layers), np.float32)
    for row in range(SAMPLES):
        seen.append([])
        transform(image)
        # Skipped operations are not observed, so the applied ones come first.
        for place, (index, argument) in enumerate(seen[-1]):
            operations[row, place], arguments[row, place] = index, argument
    return operations, arguments


def mixes(height, width, **options):
    """λ, whether cutmix was used, and the box, for draws of timm's Mixup `[samples, 6]`."""
    mixer = mixup.Mixup(mode="batch", num_classes=2, **options)
    rows = np.zeros((SAMPLES, 6), np.float32)
    for row in rows:
        lam, use_cutmix = mixer._params_per_batch()
        box = (0, 0, 0, 0)
        if use_cutmix and lam != 1:
            box, lam = mixup.cutmix_bbox_and_lam((1, 3, height, width), lam)
        row[:] = (lam, use_cutmix, *box)
    return rows


def erased(height, width):
    """Top, left, height and width of erased boxes `[samples, 4]`; zeros if none was erased."""
    eraser = random_erasing.RandomErasing(probability=0.25, mode="const", device="cpu")
    rows = np.zeros((SAMPLES, 4), np.int16)
    for row in rows:
        gone = (eraser(torch.ones(1, height, width))[0] == 0).numpy()
        if gone.any():
            y, x = np.flatnonzero(gone.any(1)), np.flatnonzero(gone.any(0))
            row[:] = (y[0], x[0], len(y), len(x))
    return rows


def make():
    """All arrays by name."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    arrays = {"levels": level_arguments().astype(np.float32)}
    for index, string in enumerate(STRINGS):
        operations, arguments = drawn_operations(string)
        arrays[f"operations_{index}"], arrays[f"arguments_{index}"] = operations, arguments
    both = dict(mixup_alpha=0.8, cutmix_alpha=1.0, prob=0.9, switch_prob=0.4)
    arrays["mix_both"] = mixes(24, 40, **both)
    arrays["mix_mixup"] = mixes(24, 40, mixup_alpha=0.2)[:, :1]
    arrays["erased"] = erased(24, 40)
    return arrays | dict(strings=np.array(STRINGS))
