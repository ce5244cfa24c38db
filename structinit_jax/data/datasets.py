"""Data sets by name: each split is a random-access sequence of stored images and labels.

To use a data set of your own, write a function `my_dataset(data_dir) -> Dataset` that ends with
`Dataset.from_records(...)`, and name it in the config: `data.name="my_module:my_dataset"`.
"""

import bisect
import dataclasses
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from structinit_jax import plugins
from structinit_jax.data.images import BadImageError, StoredImage
from structinit_jax.data.info import CATALOG, DatasetInfo, parse_split
from structinit_jax.errors import InputError

# Read from image files, without preparation.
FILE_SETS = {
    "folder": "structinit_jax.data.folder:open_folder",
    "tiny_imagenet": "structinit_jax.data.folder:open_tiny_imagenet",
}
# 'my_package.my_module:my_dataset', but not TFDS's 'mnist:3.0.1' and 'huggingface:mnist'.
OWN_SET = re.compile(r"(?!huggingface:)[A-Za-z_][\w.]*:[A-Za-z_]\w*")
ON_BAD_IMAGE = ("stop", "skip")
READ_BLOCK = 256
MAX_SHOWN = 10


@runtime_checkable
class Records(Protocol):
    """The examples of a split, as stored.

    An example is a dict with an "image" (encoded bytes, the path of a file, or uint8 pixels [h, w,
    C]), a "label" (an integer), and optionally a "file_name" for messages. If there is a method
    `__getitems__(indices)`, it is used to read many examples at once.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, Any]: ...


class ImageSource:
    """The examples of a split, to be decoded; may be read from many threads.

    Args:
      records: The stored examples.
      info: The data set.
      name: Name of the split in messages.
      label_key: Key of the label in each record.
      kept: Indices of the records that are part of the split, int64 [n]; None for all.
      labels: Labels that replace those of the records, int [n].
    """

    def __init__(
        self,
        records: Records,
        info: DatasetInfo,
        name: str,
        label_key: str = "label",
        kept: np.ndarray | None = None,
        labels: np.ndarray | None = None,
    ):
        self._records, self._info, self._name, self._label_key = records, info, name, label_key
        self._kept = np.arange(len(records)) if kept is None else kept
        self._labels = labels

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> tuple[StoredImage, int]:
        """Returns an image and its label."""
        return self.read([index])[0]

    def read(self, indices: Sequence[int]) -> list[tuple[StoredImage, int]]:
        """Returns several images, not yet decoded, and their labels.

        Raises:
          BadImageError: The header of an image is damaged.
          InputError: A file cannot be read, or a label is out of range.
        """
        return [
            (self._open(index, record), self._label(index, record))
            for index, record in zip(indices, self._fetch(indices), strict=True)
        ]

    def images(self) -> Iterator[StoredImage]:
        """Yields every image in order, not yet decoded."""
        for indices in self._blocks():
            yield from map(self._open, indices, self._fetch(indices))

    def column(self, key: str) -> list[Any]:
        """Returns one entry of every record without decoding the images."""
        blocks = map(self._fetch, self._blocks())
        return [record[key] for block in blocks for record in block]

    def labels(self) -> np.ndarray:
        """Returns all labels, int64 [n]."""
        labels = self.column(self._label_key) if self._labels is None else self._labels
        return np.asarray(labels, np.int64)

    def select(self, wanted: np.ndarray) -> "ImageSource":
        """Returns the examples where `wanted`, bool [n], is true, in the same order."""
        labels = None if self._labels is None else self._labels[wanted]
        return self._with(self._kept[wanted], labels)

    def relabel(self, labels: np.ndarray) -> "ImageSource":
        """Returns the same examples with other labels, int [n]."""
        return self._with(self._kept, labels)

    def split_bad_images(self) -> tuple["ImageSource", list[str]]:
        """Decodes every image once to find the damaged ones.

        Returns:
          The source without the bad images, and a message for each bad image.
        """

        def problems(indices: range) -> list[str | None]:
            records = self._fetch(indices)
            return [self._problem(*pair) for pair in zip(indices, records, strict=True)]

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            found = list(itertools.chain.from_iterable(pool.map(problems, self._blocks())))
        good = self.select(np.array([problem is None for problem in found], bool))
        return good, [problem for problem in found if problem is not None]

    def _with(self, kept: np.ndarray, labels: np.ndarray | None) -> "ImageSource":
        return ImageSource(self._records, self._info, self._name, self._label_key, kept, labels)

    def _blocks(self) -> list[range]:
        starts = range(0, len(self), READ_BLOCK)
        return [range(start, min(start + READ_BLOCK, len(self))) for start in starts]

    def _fetch(self, indices: Sequence[int]) -> list[Mapping[str, Any]]:
        return read_records(self._records, self._kept[np.asarray(indices, np.int64)].tolist())

    def _problem(self, index: int, record: Mapping[str, Any]) -> str | None:
        try:
            # Any size reads all of a JPEG's data; an eighth takes a third of the time.
            self._open(index, record).decode(at_least=(1, 1))
        except BadImageError as error:
            return str(error)
        return None

    def _open(self, index: int, record: Mapping[str, Any]) -> StoredImage:
        image, file_name = record["image"], record.get("file_name", "")
        if isinstance(image, str | os.PathLike):
            file_name = os.fspath(image)
            try:
                image = Path(image).read_bytes()
            except OSError as error:
                raise InputError(f"{file_name}: cannot be read ({error.strerror}).") from error
        file_name = file_name.decode() if isinstance(file_name, bytes) else file_name
        name = self._describe(index) + (file_name and f" ({file_name})")
        return StoredImage(image, self._info.image_shape[-1], name)

    def _label(self, index: int, record: Mapping[str, Any]) -> int:
        if self._labels is not None:
            return int(self._labels[index])
        label, num_classes = int(record[self._label_key]), self._info.num_classes
        if not 0 <= label < num_classes:
            raise InputError(
                f"{self._describe(index)}: its label is {label}; labels need to be from 0 to"
                f" {num_classes - 1}."
            )
        return label

    def _describe(self, index: int) -> str:
        return f"{self._name}, example {self._kept[index]}"


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A data set whose splits can be opened.

    Attributes:
      name: Name in messages.
      info: Number of classes, image shape and split sizes.
      class_names: Name of each class.
      open_split: Returns the records of a split.
      label_key: Key of the label in each record.
    """

    name: str
    info: DatasetInfo
    class_names: Sequence[str]
    open_split: Callable[[str], Records]
    label_key: str = "label"

    @classmethod
    def from_records(
        cls,
        name: str,
        splits: Mapping[str, Records],
        class_names: Sequence[str],
        image_shape: tuple[int | None, int | None, int] = (None, None, 3),
    ) -> "Dataset":
        """Makes a data set from its records.

        Example: `Dataset.from_records("mine", {"train": records}, ["cat", "dog"])`, where `records`
        is a list of `{"image": "cats/1.jpg", "label": 0}`.

        Args:
          name: Name in messages.
          splits: The records of each split; a list, or any other object described in `Records`.
          class_names: Name of each class, by label.
          image_shape: Height, width and channels. Images of one known square size are cropped on
            the device; None for height and width if they vary. Images are converted to this number
            of channels, 1 or 3.
        """
        sizes = {split: len(records) for split, records in splits.items()}
        info = DatasetInfo(len(class_names), image_shape, sizes)
        return cls(name, info, class_names, splits.__getitem__)

    def split(
        self, spec: str, field: str = "data.train_split", on_bad_image: str = "stop"
    ) -> ImageSource:
        """Opens a split in TFDS syntax, for example `train[:2000]`.

        Args:
          spec: The split.
          field: Config field that holds `spec`, for error messages.
          on_bad_image: 'stop' raises `BadImageError` when an image that cannot be decoded is read.
            'skip' decodes every image once now, reports the bad ones and leaves them out, so that
            all processes and restarts number the examples alike. This takes 1 to 3 ms per image and
            core at each start.

        Raises:
          InputError: There is no such split or policy, or no good image in the split.
        """
        if on_bad_image not in ON_BAD_IMAGE:
            raise InputError(
                f"config.data.on_bad_image={on_bad_image!r} needs to be 'stop' or 'skip'."
            )
        parts = [
            (self.open_split(split), start, stop)
            for split, start, stop in parse_split(self.name, spec, self.info, field)
        ]
        source = ImageSource(
            _Concatenation(parts), self.info, f"{self.name} {spec!r}", self.label_key
        )
        return source if on_bad_image == "stop" else _skip_bad_images(source, f"{field}={spec!r}")


