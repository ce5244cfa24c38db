"""Data sets stored as image files: image folders and Tiny ImageNet."""

import collections
import functools
import hashlib
import os
from pathlib import Path

from structinit_jax.data.datasets import Dataset, Folder
from structinit_jax.data.info import CATALOG, DatasetInfo
from structinit_jax.errors import InputError

SPLITS = ("train", "val", "test")
SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".avif"),
    *(".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"),
)
# Images too, but not read: the number of such files is printed.
OTHER_SUFFIXES = (
    *(".heic", ".heif", ".jp2", ".j2k", ".jxl", ".apng", ".pbm", ".pnm", ".tga", ".dds", ".ico"),
    *(".svg", ".psd", ".exr", ".hdr", ".dcm", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".raw"),
)
LAYOUT = "Expected DIR/train/CLASS/*.jpg and DIR/val/CLASS/*.jpg with --config.data.data_dir=DIR."
TINY_IMAGENET = "tiny-imagenet-200"
VAL_TABLE = "val_annotations.txt"


def open_folder(root: Folder) -> Dataset:
    """Opens an image folder `root/{train,val,test}/class/**/*.jpg`, as torchvision's ImageFolder.

    Classes are numbered in the order of their sorted names. Files are ordered by a checksum of
    their path below the split, so `train[:10%]` holds a mix of classes, the same on every machine.

    Args:
      root: Folder that holds one or more of train, val and test.

    Raises:
      InputError: There is no such folder, no split or no class. A split raises it when it is
        opened: a class is empty, or the classes are not those of the first split.
    """
    if not root:
        raise InputError(
            f"config.data.data_dir='': config.data.name='folder' needs the folder. {LAYOUT}"
        )

    def problem(what):
        return InputError(f"config.data.data_dir={str(root)!r}: {what}. {LAYOUT}")

    folder = Path(root)
    if not folder.is_dir():
        place = "" if folder.is_absolute() else f" in {Path.cwd()}"
        raise problem(f"there is no such folder{place}")
    found = {split: _find_classes(folder / split) for split in SPLITS if (folder / split).is_dir()}
    if not found:
        raise problem(f"it holds none of the folders {', '.join(SPLITS)}")
    if others := [name for name in _subfolders(folder) if name not in SPLITS]:
        print(f"note: {folder}: only {', '.join(SPLITS)} are read, not {', '.join(others)}")
    first = next(iter(found))
    if not found[first]:
        raise problem(f"the folder {first} holds no class (no subfolder)")
    sizes = {split: sum(map(len, classes.values())) for split, classes in found.items()}
    if empty := [split for split, size in sizes.items() if not size]:
        print(f"note: {folder}: there is no image in a class folder of {', '.join(empty)}")

    @functools.cache
    def open_split(split):
        # Checked here, so that a split that is not used may have other classes, or none.
        for one, other in ((first, split), (split, first)):
            if extra := [name for name in found[one] if name not in found[other]]:
                shown = ", ".join(map(repr, extra[:5])) + (", …" if len(extra) > 5 else "")
                raise problem(f"{one} has {len(extra)} classes that {other} does not have: {shown}")
        for name, paths in found[split].items():
            if not paths:
                raise problem(f"the class {split}/{name} holds no image ({', '.join(SUFFIXES)})")
        classes = enumerate(found[split].values())
        files = [(path, label) for label, paths in classes for path in paths]
        return FileRecords(files, folder / split)

    info = DatasetInfo(len(found[first]), (None, None, 3), sizes)
    return Dataset("folder", info, list(found[first]), open_split)


