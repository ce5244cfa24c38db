"""Image folders."""

import hashlib
import os
from pathlib import Path

from structinit_jax.data.source import Dataset, DatasetInfo, Folder
from structinit_jax.errors import InputError, printable

SPLITS = ("train", "val", "test")
SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".avif"),
    *(".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"),
)
LAYOUT = "Expected DIR/train/CLASS/*.jpg and DIR/val/CLASS/*.jpg with data_dir=DIR."


class FileRecords:
    """Image files and their labels as `Records`, ordered by a checksum of their paths in `root`."""

    def __init__(self, files: list[tuple[str, int]], root: Path):
        self._start = len(str(root)) + 1
        self._files = sorted(files, key=lambda file: hashlib.sha256(self._name(file[0])).digest())

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> dict[str, str | int]:
        path, label = self._files[index]
        return {"image": path, "label": label}

    @property
    def names(self) -> list[bytes]:
        """Path of each file below `root`."""
        return [self._name(path) for path, _ in self._files]

    def _name(self, path):
        return os.fsencode(path[self._start :].replace(os.sep, "/"))


def open_folder(root: Folder) -> Dataset:
    """Opens an image folder `root/{train,val,test}/class/**/*.jpg`, as torchvision's ImageFolder.

    One of the three splits suffices; the first has all classes. They are numbered in the order of
    their sorted names. Files are ordered by a checksum of their path below the split, so
    `train[:10%]` holds a mix of classes, the same on every machine.

    Raises:
      InputError: There is no such folder, no split or no class. A split raises it when it is
        opened: a class of `train` is empty, or a class is not in the first split.
    """

    def problem(what):
        return InputError(f"data_dir={str(root or '')!r}: {what}. {LAYOUT}")

    folder = Path(root or "")
    if not root or not folder.is_dir():
        raise problem(f"there is no such folder (from {Path.cwd()})")
    found = {}
    for split in SPLITS:
        if (folder / split).is_dir():
            classes = (entry for entry in _scan(folder / split) if entry.is_dir())
            found[split] = {entry.name: _find_images(entry) for entry in classes}
    first = next(iter(found), None)
    if first is None or not found[first]:
        raise problem(f"it holds no class folder in {', '.join(SPLITS)}")

    def open_split(split):
        # Checked here, so that a split that is not used may have other classes.
        if extra := [name for name in found[split] if name not in found[first]]:
            shown = ", ".join(map(repr, extra[:5])) + (", …" if len(extra) > 5 else "")
            raise problem(f"{split} has {len(extra)} classes that {first} does not have: {shown}")
        empty = [name for name, paths in found[split].items() if not paths]
        if empty and split == "train":
            raise problem(
                f"the class train/{printable(empty[0])} holds no image ({', '.join(SUFFIXES)})"
            )
        labels = {name: label for label, name in enumerate(found[first])}
        files = [(path, labels[name]) for name, paths in found[split].items() for path in paths]
        return FileRecords(files, folder / split)

    sizes = {split: sum(map(len, classes.values())) for split, classes in found.items()}
    info = DatasetInfo(len(found[first]), 3, sizes)
    return Dataset("folder", info, list(found[first]), open_split)


def _scan(folder):
    """Lists a folder without hidden entries, such as .ipynb_checkpoints and @eaDir."""
    entries = (entry for entry in os.scandir(folder) if entry.name[0] not in ".@")
    return sorted(entries, key=lambda entry: entry.name)


def _find_images(folder):
    """Returns the paths of the images in a folder and its subfolders."""
    found = []
    for entry in _scan(folder):
        if entry.is_dir():
            found += _find_images(entry)
        elif entry.name.lower().endswith(SUFFIXES):
            found.append(entry.path)
    return found
