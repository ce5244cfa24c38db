"""Sizes and classes of known data sets, and the syntax of splits.

A dry run builds the model and counts the steps from these, without any data.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from structinit_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class DatasetInfo:
    """What the model and the schedule need to know about a data set.

    Attributes:
      num_classes: Number of classes. Labels are 0, ..., `num_classes - 1`.
      image_shape: Height, width and channels; height and width are None if they vary.
      num_examples: Number of examples in each split.
    """

    num_classes: int
    image_shape: tuple[int | None, int | None, int]
    num_examples: Mapping[str, int]


# Splits without labels are left out: 'unlabelled' of stl10, 'test' of imagenet2012.
CATALOG: dict[str, DatasetInfo] = {
    "digits": DatasetInfo(10, (8, 8, 1), {"train": 1_438, "test": 359}),
    "fashion_mnist": DatasetInfo(10, (28, 28, 1), {"train": 60_000, "test": 10_000}),
    "cifar10": DatasetInfo(10, (32, 32, 3), {"train": 50_000, "test": 10_000}),
    "cifar100": DatasetInfo(100, (32, 32, 3), {"train": 50_000, "test": 10_000}),
    "svhn_cropped": DatasetInfo(
        10, (32, 32, 3), {"train": 73_257, "test": 26_032, "extra": 531_131}
    ),
    "stl10": DatasetInfo(10, (96, 96, 3), {"train": 5_000, "test": 8_000}),
    "oxford_flowers102": DatasetInfo(
        102, (None, None, 3), {"train": 1_020, "validation": 1_020, "test": 6_149}
    ),
    "oxford_iiit_pet": DatasetInfo(37, (None, None, 3), {"train": 3_680, "test": 3_669}),
    "food101": DatasetInfo(101, (None, None, 3), {"train": 75_750, "validation": 25_250}),
    "tiny_imagenet": DatasetInfo(200, (64, 64, 3), {"train": 100_000, "val": 10_000}),
    "imagenet2012": DatasetInfo(1000, (None, None, 3), {"train": 1_281_167, "validation": 50_000}),
    # Test sets with the classes of imagenet2012.
    "imagenet2012_real": DatasetInfo(1000, (None, None, 3), {"validation": 50_000}),
    "imagenet_v2": DatasetInfo(1000, (None, None, 3), {"test": 10_000}),
    "imagenet_sketch": DatasetInfo(1000, (None, None, 3), {"test": 50_889}),
    "imagenet_a": DatasetInfo(1000, (None, None, 3), {"test": 7_500}),
    "imagenet_r": DatasetInfo(1000, (None, None, 3), {"test": 30_000}),
}

# Values of `config.data.eval_name`, test sets for models trained on imagenet2012 -> the split and
# how many of the 1,000 classes occur in it. `data.test_sets` opens them.
EVALUATION_SETS = {
    "imagenet2012": ("validation", 1000),
    "imagenet2012_real": ("validation", 1000),
    "imagenet_v2": ("test", 1000),
    "imagenet_sketch": ("test", 1000),
    "imagenet_a": ("test", 200),
    "imagenet_r": ("test", 200),
}


def parse_split(name: str, spec: str, info: DatasetInfo, field: str) -> list[tuple[str, int, int]]:
    """Parses a split in TFDS syntax, for example `train[10%:]` or `train[:2000]+test`.

    `name` and `field` (the config field that holds `spec`) are for error messages.

    Returns:
      `(split name, start, stop)` for each term of the sum; `stop` is exclusive.

    Raises:
      InputError: `spec` is malformed, empty or names an unknown split.
    """
    import tensorflow_datasets as tfds

    def problem(reason):
        splits = ", ".join(f"{split!r} ({n:,})" for split, n in info.num_examples.items())
        first = next(iter(info.num_examples), "train")
        examples = [first, f"{first}[:100]", f"{first}[:90%]", f"{first}[90%:]"]
        examples += [f"{first}+{other}" for other in list(info.num_examples)[1:2]]
        return InputError(
            f"config.{field}={spec!r}: {reason}. The splits of {name} are {splits}. Examples: "
            f"{', '.join(map(repr, examples))}."
        )

    # The number of shards depends on who prepared the set, so a slice in shards is not portable.
    if "shard" in spec:
        raise problem("slices in shards are not supported")
    splits = {
        split: tfds.core.SplitInfo(name=split, shard_lengths=[n], num_bytes=0)
        for split, n in info.num_examples.items()
    }
    try:
        absolute = tfds.core.ReadInstruction.from_spec(spec).to_absolute(splits)
    except (ValueError, NotImplementedError) as error:
        reason = str(error).splitlines()[-1].rstrip(".").split(". ")[0]
        raise problem(reason) from error
    parts = []
    for part in absolute:
        start = part.from_ or 0
        stop = info.num_examples[part.splitname] if part.to is None else part.to
        parts.append((part.splitname, start, max(start, stop)))
    if all(start == stop for _, start, stop in parts):
        raise problem("it holds no example")
    return parts


def split_size(name: str, spec: str, info: DatasetInfo, field: str) -> int:
    """Returns the number of examples in a split; for arguments and errors see `parse_split`."""
    return sum(stop - start for _, start, stop in parse_split(name, spec, info, field))


def count_shared(one: Sequence[tuple[str, int, int]], other: Sequence[tuple[str, int, int]]) -> int:
    """Returns how many examples of one split are in the other, both as parsed by `parse_split`."""
    return sum(
        max(0, min(stop, last) - max(start, first))
        for name, start, stop in one
        for same, first, last in other
        if name == same
    )


def check_examples(info: DatasetInfo, *, num_classes: int, channels: int) -> None:
    """Raises an `InputError` if a model's outputs or input channels do not fit the data set."""
    if num_classes != info.num_classes:
        raise InputError(
            f"config.model.num_classes={num_classes}: the data set has {info.num_classes} classes."
            f" Pass --config.model.num_classes={info.num_classes}."
        )
    if channels != info.image_shape[-1]:
        raise InputError(
            f"config.data.channels={channels}: the images have {info.image_shape[-1]}."
            f" Pass --config.data.channels={info.image_shape[-1]}."
        )
