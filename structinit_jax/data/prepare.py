"""Prepares a data set for training, once, and reports what it contains.

    python -m structinit_jax.data.prepare --name=cifar10 --samples=samples.png
    python -m structinit_jax.data.prepare --name=folder --data_dir=DIR

For digits, fashion_mnist, tiny_imagenet and image folders, this only prints the report. Data sets
prepared as tfrecord are converted to array_record. All others are downloaded and prepared by TFDS's
own builder; only this needs TensorFlow (`pip install '.[prepare]'`).
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
from matplotlib import font_manager
from PIL import Image, ImageDraw, ImageFont

from structinit_jax.data.builders import ARRAY_RECORD, OWN_BUILDERS, find_builder, read_prepared
from structinit_jax.data.crops import resize_and_center_crop
from structinit_jax.data.datasets import (
    FILE_SETS,
    OWN_SET,
    Dataset,
    Folder,
    ImageSource,
    expand_user,
    open_dataset,
)
from structinit_jax.errors import InputError

AGAIN = "Prepare or copy the data set again."
MAX_SHOWN_CLASSES = 10
MAX_AVERAGED = 1000  # images, which fixes mean and deviation to about 0.01
MAX_TILES, COLUMNS = 48, 8
TILE, CAPTION, MARGIN = 112, 16, 4  # pixels
FONT_SIZE = 10


def prepare(name: str, data_dir: Folder = None, manual_dir: Folder = None) -> None:
    """Prepares a data set so that `open_dataset` can open it.

    `name` and `data_dir` are those of `open_dataset`; `manual_dir` holds archives downloaded by
    hand.

    Raises:
      InputError: The name is unknown, or TensorFlow or an archive is missing.
    """
    if name in FILE_SETS or OWN_SET.fullmatch(name):
        return
    builder = find_builder(name, expand_user(data_dir))
    if builder.data_path.exists():
        builder = read_prepared(name, builder.data_path)
        if builder.info.available_file_formats() == {tfds.core.FileFormat.TFRECORD}:
            print(f"Converting {builder.data_path} to array_record (once).", flush=True)
            _add_array_record(builder)
    elif name not in OWN_BUILDERS:
        _run_stock_builder(builder, expand_user(manual_dir))


def _run_stock_builder(builder, manual_dir):
    if importlib.util.find_spec("tensorflow") is None:
        raise InputError(
            f"config.data.name={builder.name!r}: TFDS needs TensorFlow to prepare this data set."
            " Install it, here or on another machine:\n  pip install '.[prepare]'\n"
            "Training does not need it."
        )
    config = tfds.download.DownloadConfig(manual_dir=manual_dir)
    try:
        builder.download_and_prepare(file_format="array_record", download_config=config)
    except Exception as error:  # TensorFlow's errors have no common type
        by_hand = getattr(builder, "MANUAL_DOWNLOAD_INSTRUCTIONS", None)
        raise InputError(
            f"config.data.name={builder.name!r} cannot be prepared: {type(error).__name__}:"
            f" {error}." + (f" Pass --manual_dir=DIR. {by_hand}" if by_hand else "")
        ) from error


def _add_array_record(builder):
    """Copies the serialized examples of a tfrecord data set into array_record files next to it.

    dataset_info.json names the new files only when all are written, so an interrupted conversion
    is repeated.
    """
    folder = Path(builder.data_path)
    adapter = tfds.core.file_adapters.ADAPTER_FOR_FORMAT[ARRAY_RECORD]
    try:
        for split in builder.info.splits.values():
            for name, count in zip(sorted(split.filenames), split.shard_lengths, strict=True):
                source = folder / name
                target = folder / name.replace(".tfrecord-", f".{ARRAY_RECORD.file_suffix}-")
                adapter.write_examples(target, enumerate(read_tfrecord(source)))
                written = adapter.num_examples(target) if count else 0
                if written != count:
                    raise InputError(
                        f"{source}: holds {written:,} examples, {count:,} are expected. {AGAIN}"
                    )
        info_path = folder / "dataset_info.json"
        info = json.loads(info_path.read_text())
        info["alternativeFileFormats"] = [ARRAY_RECORD.value]
        partial = info_path.with_suffix(".partial")
        partial.write_text(json.dumps(info, indent=2))
        os.replace(partial, info_path)
    except OSError as error:
        raise InputError(f"{folder}: cannot be converted to array_record: {error}.") from error


def read_tfrecord(path: Path) -> Iterator[bytes]:
    """Yields the records of a tfrecord file.

    A record is stored as its length, a checksum (CRC-32C, not verified), the bytes and a checksum.

    Raises:
      InputError: The file ends within a record.
    """
    with path.open("rb") as file:
        while header := file.read(12):
            length = struct.unpack("<Q", header[:8])[0] if len(header) == 12 else 0
            # Compared with the file first: a damaged length must not be allocated.
            remaining = os.fstat(file.fileno()).st_size - file.tell()
            if len(header) < 12 or length + 4 > remaining:
                raise InputError(f"{path}: ends within a record. {AGAIN}")
            yield file.read(length + 4)[:length]


def describe_split(source: ImageSource, num_classes: int, num_checked: int) -> list[str]:
    """Decodes `num_checked` evenly spaced examples, or all if it is 0.

    Returns:
      Lines to print: classes, image sizes, bytes, mean and standard deviation of the pixels as
      `config.data.mean` and `std` take them, invalid labels, and every image that cannot be
      decoded.
    """
    checked = _evenly_spaced(source, num_checked or len(source))
    good, problems = checked.split_bad_images()
    extent = "all" if len(checked) == len(source) else f"{len(checked):,} evenly spaced ones"
    lines = [f"{len(source):,} examples; checked {extent}"]
    if len(good):
        sizes = np.array([(*image.size, image.num_bytes) for image in good.images()])
        labels = good.labels()
        known = (labels >= 0) & (labels < num_classes)
        counts = np.bincount(labels[known], minlength=num_classes)
        low, high = sizes.min(axis=0), sizes.max(axis=0)
        lines += [
            f"{np.count_nonzero(counts)} of {num_classes} classes, {counts.min():,} to"
            f" {counts.max():,} examples of each",
            f"{low[0]} to {high[0]} pixels high, {low[1]} to {high[1]} wide",
            f"{sizes[:, 2].mean():,.0f} bytes per image",
            "pixels: mean {}, std {}".format(*_mean_and_std(_evenly_spaced(good, MAX_AVERAGED))),
        ]
        if others := np.unique(labels[~known & (labels != -1)]).tolist():  # -1 stands for no label
            lines.append(f"bad: labels {others[:10]}, expected 0 to {num_classes - 1}")
    return lines + [f"bad: {problem}" for problem in problems]


def _mean_and_std(source):
    """By channel, of pixels scaled to [0, 1]; every image counts as much as any other."""
    moments = []
    for image in source.images():
        pixels = image.decode() / 255
        moments.append([pixels.mean(axis=(0, 1)), np.square(pixels).mean(axis=(0, 1))])
    mean, square = np.mean(moments, axis=0)
    return tuple(mean.round(3).tolist()), tuple(np.sqrt(square - mean**2).round(3).tolist())


def _evenly_spaced(source, most):
    indices = np.linspace(0, len(source) - 1, min(most, len(source))).round().astype(int)
    return source.select(np.isin(np.arange(len(source)), indices))


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


def draw_samples(source: ImageSource, class_names: Sequence[str]) -> Image.Image:
    """Draws up to 48 evenly spaced examples of a split with the names of their classes.

    Images that cannot be decoded are left out.

    Raises:
      InputError: None of them can be decoded, or a label is out of range.
    """
    good, problems = _evenly_spaced(source, MAX_TILES).split_bad_images()
    if not len(good):
        raise InputError(
            f"--samples: none of {len(problems)} evenly spaced images can be decoded: replace "
            "those reported as bad, or leave out --samples"
        )
    images, labels = zip(*good.read(range(len(good))), strict=True)
    return draw_tiles(
        [image.decode() for image in images], [class_names[label] for label in labels]
    )


def draw_tiles(images: list[np.ndarray], captions: list[str]) -> Image.Image:
    """Draws images, uint8 [h, w, 1 or 3], cropped to squares, in rows of eight.

    Tiny images are enlarged to visible pixels. Captions are written below the images and shortened
    to fit.
    """
    rows = -(-len(images) // COLUMNS)
    pitch = (TILE + MARGIN, TILE + CAPTION + MARGIN)
    sheet = Image.new("RGB", (COLUMNS * pitch[0] + MARGIN, rows * pitch[1] + MARGIN), "white")
    draw = ImageDraw.Draw(sheet)
    # PIL's own font has no accents.
    draw.font = ImageFont.truetype(font_manager.findfont("DejaVu Sans"), FONT_SIZE)
    for number, (image, caption) in enumerate(zip(images, captions, strict=True)):
        left = MARGIN + number % COLUMNS * pitch[0]
        top = MARGIN + number // COLUMNS * pitch[1]
        side = min(image.shape[:2])
        tile = resize_and_center_crop(image, side if side <= TILE // 2 else TILE)
        picture = Image.fromarray(np.repeat(tile, 3 // tile.shape[-1], axis=-1))
        sheet.paste(picture.resize((TILE, TILE), Image.Resampling.NEAREST), (left, top))
        while draw.textlength(caption) > TILE:
            caption = caption[:-1]
        draw.text((left, top + TILE + 1), caption, fill="black")
    return sheet


def save(image: Image.Image, path: Path, flag: str) -> None:
    """Writes a picture to the path of a flag; raises `InputError` if that fails."""
    try:
        image.save(path)
    except (OSError, ValueError) as error:  # a ValueError is about the suffix
        raise InputError(
            f"--{flag}={path} cannot be written ({error}): name a .png file in a folder that exists"
        ) from error


def with_own_flags(message: str) -> str:
    """Replaces the config fields in a message by the flags of this command."""
    return re.sub(r"(--)?config\.data\.(name|data_dir|manual_dir)\b", r"--\2", message)


def main(argv: Sequence[str] | None = None) -> None:
    """Prepares a data set, prints a report and draws examples."""
    command = "python -m structinit_jax.data.prepare"
    parser = argparse.ArgumentParser(
        prog=command,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--name", required=True, help="TFDS name, 'folder', 'tiny_imagenet' or 'module:function'")
    add("--data_dir", help="folder of TFDS's data sets, or of the images ('folder')")
    add("--manual_dir", help="folder of archives that you downloaded by hand")
    add("--samples", help="PNG file for a drawing of examples of the first split")
    add(
        "--check",
        type=int,
        default=1000,
        help="images to decode in each split (default: 1000); 0 for all",
    )
    flags = parser.parse_args(argv)
    if flags.check < 0:
        raise InputError(f"--check={flags.check} must be 0 (all images) or more")
    prepare(flags.name, flags.data_dir, flags.manual_dir)
    dataset = open_dataset(flags.name, flags.data_dir, flags.manual_dir)
    report(dataset, flags.check)
    if flags.samples:
        first = next(split for split, size in dataset.info.num_examples.items() if size)
        samples = draw_samples(dataset.split(first), dataset.class_names)
        save(samples, Path(flags.samples), "samples")


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(f"error: {with_own_flags(str(error))}")
