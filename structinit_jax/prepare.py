"""Prepares a data set for training (needed once) and reports what it contains.

    python -m structinit_jax.prepare --name=cifar10
    python -m structinit_jax.prepare --name=folder --data_dir=DIR
    python -m structinit_jax.prepare --name=imagenet2012 --manual_dir=ARCHIVES

For digits, fashion_mnist (whose files are downloaded if they are missing), image folders and data
sets of your own, this only prints the report. All others are downloaded and prepared by their TFDS
builders, which need TensorFlow (`pip install '.[prepare]'`); training never does. TFDS reads
archives that it cannot download, such as ImageNet-1K's ILSVRC2012_img_train.tar and
ILSVRC2012_img_val.tar, from the --manual_dir folder.
"""

import importlib.util
import os

import numpy as np
from absl import flags
from etils import epy

from structinit_jax import command_line
from structinit_jax.command_line import FLAGS
from structinit_jax.data.datasets import OPENERS, find_builder, open_dataset
from structinit_jax.data.source import Dataset, Folder, ImageSource
from structinit_jax.errors import InputError, is_reference, require

with epy.lazy_imports():  # takes a quarter of a second
    import tensorflow_datasets as tfds

MAX_SHOWN_CLASSES = 10
MAX_AVERAGED = 1000  # images, enough to know mean and deviation to about 0.01


def define_flags() -> None:
    """Defines the flags of this command."""
    flags.DEFINE_string("name", None, "TFDS name, 'folder' or 'module:function'.", required=True)
    text = "Folder that holds TFDS's data sets, the images ('folder') or fashion_mnist."
    flags.DEFINE_string("data_dir", None, text)
    text = "Folder of archives that TFDS cannot download (default: downloads/manual in --data_dir)."
    flags.DEFINE_string("manual_dir", None, text)
    text = "Number of channels of the images (default: that of the data set, 3 for folders)."
    flags.DEFINE_integer("channels", None, text, lower_bound=1)
    text = "Images to decode in each split; 0 for all."
    flags.DEFINE_integer("check", 20_000, text, lower_bound=0)


def prepare(name: str, data_dir: Folder = None, manual_dir: Folder = None) -> None:
    """Prepares a data set so that `open_dataset` can open it with the same name and `data_dir`.

    `manual_dir` holds the archives that TFDS cannot download, by default `downloads/manual` in
    `data_dir`. Raises `InputError` if the name is unknown or the data set cannot be prepared.
    """
    if name in OPENERS or is_reference(name):
        return
    builder = find_builder(name, data_dir and os.path.expanduser(data_dir))
    if builder.data_path.exists():
        return
    needs = "prepared with TensorFlow, here or on another machine: pip install '.[prepare]'"
    require("--name", name, needs, importlib.util.find_spec("tensorflow") is not None)
    try:
        config = tfds.download.DownloadConfig(manual_dir=manual_dir)
        builder.download_and_prepare(file_format="array_record", download_config=config)
    except Exception as error:  # TensorFlow's errors have no common type
        raise InputError(
            f"--name={name!r} cannot be prepared: {type(error).__name__}: {error}"
        ) from error


def describe_split(source: ImageSource, num_classes: int, num_checked: int) -> list[str]:
    """Checks `num_checked` evenly spaced examples, or all if it is 0, and returns lines to print.

    The lines report the classes, the image sizes, the mean and standard deviation of the pixels (as
    in `config.data.mean` and `std`), invalid labels, and each image that cannot be decoded.
    """
    checked = source.evenly_spaced(num_checked or len(source))
    good, sizes, problems = checked.split_bad_images()
    extent = "all"
    if left := len(source) - len(checked):
        extent = f"{len(checked):,} evenly spaced ones; --check=0 also decodes the other {left:,}"
    lines = [f"{len(source):,} examples; checked {extent}"]
    if len(good):
        labels = good.labels()
        known = (labels >= 0) & (labels < num_classes)
        counts = np.bincount(labels[known], minlength=num_classes)
        low = np.min(sizes, axis=0)
        high = np.max(sizes, axis=0)
        mean, std = mean_and_std(good.evenly_spaced(MAX_AVERAGED))
        lines += [
            f"{np.count_nonzero(counts)} of {num_classes} classes, with {counts.min():,} to"
            f" {counts.max():,} of the checked examples each",
            f"{low[0]} to {high[0]} pixels high, {low[1]} to {high[1]} wide",
            f"pixels: mean {mean}, std {std}",
        ]
        if others := np.unique(labels[~known & (labels != -1)]).tolist():  # -1 stands for no label
            lines.append(f"bad: labels {others[:10]}, expected 0 to {num_classes - 1}")
    return lines + [f"bad: {problem}" for problem in problems]


def mean_and_std(source: ImageSource) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns the mean and standard deviation of each channel, for pixels scaled to [0, 1].

    All images have equal weight, whatever their size.
    """

    def moments(image, label):
        pixels = image.decode() / 255
        return [power.mean(axis=(0, 1)) for power in (pixels, pixels**2)]

    mean, square = np.mean(source.map(moments), axis=0)
    variance = np.maximum(square - mean**2, 0)  # Rounding can make it negative.
    # Dark channels need so many digits.
    return tuple(mean.round(5).tolist()), tuple(np.sqrt(variance).round(5).tolist())


def report(dataset: Dataset, num_checked: int) -> None:
    """Prints the contents of a data set; for `num_checked` see `describe_split`.

    Raises `InputError` at the end if an image or a label is bad.
    """
    names = dataset.class_names
    shown = ", ".join(names[:MAX_SHOWN_CLASSES])
    shown += ", …" if len(names) > MAX_SHOWN_CLASSES else ""
    print(f"{dataset.name}: {len(names)} classes ({shown}), {dataset.info.channels} channels")
    if left_out := [f"{kind} ({count:,})" for kind, count in dataset.left_out.items() if count]:
        print(f"  left out: {', '.join(left_out)}")
    bad = 0
    for split, size in dataset.info.num_examples.items():
        lines = ["no examples"]
        if size:
            lines = describe_split(dataset.split(split), len(names), num_checked)
        for line in lines:
            print(f"  {split}: {line}", flush=True)
            bad += line.startswith("bad: ")
    if bad:
        raise InputError(
            f"{bad} bad images or labels are listed above: fix them; to train without the images "
            "that cannot be decoded, pass --config.data.on_bad_image=skip"
        )


def main(overrides: command_line.Overrides) -> None:
    """Prepares a data set and prints a report."""
    if overrides:
        raise InputError(f"prepare has no --config.{overrides[0][0]}; --help lists its flags")
    prepare(FLAGS.name, FLAGS.data_dir, FLAGS.manual_dir)
    report(open_dataset(FLAGS.name, FLAGS.data_dir, FLAGS.channels), FLAGS.check)


if __name__ == "__main__":
    command_line.run(main, define_flags, shared=())
