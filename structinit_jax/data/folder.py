"""Image folders `root/{train,val,test}/class/**/*.jpg`, as torchvision's ImageFolder reads them."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from structinit_jax.data.info import DatasetInfo
from structinit_jax.errors import InputError

SPLITS = ("train", "val", "test")
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
LAYOUT = "Wanted: DIR/train/CLASS/*.jpg and DIR/val/CLASS/*.jpg, with --config.data.data_dir=DIR."


class FolderRecords:
    """Files and their labels; the bytes are read on demand.

    Args:
      files: Path and label of each example.
    """

    def __init__(self, files: Sequence[tuple[str, int]]):
        self._files = files

    @classmethod
    def of_parts(
        cls, files: Mapping[str, Sequence[tuple[str, int]]], parts: list[tuple[str, int, int]]
    ) -> "FolderRecords":
        """Records of what `parse_split` returned, from the files of each split."""
        return cls([file for split, start, stop in parts for file in files[split][start:stop]])

    def __len__(self) -> int:
        return len(self._files)

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Returns `{"image": bytes, "label": int, "file_name": str}` for each index."""
        return [self._read(*self._files[index]) for index in indices]

    def _read(self, path: str, label: int) -> dict[str, Any]:
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror}).") from error
        return {"image": content, "label": label, "file_name": path}


class ImageFolder:
    """The classes and files below a folder.

    Classes are numbered in the order of their sorted names. Files are ordered by a checksum of
    class and path, so that a slice such as `train[:10%]` holds some of every class; the order does
    not depend on the machine or on where the folder lies.

    Args:
      root: The folder that holds train, val or test, or several of them.

    Raises:
      InputError: There is no such folder, no split or no class; a class is empty; or the splits
        have different classes.
    """

    def __init__(self, root: str | os.PathLike | None):
        if not root:
            raise InputError(f"data.data_dir='': data.name='folder' needs the folder. {LAYOUT}")
        self.root = Path(root).expanduser()
        if not self.root.is_dir():
            raise InputError(f"data.data_dir={str(root)!r}: there is no such folder. {LAYOUT}")
        splits = [split for split in SPLITS if (self.root / split).is_dir()]
        if not splits:
            raise self._problem(f"it holds none of the folders {', '.join(SPLITS)}")
        self.classes = self._classes(splits)
        self._files = {split: self._find(split) for split in splits}
        sizes = {split: len(files) for split, files in self._files.items()}
        self.info = DatasetInfo(len(self.classes), (None, None, 3), sizes)

    def open_records(self, parts: list[tuple[str, int, int]]) -> FolderRecords:
        """Returns the records of what `parse_split` returned."""
        return FolderRecords.of_parts(self._files, parts)

    def _problem(self, what: str) -> InputError:
        return InputError(f"data.data_dir={str(self.root)!r}: {what}. {LAYOUT}")

    def _classes(self, splits: list[str]) -> list[str]:
        """Sorted class names, the same in every split."""
        first, *others = splits
        names = {
            split: sorted(
                entry.name
                for entry in (self.root / split).iterdir()
                if entry.is_dir() and not entry.name.startswith(".")
            )
            for split in splits
        }
        if not names[first]:
            raise self._problem(f"the folder {first} holds no class, that is no folder")
        for split in others:
            for one, other in ((first, split), (split, first)):
                only = sorted(set(names[one]) - set(names[other]))
                if only:
                    shown = ", ".join(map(repr, only[:5])) + (", …" if len(only) > 5 else "")
                    raise self._problem(
                        f"{one} has {len(only)} classes that {other} does not have: {shown}"
                    )
        return names[first]

    def _find(self, split: str) -> list[tuple[str, int]]:
        files = []
        for label, name in enumerate(self.classes):
            found = list_images(self.root / split / name)
            if not found:
                raise self._problem(
                    f"the class {split}/{name} holds no image (a file ending in"
                    f" {', '.join(SUFFIXES)})"
                )
            files += [(path, label) for path in found]
        return mixed(files, self.root / split)


def list_images(folder: Path) -> list[str]:
    """The images below a folder, in any order."""
    return [
        os.path.join(parent, file)
        for parent, _, names in os.walk(folder, followlinks=True)
        for file in names
        if file.lower().endswith(SUFFIXES) and not file.startswith(".")
    ]


def mixed(files: Sequence[tuple[str, int]], root: Path) -> list[tuple[str, int]]:
    """Files and their labels in an order that depends on the paths below `root` alone.

    It follows a checksum, so that a slice holds some of every class.
    """
    start = len(str(root)) + 1

    def checksum(file: tuple[str, int]) -> bytes:
        relative = file[0][start:].replace(os.sep, "/")
        return hashlib.sha256(os.fsencode(relative)).digest()

    return sorted(files, key=checksum)
