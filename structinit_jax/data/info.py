"""Public info about the data sets of the recipes, and TFDS split syntax.

The info let a dry run build the model and count the steps without having any data.
"""

import dataclasses
from collections.abc import Mapping

from structinit_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class DatasetInfo:
    """What the model and the schedule need to know about a data set.

    Attributes:
      num_classes: Number of labels; labels run from 0 to `num_classes - 1`.
      image_shape: Height and width in pixels and channels; None where the size varies.
      num_examples: Number of examples of each TFDS split.
    """

    num_classes: int
    image_shape: tuple[int | None, int | None, int]
    num_examples: Mapping[str, int]


# Splits without labels (stl10's "unlabelled", imagenet2012's "test") are left out.
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
    # Test sets for models of imagenet2012, with its classes.
    "imagenet2012_real": DatasetInfo(1000, (None, None, 3), {"validation": 50_000}),
    "imagenet_v2": DatasetInfo(1000, (None, None, 3), {"test": 10_000}),
    "imagenet_sketch": DatasetInfo(1000, (None, None, 3), {"test": 50_889}),
    "imagenet_a": DatasetInfo(1000, (None, None, 3), {"test": 7_500}),
    "imagenet_r": DatasetInfo(1000, (None, None, 3), {"test": 30_000}),
}


# What `data.eval_name` may be: a test set for models of imagenet2012 -> its split and how many of
# the 1,000 classes it holds. `data.imagenet` has their rules.
EVALUATION_SETS = {
    "imagenet2012": ("validation", 1000),
    "imagenet2012_real": ("validation", 1000),
    "imagenet_v2": ("test", 1000),
    "imagenet_sketch": ("test", 1000),
    "imagenet_a": ("test", 200),
    "imagenet_r": ("test", 200),
}


def parse_split(name: str, spec: str, info: DatasetInfo, field: str) -> list[tuple[str, int, int]]:
    """Resolves TFDS split syntax such as `train[10%:]` or `train[:2000]+test`.

    Args:
      name: The data set's name, for messages.
      spec: The split as the user wrote it.
      info: Facts holding the size of each split.
      field: The config field that `spec` comes from, for messages.

    Returns:
      `(split name, start, stop)` for each term of the sum; `stop` is exclusive.

    Raises:
      InputError: `spec` is malformed, names an unknown split or holds no example.
    """
    import tensorflow_datasets as tfds

    def problem(reason: str) -> InputError:
        there_is = ", ".join(f"{split!r} ({n:,})" for split, n in info.num_examples.items())
        return InputError(
            f"{field}={spec!r}: {reason}. The splits of {name} are {there_is}; write for example"
            " 'train', 'train[:2000]', 'train[10%:]' or 'train+test'."
        )

    # How many shards a set has depends on who prepared it, so it is no stable unit.
    if "shard" in spec:
        raise problem("slices in shards are not supported")
    # A catalog entry knows no shards: one that holds everything gives the same boundaries.
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
    """Number of examples in `spec`; arguments and errors as in `parse_split`."""
    return sum(stop - start for _, start, stop in parse_split(name, spec, info, field))
