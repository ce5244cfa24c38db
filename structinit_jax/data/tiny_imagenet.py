"""Tiny ImageNet as it is published: the unpacked http://cs231n.stanford.edu/tiny-imagenet-200.zip.

100,000 training and 10,000 validation images of 200 classes, 64×64 (Le & Yang 2015). TFDS does not
have it. Its layout is almost that of an image folder: training images lie below their class in
`train/CLASS/images/`, validation images in one folder, and a table names their classes. The test
images have no labels and are left out.
"""

import os
from pathlib import Path

from structinit_jax.data.folder import FolderRecords, list_images, mixed
from structinit_jax.data.info import CATALOG
from structinit_jax.errors import InputError

FOLDER = "tiny-imagenet-200"
VAL_TABLE = "val_annotations.txt"


class TinyImageNet:
    """Its classes, numbered in the order of their names, and its files.

    Args:
      root: The folder that the archive made, or the one around it.

    Raises:
      InputError: It is not there, or not whole.
    """

    def __init__(self, root: str | os.PathLike | None):
        self.root = Path(root or ".").expanduser()
        if (self.root / FOLDER).is_dir():
            self.root = self.root / FOLDER
        for path in (self.root / "wnids.txt", self.root / "train", self.root / "val" / VAL_TABLE):
            if not path.exists():
                raise InputError(
                    f"data.data_dir={str(root or '')!r}: there is no {path}. data.name="
                    f"'tiny_imagenet' reads the unpacked {FOLDER}.zip (from"
                    " http://cs231n.stanford.edu): pass --config.data.data_dir=DIR with its folder."
                )
        self.classes = sorted((self.root / "wnids.txt").read_text().split())
        labels = {name: label for label, name in enumerate(self.classes)}
        val = self.root / "val"
        rows = [line.split("\t")[:2] for line in (val / VAL_TABLE).read_text().splitlines()]
        files = {
            "train": [
                (path, label)
                for name, label in labels.items()
                for path in list_images(self.root / "train" / name)
            ],
            "val": [(str(val / "images" / file), labels[name]) for file, name in rows],
        }
        self._files = {split: mixed(found, self.root) for split, found in files.items()}
        self.info = CATALOG["tiny_imagenet"]
        sizes = {split: len(found) for split, found in files.items()}
        if sizes != self.info.num_examples:
            raise InputError(
                f"data.data_dir={str(root or '')!r}: {self.root} holds {sizes} images, and the"
                f" published set {dict(self.info.num_examples)}. Unpack the archive again."
            )

    def open_records(self, parts: list[tuple[str, int, int]]) -> FolderRecords:
        """Returns the records of what `parse_split` returned."""
        return FolderRecords.of_parts(self._files, parts)
