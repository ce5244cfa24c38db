"""Prepares a data set for training, once, and reports what it contains.

    python -m structinit_jax.prepare --name=cifar10
    python -m structinit_jax.prepare --name=folder --data_dir=DIR

For digits, fashion_mnist, tiny_imagenet, image folders and data sets of your own, this only prints
the report. Data sets prepared as tfrecord are converted to array_record. All others are downloaded
and prepared by TFDS's own builder; only this needs TensorFlow (`pip install '.[prepare]'`).
"""

# isort: split
import argparse
import importlib.util
import json
import os
import re
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image

from structinit_jax.data.builders import ARRAY_RECORD, OWN_BUILDERS, explain_damage, find_builder
from structinit_jax.data.datasets import FILE_SETS, open_dataset
from structinit_jax.data.source import Dataset, Folder, ImageSource, expand_user
from structinit_jax.errors import InputError, is_reference, require

MAX_SHOWN_CLASSES = 10
MAX_AVERAGED = 1000  # images, which fixes mean and deviation to about 0.01


def prepare(name: str, data_dir: Folder = None, manual_dir: Folder = None) -> None:
    """Prepares a data set so that `open_dataset` can open it.

    `name` and `data_dir` are those of `open_dataset`; `manual_dir` holds archives downloaded by
    hand.

    Raises:
      InputError: The name is unknown, or TensorFlow or an archive is missing.
    """
    if name in FILE_SETS or is_reference(name):
        return
    builder = find_builder(name, expand_user(data_dir))
    path = builder.data_path
    if path.exists():
        with explain_damage(name, path):
            builder = tfds.builder_from_directory(path)
        if builder.info.available_file_formats() == {tfds.core.FileFormat.TFRECORD}:
            print(f"Converting {path} to array_record (once).", flush=True)
            with explain_damage(name, path):
                convert(builder)
    elif name not in OWN_BUILDERS:
        if importlib.util.find_spec("tensorflow") is None:
            raise InputError(
                f"config.data.name={name!r}: TFDS needs TensorFlow to prepare this data set."
                " Install it, here or on another machine:\n  pip install '.[prepare]'\n"
                "Training does not need it."
            )
        config = tfds.download.DownloadConfig(manual_dir=expand_user(manual_dir))
        try:
            builder.download_and_prepare(file_format="array_record", download_config=config)
        except Exception as error:  # TensorFlow's errors have no common type
            by_hand = getattr(builder, "MANUAL_DOWNLOAD_INSTRUCTIONS", None)
            raise InputError(
                f"config.data.name={name!r} cannot be prepared: {type(error).__name__}: {error}."
                + (f" Pass --manual_dir=DIR. {by_hand}" if by_hand else "")
            ) from error


def convert(builder: tfds.core.DatasetBuilder) -> None:
    """Copies the serialized examples of a tfrecord data set into array_record files next to it.

    dataset_info.json names the new files only when all are written, so an interrupted conversion
    is repeated.
    """
    folder = Path(builder.data_path)
    adapter = tfds.core.file_adapters.ADAPTER_FOR_FORMAT[ARRAY_RECORD]
    for split in builder.info.splits.values():
        for name, count in zip(sorted(split.filenames), split.shard_lengths, strict=True):
            target = folder / name.replace(".tfrecord-", f".{ARRAY_RECORD.file_suffix}-")
            adapter.write_examples(target, enumerate(read_tfrecord(folder / name)))
            written = adapter.num_examples(target) if count else 0
            if written != count:
                raise ValueError(f"{name} holds {written:,} examples, {count:,} are expected")
    path = folder / "dataset_info.json"
    info = json.loads(path.read_text()) | {"alternativeFileFormats": [ARRAY_RECORD.value]}
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(info, indent=2))
    os.replace(partial, path)


def read_tfrecord(path: Path) -> Iterator[bytes]:
    """Yields the records of a tfrecord file; `ValueError` if it ends within one.

    A record is stored as its length, a checksum (CRC-32C, not verified), the bytes and a checksum.
    """
    with path.open("rb") as file:
        while header := file.read(12):
            length = struct.unpack("<Q", header[:8])[0] if len(header) == 12 else 0
            content = file.read(length + 4)
            if len(header) < 12 or len(content) < length + 4:
                raise ValueError(f"{path.name} ends within a record")
            yield content[:length]


