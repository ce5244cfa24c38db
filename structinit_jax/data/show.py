"""Draws a training batch as the model sees it, augmentation and all.

    python -m structinit_jax.data.show --config=configs/vit_t_digits.py --out=batch.png

With --config.augment.mixup=0.8 and the like it shows what a change of the recipe does.
"""

from pathlib import Path

import jax
import numpy as np
from absl import flags
from ml_collections import ConfigDict

from structinit_jax import command_line, evaluate
from structinit_jax import config as config_lib
from structinit_jax.augment import make_augment
from structinit_jax.data.loader import make_loader, split_augmentation
from structinit_jax.data.sample_sheet import COLUMNS, ROWS, draw_tiles
from structinit_jax.out_flag import OUT
from structinit_jax.training import mesh as mesh_lib
from structinit_jax.training.step import step_rngs

_STEP = flags.DEFINE_integer("step", 0, "Steps before the one whose batch is drawn.", lower_bound=0)


def training_batch(config: ConfigDict, step: int) -> tuple[np.ndarray, np.ndarray]:
    """The batch of the training step that follows `step` others.

    Returns:
      uint8 images [B, H, W, C], normalization undone, and targets [B, classes].
    """
    config_lib.validate(config)
    dataset = evaluate.open_data(config)
    source = dataset.split(config.data.train_split, "data.train_split", config.data.on_bad_image)
    options = config_lib.augment_options(config)
    augmentation = split_augmentation(options, dataset.info, len(source), config.seed)
    mesh = mesh_lib.make_mesh()
    loader = make_loader(
        source,
        dataset.info,
        mesh,
        image_size=augmentation.image_size,
        random_crop=augmentation.host_crop,
    )
    batches = loader.train_batches(
        batch_size=config.batch_size,
        seed=config.seed,
        start_step=step,
        num_steps=step + 1,
        repeats=config.data.repeats,
    )
    batch = next(batches)
    key = step_rngs(config.seed, step)[0]
    augment = jax.jit(make_augment(augmentation.on_device, mesh))
    images, targets = augment(key, batch["image"], batch["label"])
    pixels = 255 * (np.asarray(images) * np.asarray(config.data.std) + np.asarray(config.data.mean))
    return np.clip(pixels.round(), 0, 255).astype(np.uint8), np.asarray(targets)


def describe_target(target: np.ndarray, smoothing: float) -> str:
    """A target's classes without their share of the smoothing, such as '3: 0.7  8: 0.3'."""
    shares = (target - smoothing / len(target)) / (1 - smoothing)
    classes = [label for label in np.argsort(-shares, kind="stable")[:2] if shares[label] > 0.005]
    if len(classes) == 1:
        return str(classes[0])
    return "  ".join(f"{label}: {shares[label]:.2f}" for label in classes)


def main(config: ConfigDict) -> None:
    """Draws up to 48 images with their targets."""
    images, targets = training_batch(config, _STEP.value)
    number = min(COLUMNS * ROWS, len(images))
    captions = [describe_target(t, config.label_smoothing) for t in targets[:number]]
    path = Path(OUT.value or "batch.png")
    draw_tiles(list(images[:number]), captions).save(path)
    print(f"wrote {path}: {number} of the {len(images)} images of step {_STEP.value + 1}")


if __name__ == "__main__":
    command_line.run(main)
