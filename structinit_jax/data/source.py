"""A data set, its splits in TFDS syntax, and the images and labels of a split."""

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import operator
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from structinit_jax.data.images import BadImageError, StoredImage
from structinit_jax.errors import InputError, require

Folder = str | os.PathLike | None
READ_BLOCK = 256  # examples
MAX_THREADS = 16  # for decoding; more would only wait for the interpreter lock
SMALL_SET = 2**25  # bytes, which `digest` reads in a tenth of a second
MAX_DIGESTED = 1000  # images that `digest` reads from a larger set
SPLIT = re.compile(r"([\w-]+)(?:\[(-?\d[\d_]*%?)?:(-?\d[\d_]*%?)?\])?")  # 'train[10%:]'


@dataclasses.dataclass(frozen=True)
class DatasetInfo:
    """Properties of a data set that the model and the schedule depend on."""

    num_classes: int  # labels are 0, ..., num_classes - 1
    channels: int  # of decoded images, such as 1 (gray) or 3 (color)
    num_examples: Mapping[str, int]  # in each split


@runtime_checkable
class Records(Protocol):
    """The examples of a split, as stored: a list, or an object of your own class.

    An example is a dict with an "image" (encoded bytes, a file path, or uint8 pixels [h, w] or
    [h, w, C]) and a "label" (an integer). The optional method `__getitems__(indices)` reads many
    examples at once. The optional attribute `names`, a list of `bytes` with a name for each
    example, promises that reading a record does not read its image; `digest` includes the names.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, Any]: ...


@dataclasses.dataclass(frozen=True, eq=False)
class ImageSource:
    """The examples of a split: labels, and images that are not yet read or decoded. Thread-safe."""

    parts: Sequence[Records]
    rows: np.ndarray  # part of each example and its index in that part, int64 [n, 2]
    info: DatasetInfo
    name: str  # of the split, in messages

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[StoredImage, int]:
        """Returns an image and its label."""
        return next(self.read([index]))

    def read(self, indices: Sequence[int]) -> Iterator[tuple[StoredImage, int]]:
        """Yields images and their labels; raises `InputError` if a label is out of range."""
        num_classes = self.info.num_classes
        for image, label in self._fetch(indices):
            if not 0 <= label < num_classes:
                raise InputError(f"{image.name}: label {label} is not in [0, {num_classes})")
            yield image, label

    def map(self, function: Callable[[StoredImage, int], Any]) -> list[Any]:
        """Calls a function with every image and label, in threads; returns the results in order.

        Labels may be out of range.
        """

        def call(block):
            return [function(image, label) for image, label in self._fetch(block)]

        blocks = [range(len(self))[i : i + READ_BLOCK] for i in range(0, len(self), READ_BLOCK)]
        # More threads than cores would contend for the interpreter lock.
        with ThreadPoolExecutor(min(MAX_THREADS, num_cores())) as pool:
            return list(itertools.chain.from_iterable(pool.map(call, blocks)))

    def labels(self) -> np.ndarray:
        """Returns all labels, int64 [n], which may be out of range; decodes no image."""
        return np.array(self.map(lambda image, label: label), np.int64)

    def select(self, wanted: np.ndarray) -> "ImageSource":
        """Returns the examples selected by `wanted`, bool [n] or indices in ascending order."""
        return dataclasses.replace(self, rows=self.rows[wanted])

    def evenly_spaced(self, most: int) -> "ImageSource":
        """Returns at most `most` examples, spread evenly over the split."""
        indices = np.linspace(0, len(self) - 1, min(most, len(self))).round()
        return self.select(indices.astype(int))

    def split_bad_images(self) -> tuple["ImageSource", list[tuple[int, int]], list[str]]:
        """Returns the good images, their heights and widths, and the problems of the bad ones."""

        def check(image, label):
            try:
                # Decoding at 1/8 size still reads every byte of a JPEG, in a third of the time.
                image.decode_scaled(8.0)
            except BadImageError as error:
                return None, str(error)
            return image.size, None

        checked = self.map(check)
        good = self.select(np.array([problem is None for _, problem in checked], bool))
        sizes = [size for size, _ in checked if size is not None]
        return good, sizes, [problem for _, problem in checked if problem is not None]

    def _fetch(self, indices):
        """Yields images and labels, which may be out of range."""
        rows = self.rows[np.asarray(indices, np.int64)].tolist()
        for number, group in itertools.groupby(rows, key=operator.itemgetter(0)):
            part = self.parts[number]
            wanted = [place for _, place in group]
            # One call for many examples is far faster, but for one example TFDS starts a thread.
            read_many = len(wanted) > 1 and getattr(part, "__getitems__", None)
            records = read_many(wanted) if read_many else map(part.__getitem__, wanted)
            for place, record in zip(wanted, records, strict=True):
                name = f"{self.name}, example {place}"
                try:
                    stored = record["image"]
                    label = record["label"]
                except KeyError as error:
                    raise InputError(f"{name} needs a field {error}") from error
                if isinstance(stored, str | os.PathLike):
                    name += f" ({os.fspath(stored)})"
                try:
                    label = operator.index(label)
                except TypeError as error:
                    raise InputError(f"{name}: label {label!r} is not an integer") from error
                yield StoredImage(stored, self.info.channels, name), label


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A data set whose splits can be opened."""

    name: str  # in messages
    info: DatasetInfo
    class_names: Sequence[str]  # by label
    open_split: Callable[[str], Records]  # by the name of the split
    left_out: Mapping[str, int] = dataclasses.field(default_factory=dict)  # files, by their kind

    @classmethod
    def from_records(
        cls,
        name: str,
        splits: Mapping[str, Records],
        class_names: Iterable[Any],
        channels: int = 3,
    ) -> "Dataset":
        """Makes a data set from its records.

        Example: `Dataset.from_records("mine", {"train": records}, ["cat", "dog"])`, where `records`
        is a list of `{"image": "cats/1.jpg", "label": 0}`, or other `Records`. Messages contain
        `name`. Class names are in label order and are converted to strings. If `channels` is 1 or
        3, gray and color images are converted to it.
        """
        sizes = {split: len(records) for split, records in splits.items()}
        names = [str(class_name) for class_name in class_names]
        return cls(name, DatasetInfo(len(names), channels, sizes), names, splits.__getitem__)

    def split(self, spec: str, on_bad_image: str = "stop") -> ImageSource:
        """Opens a split in TFDS syntax, for example `train[:2000]`.

        With `on_bad_image='stop'`, reading an image that cannot be decoded raises `BadImageError`.
        'skip' decodes every image once now (1 to 3 ms per image and core), reports the bad ones and
        leaves them out, so that examples have the same indices in all processes and restarts.

        Raises `InputError` if there is no such split.
        """
        terms = parse_split(spec, self.info)
        parts = [self.open_split(split) for split, _ in terms]
        numbers = np.repeat(np.arange(len(terms)), [len(indices) for _, indices in terms])
        indices = [np.arange(part.start, part.stop) for _, part in terms]
        rows = np.stack([numbers, np.concatenate(indices)], axis=1)
        source = ImageSource(parts, rows, self.info, f"{self.name} {spec!r}")
        if on_bad_image == "stop":
            return source
        good, _, problems = source.split_bad_images()
        if problems:
            counts = f"{len(problems):,} bad images of {len(source):,}"
            shown = problems[:10] + (["…"] if len(problems) > 10 else [])
            print(f"{source.name}: left out {counts}:", *shown, sep="\n  ", flush=True)
        if not len(good):
            raise InputError(f"{source.name} has no images that can be decoded")
        return good