def open_dataset(
    name: str,
    data_dir: str | os.PathLike | None = None,
    manual_dir: str | os.PathLike | None = None,
) -> Dataset:
    """Opens a data set. digits and fashion_mnist are prepared on first use.

    Args:
      name: 'folder', 'tiny_imagenet', a TFDS name or `module:function` (a data set of your own).
      data_dir: Folder of the images for 'folder' and 'tiny_imagenet', TFDS's folder for its data
        sets (None: `$TFDS_DATA_DIR` or `~/tensorflow_datasets`), or the argument of the function.
      manual_dir: Folder with the original files of fashion_mnist; None downloads them.

    Raises:
      InputError: The name is unknown, or the data set cannot be read or prepared.
    """
    if name in FILE_SETS or OWN_SET.fullmatch(name):
        dataset = plugins.load(FILE_SETS.get(name, name), "data.name")(data_dir)
        if not isinstance(dataset, Dataset):
            raise InputError(
                f"config.data.name={name!r} returned {type(dataset).__name__}, expected a"
                " structinit_jax.data.datasets.Dataset. Return Dataset.from_records(...)."
            )
        return dataset
    from structinit_jax.data import builders  # imports TFDS

    return builders.open_tfds(name, data_dir, manual_dir)


def find_info(name: str, data_dir: str | os.PathLike | None = None) -> DatasetInfo:
    """Returns the info of a data set, which need not be present if it is in `CATALOG`."""
    return CATALOG[name] if name in CATALOG else open_dataset(name, data_dir).info