def open_tiny_imagenet(root: Folder) -> Dataset:
    """Opens the unpacked http://cs231n.stanford.edu/tiny-imagenet-200.zip (Le & Yang 2015).

    100,000 training and 10,000 validation images of 200 classes, 64×64. The test images have no
    labels and are left out.

    Args:
      root: The folder tiny-imagenet-200, or its parent.

    Raises:
      InputError: The data set is missing or incomplete.
    """
    field = f"config.data.data_dir={str(root or '')!r}"
    folder = Path(root or ".")
    if (folder / TINY_IMAGENET).is_dir():
        folder = folder / TINY_IMAGENET
    for path in (folder / "wnids.txt", folder / "train", folder / "val" / VAL_TABLE):
        if not path.exists():
            raise InputError(
                f"{field}: there is no {path}. Pass --config.data.data_dir=DIR with the unpacked"
                f" {TINY_IMAGENET}.zip from http://cs231n.stanford.edu."
            )
    classes = sorted((folder / "wnids.txt").read_text().split())
    labels = {name: label for label, name in enumerate(classes)}
    rows = [line.split("\t")[:2] for line in (folder / "val" / VAL_TABLE).read_text().splitlines()]
    files = {
        "train": [
            (path, label)
            for name, label in labels.items()
            for path in _find_images(folder / "train" / name, collections.Counter())
        ],
        "val": [(str(folder / "val" / "images" / file), labels[name]) for file, name in rows],
    }
    info = CATALOG["tiny_imagenet"]
    sizes = {split: len(found) for split, found in files.items()}
    if sizes != info.num_examples:
        raise InputError(
            f"{field}: {folder} holds {sizes} images, the published data set"
            f" {dict(info.num_examples)}. Unpack the archive again."
        )
    splits = {split: FileRecords(found, folder) for split, found in files.items()}
    return Dataset.from_records("tiny_imagenet", splits, classes, info.image_shape)


class FileRecords:
    """Image files and their labels as records, ordered by a checksum of the paths below `root`."""

    def __init__(self, files: list[tuple[str, int]], root: Path):
        self._start = len(str(root)) + 1

        def checksum(file):
            return hashlib.sha256(os.fsencode(self._relative(file[0]))).digest()

        self._files = sorted(files, key=checksum)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> dict[str, str | int]:
        return dict(zip(("image", "label"), self._files[index], strict=True))

    def digest(self, start: int, stop: int) -> str:
        """Returns a checksum of the paths below `root` and the labels of some of the files."""
        files = self._files[start:stop]
        lines = [f"{self._relative(path)}\0{label}\0" for path, label in files]
        return hashlib.sha256(os.fsencode("".join(lines))).hexdigest()

    def _relative(self, path):
        return path[self._start :].replace(os.sep, "/")


def _find_classes(folder):
    """Returns the paths of the images of each class, by its sorted name."""
    others = collections.Counter()
    classes = {name: _find_images(folder / name, others) for name in _subfolders(folder)}
    if others:
        counts = ", ".join(f"{count:,} {suffix}" for suffix, count in sorted(others.items()))
        print(f"note: {folder}: not read: {counts}; convert them to .png or .jpg")
    return classes


def _subfolders(folder):
    try:
        names = [entry.name for entry in folder.iterdir() if entry.is_dir()]
    except OSError as error:
        _refuse(error)
    return sorted(name for name in names if not _is_hidden(name))


def _is_hidden(name):
    """Returns whether a folder was made by a tool: .ipynb_checkpoints, @eaDir (NAS), __MACOSX."""
    return name.startswith((".", "@")) or name == "__MACOSX"


def _find_images(folder, others):
    """Returns the paths of the images in a folder; counts those of OTHER_SUFFIXES in `others`."""
    found = []
    # Folder -> real paths of it and of the folders on the way to it.
    above = {str(folder.parent): [Path(os.path.realpath(folder.parent))]}
    for parent, folders, names in os.walk(folder, onerror=_refuse, followlinks=True):
        real, way = Path(os.path.realpath(parent)), above[os.path.dirname(parent)]
        if any(place.is_relative_to(real) for place in way):
            raise InputError(f"{parent}: links to a folder that contains it: remove the link")
        above[parent] = [*way, real]
        folders[:] = [name for name in folders if not _is_hidden(name)]
        for name in names:
            suffix = "" if name.startswith(".") else os.path.splitext(name)[1].lower()
            if suffix in SUFFIXES:
                found.append(os.path.join(parent, name))
            elif suffix in OTHER_SUFFIXES:
                others[suffix] += 1
    return found


def _refuse(error):
    """Raises an error that `os.walk` would ignore, silently leaving out the images of a folder."""
    raise InputError(f"{error.filename}: cannot be read ({error.strerror}).") from error
