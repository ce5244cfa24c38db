"""Prepares a data set for training, once, and tells what is in it.

    python -m structinit_jax.data.prepare --name=cifar10 --samples=sheet.png
    python -m structinit_jax.data.prepare --name=folder --data_dir=DIR

digits, fashion_mnist, tiny_imagenet and image folders need no preparation beyond their first use.
Sets prepared as tfrecord are converted, without TensorFlow. For the others TFDS's own builder
downloads and prepares, which needs TensorFlow (`pip install '.[prepare]'`); training never does.
"""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tensorflow_datasets as tfds

from structinit_jax.data import datasets
from structinit_jax.data.sample_sheet import draw_sheet
from structinit_jax.data.source import ImageSource
from structinit_jax.data.tfrecord import add_array_record
from structinit_jax.errors import InputError

SHOWN_CLASSES = 10


def prepare(name: str, data_dir: str | None = None, manual_dir: str | None = None) -> None:
    """Makes sure that `open_dataset` can open a set.

    Args:
      name: TFDS name, 'folder' or 'tiny_imagenet'.
      data_dir: As in `open_dataset`.
      manual_dir: Folder with archives that have to be fetched by hand.

    Raises:
      InputError: The name is unknown, TensorFlow is needed and missing, or the archives are.
    """
    if name in datasets.FILE_SETS:
        return
    builder = datasets.find_builder(name, data_dir)
    if not builder.data_path.exists():
        if name not in datasets.OWN_SETS:
            _run_stock_builder(builder, manual_dir)
        return
    builder = tfds.builder_from_directory(builder.data_path)
    if builder.info.available_file_formats() == {tfds.core.FileFormat.TFRECORD}:
        print(f"Converting {builder.data_path} to array_record (once).", flush=True)
        add_array_record(builder)


def _run_stock_builder(builder: tfds.core.DatasetBuilder, manual_dir: str | None) -> None:
    if importlib.util.find_spec("tensorflow") is None:
        raise InputError(
            f"data.name={builder.name!r}: TFDS needs TensorFlow to prepare this set, and it is not"
            " installed. Install it for this command only, here or on another machine:\n"
            "  pip install '.[prepare]'\nTraining does not use it, and reads the prepared folder"
            " wherever it was made."
        )
    config = tfds.download.DownloadConfig(manual_dir=manual_dir)
    try:
        builder.download_and_prepare(file_format="array_record", download_config=config)
    except Exception as error:  # of every kind: TensorFlow's are neither OSError nor ValueError
        by_hand = getattr(builder, "MANUAL_DOWNLOAD_INSTRUCTIONS", None)
        raise InputError(
            f"data.name={builder.name!r} cannot be prepared: {type(error).__name__}: {error}."
            + (f" Pass --manual_dir=DIR. {by_hand}" if by_hand else "")
        ) from error


def describe_split(source: ImageSource, num_classes: int, num_checked: int) -> list[str]:
    """Decodes examples at even distances and says what they are.

    Args:
      source: A split.
      num_classes: Number of labels.
      num_checked: How many examples to decode; 0 for all.

    Returns:
      Lines to print: classes, shapes, bytes and every image that cannot be decoded.
    """
    number = min(num_checked or len(source), len(source))
    chosen = np.zeros(len(source), bool)
    chosen[np.linspace(0, len(source) - 1, number).round().astype(int)] = True
    good, problems = source.select(chosen).split_bad_images()
    every = "all" if number == len(source) else f"{number:,} of them at even distances"
    lines = [f"{len(source):,} examples; checked {every}"]
    if len(good):
        sizes = np.array([(*image.size, image.num_bytes) for image, _ in good.open_all()])
        counts = np.bincount(good.column("label"), minlength=num_classes)
        low, high = sizes.min(axis=0), sizes.max(axis=0)
        lines += [
            f"{np.count_nonzero(counts)} of {num_classes} classes, {counts.min():,} to"
            f" {counts.max():,} of each",
            f"{low[0]} to {high[0]} pixels high, {low[1]} to {high[1]} wide",
            f"{sizes[:, 2].mean():,.0f} bytes an image",
        ]
    return lines + [f"bad: {problem}" for problem in problems]


def report(dataset: datasets.Dataset, num_checked: int) -> None:
    """Prints what a set holds; arguments as in `describe_split`."""
    names = dataset.class_names
    shown = ", ".join(names[:SHOWN_CLASSES]) + (", …" if len(names) > SHOWN_CLASSES else "")
    channels = dataset.info.image_shape[-1]
    print(f"{dataset.name}: {len(names)} classes ({shown}), {channels} channels")
    for split in dataset.info.num_examples:
        if dataset.info.num_examples[split]:
            for line in describe_split(dataset.split(split), len(names), num_checked):
                print(f"  {split}: {line}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Prepares, checks, prints and draws."""
    parser = argparse.ArgumentParser(
        prog="python -m structinit_jax.data.prepare", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--name", required=True, help="TFDS name, 'folder' or 'tiny_imagenet'")
    parser.add_argument(
        "--data_dir",
        help="where TFDS sets lie; the images' own folder for 'folder' and 'tiny_imagenet'",
    )
    parser.add_argument("--manual_dir", help="archives that have to be fetched by hand")
    parser.add_argument("--samples", help="PNG file to draw examples of the first split into")
    parser.add_argument(
        "--check", type=int, default=1000, help="images to decode in each split; 0 for all"
    )
    flags = parser.parse_args(argv)
    prepare(flags.name, flags.data_dir, flags.manual_dir)
    dataset = datasets.open_dataset(flags.name, flags.data_dir, flags.manual_dir)
    report(dataset, flags.check)
    if flags.samples:
        first = next(split for split, size in dataset.info.num_examples.items() if size)
        sheet = draw_sheet(dataset.split(first), dataset.class_names)
        try:
            sheet.save(Path(flags.samples), "PNG")
        except OSError as error:
            raise InputError(f"--samples={flags.samples}: cannot be written: {error}.") from error


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(f"error: {error}")
