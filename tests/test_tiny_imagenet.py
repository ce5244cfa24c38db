import dataclasses

import numpy as np
import pytest
from PIL import Image

from structinit_jax.data.datasets import open_dataset
from structinit_jax.data.info import CATALOG
from structinit_jax.errors import InputError

CLASSES = ["n02", "n03", "n01"]  # the archive's list is not sorted


def write_image(path, level):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (64, 64), (level, level, level)).save(path, "JPEG")


@pytest.fixture
def root(tmp_path, monkeypatch):
    """The archive's layout, with three classes; an image's level is ten times its label."""
    sizes = {"train": 6, "val": 4}
    small = dataclasses.replace(CATALOG["tiny_imagenet"], num_classes=3, num_examples=sizes)
    monkeypatch.setitem(CATALOG, "tiny_imagenet", small)
    root = tmp_path / "tiny-imagenet-200"
    for name in CLASSES:
        for i in range(2):
            path = root / "train" / name / "images" / f"{name}_{i}.JPEG"
            write_image(path, 10 * sorted(CLASSES).index(name))
        (root / "train" / name / f"{name}_boxes.txt").write_text("")
    rows = [("val_0.JPEG", "n03"), ("val_1.JPEG", "n01"), ("val_2.JPEG", "n02")]
    rows.append(("val_3.JPEG", "n03"))
    for file, name in rows:
        write_image(root / "val" / "images" / file, 10 * sorted(CLASSES).index(name))
    table = "".join(f"{file}\t{name}\t0\t32\t44\t62\n" for file, name in rows)
    (root / "val" / "val_annotations.txt").write_text(table)
    write_image(root / "test" / "images" / "test_0.JPEG", 0)
    (root / "wnids.txt").write_text("\n".join(CLASSES) + "\n")
    return root


@pytest.mark.parametrize("inside", [True, False])
def test_images_have_the_labels_of_folder_and_table(root, inside):
    dataset = open_dataset("tiny_imagenet", root if inside else root.parent)
    assert dataset.class_names == ["n01", "n02", "n03"]
    assert dataset.info.num_classes == 3
    for split, size in (("train", 6), ("val", 4), ("train+val", 10)):
        examples = dataset.split(split).read(list(range(size)))
        for example in examples:
            assert example["image"].shape == (64, 64, 3)
            np.testing.assert_allclose(example["image"], 10 * example["label"], atol=1)
    labels = [example["label"] for example in dataset.split("val").read([0, 1, 2, 3])]
    assert sorted(labels) == [0, 1, 2, 2]


def test_a_folder_without_the_set_or_with_half_of_it_is_refused(root, tmp_path):
    with pytest.raises(InputError, match=r"there is no .*wnids\.txt.*unpacked tiny-imagenet-200"):
        open_dataset("tiny_imagenet", tmp_path / "nothing")
    next((root / "train" / "n01").rglob("*.JPEG")).unlink()
    with pytest.raises(InputError, match=r"'train': 5, .*the published set .*'train': 6"):
        open_dataset("tiny_imagenet", root)
