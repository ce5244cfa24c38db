"""Opens data sets by name. Each split is a random-access sequence of stored images and labels.

To use your own data set, write a function `my_dataset(data_dir) -> Dataset` that returns
`Dataset.from_records(...)`, and name it in the config: `data.name="my_module:my_dataset"`.
"""

import dataclasses
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from structinit_jax.data.images import LEAVE_OUT, PIL_MODES, BadImageError, StoredImage
from structinit_jax.data.info import CATALOG, DatasetInfo, parse_split
from structinit_jax.data.records import Records, Slices
from structinit_jax.errors import InputError, load_reference

Folder = str | os.PathLike | None
# Read from image files, without preparation.
FILE_SETS = {
    "folder": "structinit_jax.data.folder:open_folder",
    "tiny_imagenet": "structinit_jax.data.folder:open_tiny_imagenet",
}
# 'my_package.my_module:my_dataset', but not TFDS's 'mnist:3.0.1' and 'huggingface:mnist'.
OWN_SET = re.compile(r"(?!huggingface:)[A-Za-z_][\w.]*:[A-Za-z_]\w*")
READ_BLOCK = 256


def num_cores() -> int:
    """Returns how many cores this process may use; SLURM and containers may limit them."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclasses.dataclass(frozen=True, eq=False)
class ImageSource:
    """The examples of a split, decoded on demand, from any thread.

    Attributes:
      records: The stored examples.
      info: The data set.
      name: Name of the split in messages.
      label_key: Key of the label in each record.
      kept: Indices of the records that are part of the split, int64 [n].
      new_labels: Labels that replace those of the records, int [n].
    """

    records: Slices
    info: DatasetInfo
    name: str
    label_key: str
    kept: np.ndarray
    new_labels: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.kept)

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
        """Returns all labels, int64 [n]; `InputError` for one that is not a whole number."""
        if self.new_labels is not None:
            return np.asarray(self.new_labels, np.int64)
        indices = range(len(self))
        records = itertools.chain.from_iterable(map(self._fetch, self._blocks()))
        return np.fromiter(map(self._whole_label, indices, records), np.int64, len(self))

    def select(self, wanted: np.ndarray) -> "ImageSource":
        """Returns the examples where `wanted`, bool [n], is true, in the same order."""
        labels = None if self.new_labels is None else self.new_labels[wanted]
        return dataclasses.replace(self, kept=self.kept[wanted], new_labels=labels)

    def relabel(self, labels: np.ndarray) -> "ImageSource":
        """Returns the same examples with other labels, int [n]."""
        return dataclasses.replace(self, new_labels=labels)

    def split_bad_images(self) -> tuple["ImageSource", list[str]]:
        """Returns the source without images that cannot be decoded, and what is wrong with each."""

        def problem(index, record):
            try:
                # Any size reads all of a JPEG's data; an eighth takes a third of the time.
                self._open(index, record).decode(at_least=(1, 1))
            except BadImageError as error:
                return error.problem
            return None

        def problems(indices):
            return list(map(problem, indices, self._fetch(indices)))

        with ThreadPoolExecutor(num_cores()) as pool:
            found = list(itertools.chain.from_iterable(pool.map(problems, self._blocks())))
        good = self.select(np.array([text is None for text in found], bool))
        return good, [text for text in found if text is not None]

    def _blocks(self):
        starts = range(0, len(self), READ_BLOCK)
        return [range(start, min(start + READ_BLOCK, len(self))) for start in starts]

    def _fetch(self, indices):
        return self.records.read(self.kept[np.asarray(indices, np.int64)].tolist())

    def _open(self, index, record):
        image, file_name = self._entry(index, record, "image"), record.get("file_name", "")
        if isinstance(image, str | os.PathLike):
            file_name = os.fspath(image)
            try:
                image = Path(image).read_bytes()
            except FileNotFoundError as error:  # gone, or a link to what is gone
                raise BadImageError(
                    f"{file_name}: there is no such file", f"Restore it, or {LEAVE_OUT}"
                ) from error
            except OSError as error:
                raise InputError(f"{file_name}: cannot be read ({error.strerror}).") from error
        if not isinstance(image, bytes | np.ndarray):
            raise InputError(
                f"{self._describe(index)}: its 'image' is of type {type(image).__name__}, expected"
                " encoded bytes, the path of a file, or a NumPy array of pixels."
            )
        file_name = file_name.decode() if isinstance(file_name, bytes) else file_name
        name = self._describe(index) + (file_name and f" ({file_name})")
        shape = self.info.image_shape
        stored = StoredImage(image, shape[-1], name)
        if any(side not in (None, found) for side, found in zip(shape, stored.size, strict=False)):
            raise InputError(
                f"{name}: it has {stored.size[0]}x{stored.size[1]} pixels, but the image_shape of"
                f" the data set is {shape}: its sides must be None where they vary."
            )
        return stored

    def _label(self, index, record):
        if self.new_labels is not None:
            return int(self.new_labels[index])
        label, num_classes = self._whole_label(index, record), self.info.num_classes
        if not 0 <= label < num_classes:
            raise self._bad_label(index, label)
        return label

    def _whole_label(self, index, record):
        label = self._entry(index, record, self.label_key)
        try:
            if int(label) == label:
                return int(label)
        except (TypeError, ValueError, OverflowError):
            pass
        raise self._bad_label(index, label)

    def _bad_label(self, index, label):
        return InputError(
            f"{self._describe(index)}: its label is {label!r}, expected 0 to"
            f" {self.info.num_classes - 1}."
        )

    def _entry(self, index, record, key):
        found = type(record).__name__
        try:
            if hasattr(record, "keys"):  # unlike NumPy's structured records
                return record[key]
        except KeyError:
            found += f" without {key!r}"
        raise InputError(
            f"{self._describe(index)}: its record must be a dict with an 'image' and a"
            f" {self.label_key!r}, got {found}."
        )

    def _describe(self, index):
        return f"{self.name}, example {self.kept[index]}"


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
        class_names: Iterable[Any],
        image_shape: tuple[int | None, int | None, int] = (None, None, 3),
    ) -> "Dataset":
        """Makes a data set from its records.

        Example: `Dataset.from_records("mine", {"train": records}, ["cat", "dog"])`, where `records`
        is a list of `{"image": "cats/1.jpg", "label": 0}`.

        Args:
          name: Name in messages.
          splits: The records of each split; a list or other `Records`.
          class_names: Name of each class, by label. Other types are converted to strings.
          image_shape: Height, width (None if they vary) and channels, 1 or 3. Images are converted
            to this number of channels. Images of another size are refused. If the size is square,
            images are cropped on the device.
        """
        if len(image_shape) != 3 or image_shape[-1] not in PIL_MODES:
            raise InputError(
                f"{name}: image_shape={image_shape} must be (height, width, channels) with 1 or 3"
                " channels. Images of other kinds are converted to these."
            )
        if "all" in splits:
            raise InputError(
                f"{name}: no split can be named 'all', which means all of them in TFDS."
            )
        sizes = {split: len(records) for split, records in splits.items()}
        names = [str(class_name) for class_name in class_names]
        return cls(name, DatasetInfo(len(names), image_shape, sizes), names, splits.__getitem__)

    def split(
        self, spec: str, field: str = "data.train_split", on_bad_image: str = "stop"
    ) -> ImageSource:
        """Opens a split in TFDS syntax, for example `train[:2000]`.

        Args:
          spec: The split.
          field: Config field that holds `spec`, for error messages.
          on_bad_image: 'stop' raises `BadImageError` when an image that cannot be decoded is read.
            'skip' decodes every image once now (1 to 3 ms per image and core), reports the bad ones
            and leaves them out, so that all processes and restarts number the examples alike.

        Raises:
          InputError: There is no such split or policy, or no good image in the split.
        """
        if on_bad_image not in ("stop", "skip"):
            raise InputError(f"config.data.on_bad_image={on_bad_image!r} is not 'stop' or 'skip'.")
        parts = parse_split(self.name, spec, self.info, field)
        records = Slices([(self.open_split(split), *slice_) for split, *slice_ in parts])
        name, everything = f"{self.name} {spec!r}", np.arange(len(records))
        source = ImageSource(records, self.info, name, self.label_key, everything)
        return source if on_bad_image == "stop" else _skip_bad_images(source, f"{field}={spec!r}")


def open_dataset(name: str, data_dir: Folder = None, manual_dir: Folder = None) -> Dataset:
    """Opens a data set. digits and fashion_mnist are prepared on first use.

    Args:
      name: 'folder', 'tiny_imagenet', a TFDS name or `module:function` (a data set of your own).
      data_dir: Folder of the images for 'folder' and 'tiny_imagenet', TFDS's folder for its data
        sets (None: `$TFDS_DATA_DIR` or `~/tensorflow_datasets`), or the argument of the function.
      manual_dir: Folder with the original files of fashion_mnist; None downloads them.
        `~` is expanded in both folders.

    Raises:
      InputError: The name is unknown, or the data set cannot be read or prepared.
    """
    data_dir, manual_dir = expand_user(data_dir), expand_user(manual_dir)
    if name in FILE_SETS or OWN_SET.fullmatch(name):
        dataset = load_reference(FILE_SETS.get(name, name), "data.name")(data_dir)
        if not isinstance(dataset, Dataset):
            raise InputError(
                f"config.data.name={name!r} returned {type(dataset).__name__}, expected a Dataset."
                " Return structinit_jax.data.datasets.Dataset.from_records(...)."
            )
        return dataset
    from structinit_jax.data import builders  # imports TFDS

    return builders.open_tfds(name, data_dir, manual_dir)


def expand_user(folder: Folder) -> Folder:
    """Replaces a leading `~` by the home directory, which shells leave in `--flag=~/folder`."""
    return folder and os.path.expanduser(folder)


def find_info(name: str, data_dir: Folder = None) -> DatasetInfo:
    """Returns the info of a data set, which need not be present if it is in `CATALOG`."""
    return CATALOG[name] if name in CATALOG else open_dataset(name, data_dir).info


def _skip_bad_images(source, what):
    good, problems = source.split_bad_images()
    if problems:
        print(f"config.{what}: left out {len(problems):,} bad images of {len(source):,}:")
        shown = problems[:10] + (["…"] if len(problems) > 10 else [])
        print(*(f"  {problem}" for problem in shown), sep="\n", flush=True)
    if not len(good):
        raise InputError(f"config.{what}: none of its {len(source):,} images can be decoded.")
    return good
