"""Writes TFDS's CIFAR-10 as the image folder of docs/results.md, `IMAGES`.

    python -m structinit_jax.prepare --name=cifar10
    python benchmarks/cifar10_folder.py --out=IMAGES

Within a class, the files are numbered in the order of the original data set.
"""

import argparse
import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from structinit_jax.data.datasets import open_dataset


def write(examples: Iterable[Mapping[str, Any]], class_names: Sequence[str], folder: Path) -> None:
    """Writes the examples of a split: an 'id', an encoded 'image' and a 'label' each."""
    for name in class_names:
        (folder / name).mkdir(parents=True, exist_ok=True)
    written = Counter()
    # TFDS shuffles the examples; an 'id' is the place in the original data set: train_00000, ...
    for example in sorted(examples, key=lambda example: example["id"]):
        name = class_names[example["label"]]
        path = folder / name / f"{written[name]:04d}.jpg"
        Image.open(io.BytesIO(example["image"])).save(path, quality=75)
        written[name] += 1


def main() -> None:
    """Writes both splits to --out."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data_dir", default=None, help="TFDS's data directory.")
    parser.add_argument("--out", required=True, type=Path, help="Folder to write.")
    args = parser.parse_args()
    dataset = open_dataset("cifar10", args.data_dir)
    for split in ("train", "test"):
        write(dataset.open_split(split), dataset.class_names, args.out / split)


if __name__ == "__main__":
    main()