def describe_split(source: ImageSource, num_classes: int, num_checked: int) -> list[str]:
    """Decodes `num_checked` evenly spaced examples, or all if it is 0.

    Returns:
      Lines to print: classes, image sizes, mean and standard deviation of the pixels as
      `config.data.mean` and `std` take them, invalid labels, and every image that cannot be
      decoded.
    """
    checked = source.evenly_spaced(num_checked or len(source))
    good, problems = checked.split_bad_images()
    extent = "all" if len(checked) == len(source) else f"{len(checked):,} evenly spaced ones"
    lines = [f"{len(source):,} examples; checked {extent}"]
    if len(good):
        sizes = np.array([image.size for image in good.images()])
        labels = good.labels()
        known = (labels >= 0) & (labels < num_classes)
        counts = np.bincount(labels[known], minlength=num_classes)
        low, high = sizes.min(axis=0), sizes.max(axis=0)
        mean, std = mean_and_std(good.evenly_spaced(MAX_AVERAGED))
        lines += [
            f"{np.count_nonzero(counts)} of {num_classes} classes, {counts.min():,} to"
            f" {counts.max():,} examples of each",
            f"{low[0]} to {high[0]} pixels high, {low[1]} to {high[1]} wide",
            f"pixels: mean {mean}, std {std}",
        ]
        if others := np.unique(labels[~known & (labels != -1)]).tolist():  # -1 stands for no label
            lines.append(f"bad: labels {others[:10]}, expected 0 to {num_classes - 1}")
    return lines + [f"bad: {problem}" for problem in problems]


def mean_and_std(source: ImageSource) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns mean and standard deviation by channel, of pixels scaled to [0, 1].

    Every image counts as much as any other. Histograms take no memory besides the pixels.
    """
    levels, moments = np.arange(256) / 255, []
    for image in source.images():
        pixels = image.decode()
        picture = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
        counts = np.reshape(picture.histogram(), (-1, 256)) / (picture.width * picture.height)
        moments.append([counts @ levels, counts @ levels**2])
    mean, square = np.mean(moments, axis=0)
    return tuple(mean.round(3).tolist()), tuple(np.sqrt(square - mean**2).round(3).tolist())


def report(dataset: Dataset, num_checked: int) -> None:
    """Prints the contents of a data set; for `num_checked` see `describe_split`."""
    names = dataset.class_names
    shown = ", ".join(names[:MAX_SHOWN_CLASSES]) + (", …" if len(names) > MAX_SHOWN_CLASSES else "")
    channels = dataset.info.image_shape[-1]
    print(f"{dataset.name}: {len(names)} classes ({shown}), {channels} channels")
    for split, size in dataset.info.num_examples.items():
        if size:
            for line in describe_split(dataset.split(split), len(names), num_checked):
                print(f"  {split}: {line}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Prepares a data set and prints a report."""
    parser = argparse.ArgumentParser(
        prog="python -m structinit_jax.prepare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--name", required=True, help="TFDS name, 'folder', 'tiny_imagenet' or 'module:function'")
    add("--data_dir", help="folder of TFDS's data sets, or of the images ('folder')")
    add("--manual_dir", help="folder of archives that you downloaded by hand")
    text = "images to decode in each split (default: 1000); 0 for all"
    add("--check", type=int, default=1000, help=text)
    flags = parser.parse_args(argv)
    require("--check", flags.check, "0 (all images) or more", lambda x: x >= 0)
    prepare(flags.name, flags.data_dir, flags.manual_dir)
    report(open_dataset(flags.name, flags.data_dir, flags.manual_dir), flags.check)


def with_own_flags(message: str) -> str:
    """Replaces the config fields in a message with the flags of this command."""
    return re.sub(r"(--)?config\.data\.(name|data_dir|manual_dir)\b", r"--\2", message)


if __name__ == "__main__":
    try:
        main()
        sys.stdout.flush()
    except (InputError, OSError) as error:  # an OSError: nobody reads the output, or a full disk
        # At exit, Python would write the rest of the output again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # as of `| head`
            print(f"error: {with_own_flags(str(error))}", file=sys.stderr)
        sys.exit(2)
