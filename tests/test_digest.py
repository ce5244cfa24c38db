from pathlib import Path

import numpy as np
import pytest

from structinit_jax.data.datasets import Dataset, open_dataset
from structinit_jax.data.digest import digest

CLASSES = ("ant", "bee")


@pytest.fixture
def root(tmp_path):
    """Files that are named only, never read."""
    for name in CLASSES:
        for split, count in (("train", 10), ("val", 2)):
            folder = tmp_path / "here" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                (folder / f"{number}.png").touch()
    return tmp_path / "here"


def of_folder(root, spec="train"):
    return digest(open_dataset("folder", root).split(spec))


def rename(folder):
    (folder / "ant" / "0.png").rename(folder / "ant" / "new.png")


def move_some(folder):
    for number in range(9):
        (folder / "ant" / f"{number}.png").rename(folder / "bee" / f"ant_{number}.png")


@pytest.mark.parametrize("change", [rename, move_some])
def test_files_that_are_renamed_or_moved_change_the_digest_of_their_split(root, change):
    before = {spec: of_folder(root, spec) for spec in ("train", "val", "val+train")}
    change(root / "train")
    after = {spec: of_folder(root, spec) for spec in before}
    assert before["val"] == after["val"]
    assert before["train"] != after["train"]
    assert before["val+train"] != after["val+train"]


def test_a_folder_may_be_moved(root):
    before = of_folder(root)
    (root / "train" / "ant" / "notes.txt").touch()
    assert of_folder(Path(root).rename(root.parent / "elsewhere")) == before


def test_the_digest_is_that_of_the_chosen_examples_in_their_order(root):
    specs = ("train", "train[:10]", "train[10:]", "train[10:]+train[:10]")
    assert len({of_folder(root, spec) for spec in specs}) == len(specs)
    source = open_dataset("folder", root).split("train")
    kept = [digest(source.select(np.arange(20) != i)) for i in range(20)]
    assert len({digest(source), *kept}) == 21


def test_records_in_a_list_count_by_their_labels():
    def of_labels(*labels, spec="train", image="a.jpg"):
        records = [{"image": image, "label": label} for label in labels]
        return digest(Dataset.from_records("mine", {"train": records}, CLASSES).split(spec))

    assert of_labels(0, 1, 1) == of_labels(0, 1, 1, image="elsewhere/a.jpg")
    assert of_labels(0, 1, 1) == of_labels(np.int32(0), 1, 1)
    assert len({of_labels(0, 1, 1), of_labels(1, 0, 1), of_labels(0, 1)}) == 3
    assert of_labels(0, 1, 1, spec="train[:2]") == of_labels(0, 1)


def test_a_prepared_data_set_has_no_digest(data_dir):
    assert digest(open_dataset("digits", data_dir).split("train[:100]")) is None