def parse_split(spec: str, info: DatasetInfo) -> list[tuple[str, range]]:
    """Parses a split in TFDS syntax, for example `train[10%:]` or `train[:2000]+test`.

    Returns the name of the split and the indices in it for each term of the sum. Percentages are
    rounded as in TFDS; its slices of shards are not supported. Raises `InputError` if `spec` is
    malformed, selects no example or names an unknown split.
    """

    def problem(reason):
        splits = ", ".join(f"{split!r} ({n:,})" for split, n in info.num_examples.items())
        return InputError(
            f"split={spec!r}: {reason}. The splits are {splits}; parts of one are written"
            " like 'train[:90%]' and 'train[90%:]', and a sum like 'train+test'."
        )

    def position(text, size, default):
        if not text:
            return default
        number = int(text.rstrip("%"))
        number = round(number * size / 100) if text.endswith("%") else number
        if abs(number) > size:
            raise problem(f"{text} is outside its {size:,} examples")
        return number + size if number < 0 else number

    parts = []
    for term in info.num_examples if spec == "all" else spec.split("+"):
        match = SPLIT.fullmatch(term.strip())
        if not match or match[1] not in info.num_examples:
            raise problem(f"{term!r} is not a split or a part of one")
        split, start, stop = match.groups()
        if start and stop and start.endswith("%") != stop.endswith("%"):
            raise problem(f"{term!r} has one bound in percent: give both or none in percent")
        size = info.num_examples[split]
        parts.append((split, range(position(start, size, 0), position(stop, size, size))))
    if not any(part for _, part in parts):
        raise problem("it selects no examples")
    return parts