def read_records(records: Records, indices: Sequence[int]) -> list[Mapping[str, Any]]:
    """Reads several records; in one call, which is far faster, if the records support it."""
    read_many = getattr(records, "__getitems__", None)
    return list(read_many(indices)) if read_many else [records[index] for index in indices]


class _Concatenation:
    """Slices of records, one after another. `parts` holds (records, start, stop)."""

    def __init__(self, parts: list[tuple[Records, int, int]]):
        self._parts = parts
        sizes = [stop - start for _, start, stop in parts]
        self._offsets = list(itertools.accumulate(sizes, initial=0))

    def __len__(self) -> int:
        return self._offsets[-1]

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Mapping[str, Any]]:
        by_part: dict[int, list[int]] = {}
        for index in indices:
            by_part.setdefault(bisect.bisect_right(self._offsets, index) - 1, []).append(index)
        found = {}
        for part, members in by_part.items():
            records, start, _ = self._parts[part]
            shift = start - self._offsets[part]
            found |= zip(members, read_records(records, [i + shift for i in members]), strict=True)
        return [found[index] for index in indices]


def _skip_bad_images(source: ImageSource, what: str) -> ImageSource:
    """Leaves out the images that cannot be decoded and prints their names."""
    good, problems = source.split_bad_images()
    if problems:
        shown = problems[:MAX_SHOWN] + ["…"] * (len(problems) > MAX_SHOWN)
        print(
            f"config.{what}: left out {len(problems):,} bad images of {len(source):,}:"
            + "".join(f"\n  {problem}" for problem in shown),
            flush=True,
        )
    if not len(good):
        raise InputError(f"config.{what}: none of its {len(source):,} images can be decoded.")
    return good
