"""Data sets stored as image files: image folders and Tiny ImageNet."""

import collections
import functools
import hashlib
import os
import unicodedata
from pathlib import Path

from structinit_jax.data.source import Dataset, DatasetInfo, Folder, printable
from structinit_jax.errors import InputError

SPLITS = ("train", "val", "test")
SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".avif"),
    *(".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"),
)
# Made by tools and systems, as are names that start with '.' or '@' (@eaDir of a NAS).
SYSTEM_FOLDERS = ("__MACOSX", "$RECYCLE.BIN", "System Volume Information", "lost+found")
LAYOUT = "Expected DIR/train/CLASS/*.jpg and DIR/val/CLASS/*.jpg with --config.data.data_dir=DIR."
TINY_IMAGENET = DatasetInfo(200, (64, 64, 3), {"train": 100_000, "val": 10_000})
TINY_FOLDER = "tiny-imagenet-200"


class FileRecords:
    """Image files and their labels as `Records`, ordered by a checksum of their paths in `root`."""

    def __init__(self, files: list[tuple[str, int]], root: Path):
        self._start = len(str(root)) + 1
        self._files = sorted(files, key=lambda file: hashlib.sha256(self._name(file[0])).digest())

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> dict[str, str | int]:
        return dict(zip(("image", "label"), self._files[index], strict=True))

    @property
    def names(self) -> list[bytes]:
        """Path of each file below `root`."""
        return [self._name(path) for path, _ in self._files]

    def _name(self, path):
        return os.fsencode(path[self._start :].replace(os.sep, "/"))


def open_folder(root: Folder) -> Dataset:
    """Opens an image folder `root/{train,val,test}/class/**/*.jpg`, as torchvision's ImageFolder.

    Classes are numbered in the order of their sorted names. Files are ordered by a checksum of
    their path below the split, so `train[:10%]` holds a mix of classes, the same on every machine.

    Args:
      root: Folder that holds one or more of train, val and test.

    Raises:
      InputError: There is no such folder, no split or no class. A split raises it when it is
        opened: a class is empty, or its classes differ from the first split's.
    """

    def problem(what):
        return InputError(f"config.data.data_dir={str(root or '')!r}: {what}. {LAYOUT}")

    folder = Path(root or "")
    if not root or not folder.is_dir():
        raise problem(f"there is no such folder (from {Path.cwd()})")
    splits = [split for split in SPLITS if (folder / split).is_dir()]
    others = collections.Counter()
    found = {
        split: {
            name: _find_images(folder / split / name, others)
            for name in _subfolders(folder / split)
        }
        for split in splits
    }
    if not splits or not found[splits[0]]:
        raise problem(f"it holds no class folder in {', '.join(SPLITS)}")
    place = printable(str(folder))
    if unread := [printable(name) for name in _subfolders(folder) if name not in SPLITS]:
        print(f"note: {place}: only {', '.join(SPLITS)} are read, not {', '.join(unread)}")
    if others:
        counts = ", ".join(f"{count:,} {suffix}" for suffix, count in sorted(others.items()))
        print(f"note: {place}: these files are not read: {counts}")
    first = splits[0]

    @functools.cache
    def open_split(split):
        # Checked here, so that a split that is not used may have other classes, or none.
        names = [{unicodedata.normalize("NFC", name) for name in found[s]} for s in (first, split)]
        show = ascii if names[0] == names[1] else repr
        for one, other in ((first, split), (split, first)):
            if extra := [name for name in found[one] if name not in found[other]]:
                shown = ", ".join(map(show, extra[:5])) + (", …" if len(extra) > 5 else "")
                raise problem(f"{one} has {len(extra)} classes that {other} does not have: {shown}")
        if empty := [name for name, paths in found[split].items() if not paths]:
            raise problem(f"the class {split}/{empty[0]} holds no image ({', '.join(SUFFIXES)})")
        classes = enumerate(found[split].values())
        files = [(path, label) for label, paths in classes for path in paths]
        return FileRecords(files, folder / split)

    sizes = {split: sum(map(len, classes.values())) for split, classes in found.items()}
    info = DatasetInfo(len(found[first]), (None, None, 3), sizes)
    return Dataset("folder", info, list(map(printable, found[first])), open_split)


def open_tiny_imagenet(root: Folder) -> Dataset:
    """Opens the unpacked http://cs231n.stanford.edu/tiny-imagenet-200.zip (Le & Yang 2015).

    100,000 training and 10,000 validation images of 200 classes, 64×64. The test images have no
    labels and are left out.

    Args:
      root: The folder tiny-imagenet-200, or its parent.

    Raises:
      InputError: The data set is missing or incomplete.
    """

    def problem(what):
        field = f"config.data.data_dir={str(root or '')!r}"
        return InputError(f"{field}: {what}. It needs the unpacked {TINY_FOLDER}.zip.")

    folder = Path(root or ".")
    if (folder / TINY_FOLDER).is_dir():
        folder = folder / TINY_FOLDER
    try:
        classes = sorted((folder / "wnids.txt").read_text().split())
        table = (folder / "val" / "val_annotations.txt").read_text().splitlines()
    except OSError as error:
        raise problem(error) from error
    labels = {name: label for label, name in enumerate(classes)}
    rows = [line.split("\t")[:2] for line in table]
    files = {
        "train": [
            (path, label)
            for name, label in labels.items()
            for path in _find_images(folder / "train" / name, collections.Counter())
        ],
        "val": [(str(folder / "val" / "images" / file), labels[name]) for file, name in rows],
    }
    sizes = {split: len(found) for split, found in files.items()}
    if sizes != TINY_IMAGENET.num_examples:
        raise problem(f"{folder} holds {sizes} images, expected {TINY_IMAGENET.num_examples}")
    splits = {split: FileRecords(found, folder) for split, found in files.items()}
    return Dataset.from_records("tiny_imagenet", splits, classes, TINY_IMAGENET.image_shape)


def _scan(folder):
    """Lists a folder, leaving out the files and folders of tools and systems."""
    try:
        with os.scandir(folder) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
            return [e for e in found if e.name[0] not in ".@" and e.name not in SYSTEM_FOLDERS]
    except OSError as error:
        place = printable(str(error.filename))
        raise InputError(f"{place}: cannot be read ({error.strerror}).") from error


def _subfolders(folder):
    return [entry.name for entry in _scan(folder) if entry.is_dir()]


def _find_images(folder, others):
    """Returns the paths of the images in a folder and its subfolders; counts files of `others`."""
    found = []
    for entry in _scan(folder):
        suffix = os.path.splitext(entry.name)[1].lower()
        if entry.is_dir():
            found += _find_images(entry.path, others)
        elif suffix not in SUFFIXES:
            others[printable(suffix) or "without a suffix"] += 1
        elif entry.is_file() or not os.path.exists(entry.path):
            found.append(entry.path)  # also a link to a missing file, which is reported when read
        else:
            others["devices and pipes"] += 1
    return found
