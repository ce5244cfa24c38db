"""Draws the batch of a training step as the model sees it, after augmentation.

    python -m structinit_jax.show --config=configs/vit_t_digits.py --step=1 --out=batch.png

Steps are counted from 1, as in the log. To draw a batch of an existing run, pass --workdir=DIR
instead of --config. To see what a setting does, change it, for example --config.augment.mixup=0.8.
Of more than three channels, the first three are shown as red, green and blue.
"""

from collections.abc import Sequence

import jax
import numpy as np
from absl import flags
from matplotlib.figure import Figure
from ml_collections import ConfigDict

from structinit_jax import command_line
from structinit_jax import config as config_lib
from structinit_jax.command_line import FLAGS
from structinit_jax.data.loader import HostLoader
from structinit_jax.data.source import Dataset
from structinit_jax.errors import printable, require
from structinit_jax.rngs import step_rngs
from structinit_jax.training import build
from structinit_jax.training.sharding import make_mesh

MAX_IMAGES = 48
COLUMNS = 8
TILE = 1.1  # inches


def training_batch(config: ConfigDict, step: int) -> tuple[np.ndarray, np.ndarray, Dataset]:
    """Computes the augmented batch of training step `step`, counted from 1.

    Returns images with the normalization undone, uint8 [B, H, W, C], targets [B, classes], and the
    data set.
    """
    data = config.data
    config_lib.validate(config)
    dataset = build.open_data(config)
    source = build.open_split(config, dataset, "train_split")
    last = build.make_schedule(config, len(source)).num_steps
    require("--step", step, f"at most {last}, the last step", step <= last)
    mesh = make_mesh(devices=jax.local_devices()[:1])  # A batch of any size fits one device.
    loader = HostLoader(source, mesh, build.make_crop(config))  # decodes only this batch
    batch = next(build.train_batches(config, loader, step - 1, step))
    augment = jax.jit(build.make_augment(config, mesh))
    rng = jax.jit(step_rngs)(np.uint32(config.seed), step - 1)[0]
    images, targets = augment(rng, batch["image"], batch["label"])
    pixels = 255 * (np.asarray(images) * np.asarray(data.std) + np.asarray(data.mean))
    images = np.clip(pixels.round(), 0, 255).astype(np.uint8)
    return images, np.asarray(targets), dataset


def describe_target(target: np.ndarray, smoothing: float, class_names: Sequence[str]) -> str:
    """Names the classes of a target without its label smoothing, such as '70% cat, 30% dog'."""
    weights = (target - smoothing / len(target)) / (1 - smoothing)
    classes = [label for label in np.argsort(-weights, kind="stable")[:2] if weights[label] > 0.005]
    if len(classes) == 1:
        return class_names[classes[0]]
    return ", ".join(f"{weights[label]:.0%} {class_names[label]}" for label in classes)


def draw(images: np.ndarray, captions: Sequence[str]) -> Figure:
    """Draws images, uint8 [n, H, W, C], in rows of eight with captions above them.

    The first three channels are shown as colors or, if there are fewer, the first one as gray.
    """
    images = images[..., : 3 if images.shape[-1] >= 3 else 1]
    rows = -(-len(images) // COLUMNS)
    figure = Figure(figsize=(COLUMNS * TILE, rows * TILE), layout="tight")
    for place, (image, caption) in enumerate(zip(images, captions, strict=True), 1):
        axis = figure.add_subplot(rows, COLUMNS, place)
        axis.set_axis_off()
        axis.imshow(image, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
        # Class names can be folder names, which are not always valid text.
        axis.set_title(printable(caption)[:24], fontsize=5, parse_math=False)
    return figure


def define_flags() -> None:
    """Defines the flags specific to this command."""
    flags.DEFINE_integer("step", 1, "Training step, counted from 1.", 1, 10**9 - 1)


def main(overrides: command_line.Overrides) -> None:
    """Draws up to 48 images of the batch with their targets."""
    config = command_line.read_config(overrides)
    path = command_line.out_path("batch.png")
    if path.suffix.lower() != ".png":  # a folder
        path /= "batch.png"
    step = FLAGS.step
    images, targets, dataset = training_batch(config, step)
    captions = [
        describe_target(target, config.label_smoothing, dataset.class_names)
        for target in targets[:MAX_IMAGES]
    ]
    figure = draw(images[:MAX_IMAGES], captions)
    with command_line.writing_out(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png", dpi=150)
    shown = f"{len(captions)} of the {len(images)} images of step {step}"
    print(f"wrote {path}: {shown}, from {dataset.name}")


if __name__ == "__main__":
    command_line.run(main, define_flags, shared=["config", "workdir", "out", "trust_workdir"])
