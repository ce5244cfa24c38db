"""Measures augmentation of 1,024 images of 224² on the current device, whole and by operation.

    python benchmarks/augment.py --out=augment.json

Each operation is jitted separately. Kernels are timed on all images, whereas in a recipe each runs
only on the images for which it is drawn. The last line is the whole training step of ViT-B/16,
which includes the recipe. On a CPU the times are measured on smaller batches and scaled to 1,024
images.
"""

import argparse
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from structinit_jax.augment import AugmentOptions, color, make_augment, normalize
from structinit_jax.augment.affine import affine_warp, rotation_matrix
from structinit_jax.augment.crop import random_flip, random_resized_crop
from structinit_jax.augment.erase import random_erasing
from structinit_jax.augment.mix import mix
from structinit_jax.augment.rand_augment import parse, rand_augment
from structinit_jax.command_line import load_config
from structinit_jax.data.info import CATALOG
from structinit_jax.training.setup import initialize, set_up

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


def operations(rngs, images, labels, small) -> dict[str, tuple[Callable, tuple]]:
    """Functions and their arguments by name."""
    count, size = images.shape[:2]
    factor = jnp.linspace(0.1, 1.9, count)
    matrices = jax.vmap(lambda degrees: rotation_matrix(degrees, size, size))(60 * factor - 60)
    planes = images.transpose(0, 3, 1, 2)
    luts = jnp.broadcast_to(255 - color.VALUES, (count, 3, 256)).astype(jnp.uint8)
    floats = images.astype(jnp.float32)
    targets = jax.nn.one_hot(labels, RECIPE.num_classes)
    policy = parse(RAND_AUGMENT)
    resized_crop = functools.partial(
        random_resized_crop,
        size=size,
        scale=RECIPE.crop_scale,
        ratio=RECIPE.crop_ratio,
        interpolation="random",
    )
    return {
        "whole recipe": (make_augment(RECIPE), (rngs[0], images, labels)),
        "RandAugment, 2 operations": (
            lambda k, x: rand_augment(k, x, policy, fill=FILL),
            (rngs, images),
        ),
        "kernel: bicubic warp": (
            jax.vmap(lambda x, m: affine_warp(x, m, True, FILL)),
            (planes, matrices),
        ),
        "kernel: bilinear warp": (
            jax.vmap(lambda x, m: affine_warp(x, m, False, FILL)),
            (planes, matrices),
        ),
        "kernel: lookup tables": (jax.vmap(color.apply_lut), (planes, luts)),
        "kernel: equalization": (jax.vmap(color.equalize), (planes,)),
        "kernel: color": (jax.vmap(color.adjust_saturation), (planes, factor)),
        "kernel: sharpness": (jax.vmap(color.adjust_sharpness), (planes, factor)),
        "flip": (jax.vmap(lambda k, x: random_flip(k, x, 0.5)), (rngs, images)),
        "resized crop from 32²": (jax.vmap(resized_crop), (rngs, small)),
        "normalization": (lambda x: normalize(x, RECIPE.mean, RECIPE.std), (images,)),
        "erasing": (lambda k, x: random_erasing(k, x, 0.25, "pixel"), (rngs, floats)),
        "mixing": (
            lambda k, x, t: mix(k, x, t, mixup=0.8, cutmix=1.0),
            (rngs[0], floats, targets),
        ),
    }


def measure_vit_b_step(batch: int, dtype: str, repeats: int) -> float:
    """Median seconds of the trainer's step of configs/vit_2025_imagenet.py on random images."""
    config = load_config("configs/vit_2025_imagenet.py:vit_base_patch16_224")
    config.update(batch_size=batch)
    config.model.dtype, config.augment.mix_group = dtype, 0
    info = CATALOG["imagenet2012"]
    config.attention_init = dict(name="default")
    setup = set_up(config, info, info.num_examples["train"])
    state = initialize(config, setup)
    shape = setup.abstract_batch["image"].shape
    data = {
        "image": np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8),
        "label": np.arange(batch, dtype=np.int32),
    }
    seconds = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        state, _ = jax.block_until_ready(setup.train_step(state, data))
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds[1:]))


def measure(function: Callable, arguments: tuple, repeats: int) -> tuple[float, int]:
    """Returns the median seconds of a warm call and the bytes of temporaries."""
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
    on_cpu = jax.default_backend() == "cpu"
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", help="JSON file for the results")
    parser.add_argument("--batch", type=int, default=64 if on_cpu else IMAGES, help="images")
    parser.add_argument("--vit_batch", type=int, default=8 if on_cpu else 128, help="of ViT-B/16")
    parser.add_argument("--size", type=int, default=224, help="height and width of the images")
    parser.add_argument(
        "--repeats", type=int, default=5, help="timed calls, of which the median counts"
    )
    flags = parser.parse_args()
    device = jax.devices()[0].device_kind
    print(f"{device}: ms for {IMAGES} images of {flags.size}², timed on batches of {flags.batch}")
    random = np.random.default_rng(0)
    images, small = (
        jnp.asarray(random.integers(0, 256, (flags.batch, side, side, 3)).astype(np.uint8))
        for side in (flags.size, 32)
    )
    labels = jnp.asarray(random.integers(0, 1000, flags.batch).astype(np.int32))
    rngs = jax.random.split(jax.random.key(0), flags.batch)
    times = {}
    for name, (function, inputs) in operations(rngs, images, labels, small).items():
        seconds, temporary = measure(function, inputs, flags.repeats)
        times[name] = 1000 * seconds * IMAGES / flags.batch
        print(
            f"  {name:26} {times[name]:10.1f} ms  {temporary / flags.batch / 1e6:6.2f} MB of "
            "temporaries an image",
            flush=True,
        )
    dtype = "float32" if on_cpu else "bfloat16"
    seconds = measure_vit_b_step(flags.vit_batch, dtype, flags.repeats)
    step = 1000 * seconds * IMAGES / flags.vit_batch
    share = times["whole recipe"] / step
    print(
        f"  ViT-B/16 step, {dtype:11} {step:10.1f} ms  on batches of {flags.vit_batch}; the "
        f"recipe is {100 * share:.1f} % of it"
    )
    if flags.out:
        results = {
            "device": device,
            "batch": flags.batch,
            "size": flags.size,
            f"ms_per_{IMAGES}_images": times,
            "vit_b_step": {"batch": flags.vit_batch, "dtype": dtype, "ms": step},
            "share_of_vit_b_step": share,
        }
        Path(flags.out).write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
