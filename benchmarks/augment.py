"""Time of augmentation on the device at hand, for 1,024 images of 224², whole and by piece.

    python benchmarks/augment.py --out=augment.json

Each piece is jitted alone, so that the pieces need not sum to the whole, which fuses some of them.
On a CPU a smaller batch is timed and scaled to 1,024 images, as the first line says.
"""

import argparse
import json
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from structinit_jax.augment import AugmentOptions, enhance, make_augment, tables
from structinit_jax.augment.affine import affine_warp, rotation_matrices
from structinit_jax.augment.crop import random_flip, random_resized_crop
from structinit_jax.augment.erase import random_erasing
from structinit_jax.augment.mix import MixOptions, mix
from structinit_jax.augment.rand_augment import parse, rand_augment

IMAGES = 1024
RAND_AUGMENT = "rand-m9-mstd0.5-inc1"
RECIPE = AugmentOptions(
    num_classes=1000,
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
    flip=0.5,
    rand_augment=RAND_AUGMENT,
    erasing=0.25,
    mixup=0.8,
    cutmix=1.0,
    label_smoothing=0.1,
)
FILL = (124, 116, 104)


def pieces(keys, images, labels, small) -> dict[str, tuple[Callable, tuple]]:
    """Functions and their arguments by name."""
    count, size = images.shape[:2]
    factor = jnp.linspace(0.1, 1.9, count)
    matrices = rotation_matrices(60 * factor - 60, size, size)
    bicubic = jnp.arange(count) % 2 == 0
    wanted = jnp.arange(count) % 15 == 0  # as often as operations are drawn
    lookups = jnp.broadcast_to(tables.invert(), (count, 3, 256)).astype(jnp.uint8)
    floats = images.astype(jnp.float32)
    targets = jax.nn.one_hot(labels, RECIPE.num_classes)
    policy, mixing = parse(RAND_AUGMENT), MixOptions(mixup=0.8, cutmix=1.0)
    return {
        "whole recipe": (make_augment(RECIPE), (keys[0], images, labels)),
        "RandAugment, 2 operations": (
            lambda k, x: rand_augment(k, x, policy, fill=FILL),
            (keys, images),
        ),
        "kernel: affine warp, 16 taps": (
            lambda x, m, b: affine_warp(x, m, b, FILL),
            (images, matrices, bicubic),
        ),
        "kernel: affine warp, 4 taps": (
            lambda x, m: affine_warp(x, m, None, FILL),
            (images, matrices),
        ),
        "kernel: histograms": (tables.channel_histograms, (images, wanted)),
        "kernel: tables": (tables.apply_tables, (images, lookups)),
        "kernel: colour": (enhance.color, (images, factor)),
        "kernel: sharpness": (enhance.sharpness, (images, factor)),
        "flip": (lambda k, x: random_flip(k, x, 0.5), (keys, images)),
        "resized crop from 32²": (
            lambda k, x: random_resized_crop(
                k, x, size, scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3), interpolation="random"
            ),
            (keys, small),
        ),
        "erasing": (lambda k, x: random_erasing(k, x, 0.25, "pixel"), (keys, floats)),
        "mixing": (lambda k, x, t: mix(k, x, t, mixing), (keys[0], floats, targets)),
    }


def measure(function: Callable, arguments: tuple, repeats: int) -> tuple[float, int]:
    """Median seconds of a warm call, and bytes of temporaries that the program asks for."""
    compiled = jax.jit(function).lower(*arguments).compile()
    jax.block_until_ready(compiled(*arguments))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds)), compiled.memory_analysis().temp_size_in_bytes


def main() -> None:
    """Prints the table and writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="augment.json")
    parser.add_argument("--batch", type=int, help="images timed; default 1024, on a CPU 32")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    on_cpu = jax.default_backend() == "cpu"
    batch = arguments.batch or (32 if on_cpu else IMAGES)
    device = jax.devices()[0].device_kind
    print(f"{device}: ms for {IMAGES} images of {arguments.size}², scaled from batches of {batch}")
    random = np.random.default_rng(0)
    images, small = (
        jnp.asarray(random.integers(0, 256, (batch, side, side, 3)).astype(np.uint8))
        for side in (arguments.size, 32)
    )
    labels = jnp.asarray(random.integers(0, 1000, batch).astype(np.int32))
    keys = jax.random.split(jax.random.key(0), batch)
    results = {"device": device, "batch": batch, "size": arguments.size}
    whole = None
    for name, (function, inputs) in pieces(keys, images, labels, small).items():
        seconds, temporary = measure(function, inputs, arguments.repeats)
        scaled = 1000 * seconds * IMAGES / batch
        whole = whole or scaled
        results[name] = {"ms": scaled, "share": scaled / whole, "temporary_bytes": temporary}
        print(
            f"  {name:30} {scaled:10.1f} ms  {100 * scaled / whole:6.1f} %  "
            f"{temporary / batch / 1e6:6.2f} MB of temporaries an image",
            flush=True,
        )
    with open(arguments.out, "w") as file:
        json.dump(results, file, indent=2)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
