"""Image folders."""

import errno
import hashlib
import os
from collections import Counter
from pathlib import Path

from structinit_jax.data.images import PIL_MODES
from structinit_jax.data.source import Dataset, DatasetInfo, Folder
from structinit_jax.errors import InputError

SPLITS = ("train", "val", "validation", "test")
# Of gray and color images, and of images with any other number of channels.
SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".avif"),
    *(".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"),
)
OTHER_SUFFIXES = (".npy",)
LAYOUT = (
    "With data_dir=DIR, expected DIR/train/CLASS/*.jpg and DIR/val/CLASS/*.jpg, or DIR/CLASS/*.jpg"
    " split with, for example, train_split='train[:90%]' and eval_split='train[90%:]'."
)


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
        """Path of each file, relative to `root`."""
        return [self._name(path) for path, _ in self._files]

    def _name(self, path):
        return os.fsencode(path[self._start :].replace(os.sep, "/"))


def display_name(name: str, root: Folder) -> str:
    """Returns a data set's name for messages and titles; for 'folder', the name of the folder."""
    return os.path.basename(os.path.abspath(root or "")) if name == "folder" else name


def split_folders(root: Path) -> dict[str, Path]:
    """Returns the folder of each split; without split folders, `root` itself is 'train'."""
    folders = {split: root / split for split in SPLITS if (root / split).is_dir()}
    return folders or {"train": root}


def open_folder(root: Folder, channels: int = 3) -> Dataset:
    """Opens an image folder `root/SPLIT/class/**/*.jpg`, like torchvision's ImageFolder.

    The splits are `train`, `val` or `validation`, and `test`. One is enough; the first one present
    must have all classes, which are numbered in sorted order. Without these folders, the images
    `root/class/*.jpg` are the split `train`. Files are ordered by a checksum of their path below
    the split, so `train[:10%]` mixes the classes and is the same on every machine.

    Images of any other number of `channels` than 1 and 3 are .npy files.

    Raises:
      InputError: The folder does not exist or contains no images. Opening a split also raises it if
        a class of `train` is empty or a class is missing from the first split.
    """

    def problem(what):
        return InputError(f"data_dir={str(root or '')!r}: {what}. {LAYOUT}")

    folder = Path(root or "")
    if not root or not folder.is_dir():
        raise problem(f"there is no such folder (working directory: {Path.cwd()})")
    folders = split_folders(folder)
    search = _Search(SUFFIXES if channels in PIL_MODES else OTHER_SUFFIXES)
    deep = folder not in folders.values()
    try:
        if deep:
            others, _ = _Search(search.suffixes).entries(folder)
            search.left_out.update(f"folder {o.name}/" for o in others if o.name not in folders)
        found = {split: search.classes(path, deep) for split, path in folders.items()}
    except OSError as error:  # no permission, a broken link, or a cycle of links
        raise problem(f"{error.filename} cannot be read ({error.strerror})") from error
    first = next(iter(found))
    if not found[first] or not any(any(classes.values()) for classes in found.values()):
        places = ", ".join(f"{split}/" for split in folders) if deep else "it"
        what = f"class folders with images ({', '.join(search.suffixes)})"
        raise problem(f"for channels={channels}, there are no {what} in {places}")

    def open_split(split):
        # Checked here, so that an unused split can have other classes.
        if extra := [name for name in found[split] if name not in found[first]]:
            raise problem(f"{split} has classes that {first} does not have: {extra[:5]}")
        empty = [name for name, paths in found[split].items() if not paths]
        if empty and split == "train":
            path = (folders[split] / empty[0]).relative_to(folder)
            raise problem(f"the class {path} has no images ({', '.join(search.suffixes)})")
        labels = {name: label for label, name in enumerate(found[first])}
        files = [(path, labels[name]) for name, paths in found[split].items() for path in paths]
        return FileRecords(files, folders[split])

    sizes = {split: sum(map(len, classes.values())) for split, classes in found.items()}
    info = DatasetInfo(len(found[first]), channels, sizes)
    name = display_name("folder", root)
    return Dataset(name, info, list(found[first]), open_split, search.left_out)


class _Search:
    """Finds images by their suffix, and counts the files that it leaves out by kind."""

    def __init__(self, suffixes: tuple[str, ...]):
        self.suffixes = suffixes
        self.left_out: Counter[str] = Counter()

    def classes(self, folder: Path, deep: bool) -> dict[str, list[str]]:
        """Returns the images of each class; for `deep`, see `images`."""
        classes, images = self.entries(folder)
        self.left_out["images outside of class folders"] += len(images)
        return {entry.name: self.images(entry.path, deep) for entry in classes}

    def images(self, folder: str, deep: bool) -> list[str]:
        """Returns the image paths of a folder; if `deep`, also those in its subfolders."""
        folders, images = self.entries(folder)
        if deep:
            for entry in folders:
                images += self.images(entry.path, deep)
        return images

    def entries(self, folder: str | Path) -> tuple[list[os.DirEntry], list[str]]:
        """Returns the sorted subfolders and images of a folder.

        Hidden entries such as .ipynb_checkpoints and @eaDir are left out.
        """
        folders = []
        images = []
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            if entry.name[0] in ".@":
                self.left_out["hidden"] += 1
            elif entry.is_dir():
                folders.append(entry)
            elif entry.name.lower().endswith(self.suffixes):
                images.append(entry.path)
            elif not os.path.exists(entry.path):
                raise FileNotFoundError(errno.ENOENT, "broken link", entry.path)
            else:
                self.left_out[os.path.splitext(entry.name)[1].lower() or "without a suffix"] += 1
        return folders, images