def split_size(spec: str, info: DatasetInfo) -> int:
    """Returns the number of examples in a split; for arguments and errors, see `parse_split`."""
    return sum(len(part) for _, part in parse_split(spec, info))


def count_common(first: str, second: str, info: DatasetInfo) -> int:
    """Returns how many examples two splits in TFDS syntax have in common."""

    def members(spec, split):
        parts = parse_split(spec, info)
        return set().union(*(part for name, part in parts if name == split))

    return sum(len(members(first, split) & members(second, split)) for split in info.num_examples)


def check_classes(info: DatasetInfo, num_classes: int) -> None:
    """Raises an `InputError` if a model's number of classes does not match the data set."""
    needs = (
        f"{info.num_classes}, the number of classes in the data set (to evaluate a folder with"
        " fewer classes, add empty subfolders for the others)"
    )
    require("num_classes", num_classes, needs, num_classes == info.num_classes)


def digest(source: ImageSource, class_names: Sequence[str]) -> str:
    """Returns a checksum of a split, used to detect changed data.

    It covers the number and order of the examples and the class names. For image folders and lists,
    it also covers all labels and the size of each image in bytes; for folders, the paths below the
    split, so that a folder can be moved. Of the images themselves, it covers all bytes for a folder
    or list of at most 32 MB, and otherwise the bytes and labels of 1,000 images, spread evenly over
    the split.
    """
    names = hashlib.sha256(source.rows.tobytes() + json.dumps(list(class_names)).encode())
    is_listed = True  # records are read without their images
    for part in source.parts:
        part_names = getattr(part, "names", None)  # computed on every access
        names.update(b"\0".join(part_names or ()))
        is_listed = is_listed and (isinstance(part, list) or part_names is not None)
    contents = hashlib.sha256()
    sample = source.evenly_spaced(MAX_DIGESTED)
    if is_listed:
        listed = source.map(lambda image, label: (label, image.num_bytes()))
        labels, sizes = np.array(listed, np.int64).reshape(-1, 2).T
        names.update(labels.tobytes())
        contents.update(sizes.tobytes())
        sample = source if sizes.sum() <= SMALL_SET else sample
    checksums = sample.map(lambda image, label: image.checksum())
    contents.update(sample.labels().tobytes() + b"".join(checksums))
    return f"{names.hexdigest()}-{contents.hexdigest()}"


@functools.cache
def num_cores() -> int:
    """Returns how many cores this process can use, which SLURM or a container may limit."""
    try:  # a container's quota: microseconds of processor time per period
        quota, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
        limit = math.ceil(quota / period)
    except (OSError, ValueError):  # no quota
        limit = sys.maxsize
    has_affinity = hasattr(os, "sched_getaffinity")  # not on macOS
    return min(len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1, limit)
