import dataclasses
import errno
import os
import shutil

import jax
import numpy as np
import pytest
from PIL import Image

from structinit_jax.data.crops import RandomCrop
from structinit_jax.data.datasets import open_dataset
from structinit_jax.data.images import BadImageError
from structinit_jax.data.info import CATALOG
from structinit_jax.data.loader import HostLoader, make_loader
from structinit_jax.errors import InputError

CLASSES = ["apple", "Birch", "cat"]


def mesh():
    return jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def write_image(path, value, size=(9, 7)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (value, 255 - value, 0)).save(path)


def read(source):
    """Pixels and label of every example."""
    return [(image.decode(), label) for image, label in source.read(range(len(source)))]


def values(source):
    """The red value of every example."""
    return [int(pixels[0, 0, 0]) for pixels, _ in read(source)]


@pytest.fixture
def root(tmp_path):
    """Ten training images and two of val for each class; their red value is their number."""
    for label, name in enumerate(CLASSES):
        for number in range(10):
            suffix = ["png", "PNG", "bmp"][number % 3]
            write_image(tmp_path / "train" / name / f"{number}.{suffix}", 10 * label + number)
        for number in range(2):
            write_image(tmp_path / "val" / name / "deeper" / f"{number}.png", 100 + label)
    (tmp_path / "train" / "apple" / "notes.txt").touch()
    (tmp_path / "train" / "apple" / "._0.png").touch()
    (tmp_path / "train" / ".cache").mkdir()
    return tmp_path


def test_examples_of_a_folder(root):
    dataset = open_dataset("folder", root)
    assert dataset.info.num_classes == 3
    assert dataset.info.image_shape == (None, None, 3)
    assert dataset.info.num_examples == {"train": 30, "val": 6}
    source = dataset.split("train")
    examples = read(source)
    # Sorted as Python sorts: capitals first.
    assert dataset.class_names == sorted(CLASSES)
    labels = {name: label for label, name in enumerate(sorted(CLASSES))}
    expected = {10 * i + n: labels[name] for i, name in enumerate(CLASSES) for n in range(10)}
    assert {int(pixels[0, 0, 0]): label for pixels, label in examples} == expected
    assert examples[0][0].shape == (7, 9, 3)
    assert source.labels().tolist() == [label for _, label in examples]


def test_slices_hold_some_of_every_class_and_partition_the_split(root):
    dataset = open_dataset("folder", root)
    first, rest = values(dataset.split("train[:80%]")), values(dataset.split("train[80%:]"))
    assert (len(first), len(rest)) == (24, 6)
    assert first + rest == values(dataset.split("train"))
    assert {value // 10 for value in first} == {0, 1, 2}
    both = values(dataset.split("val[:1]+train[:2]"))
    assert both == values(dataset.split("val"))[:1] + first[:2]
    with pytest.raises(
        InputError, match=r"config\.data\.eval_split='test'.*'train' \(30\), 'val' \(6\)"
    ):
        dataset.split("test", "data.eval_split")


def test_order_does_not_depend_on_where_the_folder_lies(root, tmp_path_factory):
    other = tmp_path_factory.mktemp("elsewhere") / "copy"
    shutil.copytree(root, other)
    one, two = (open_dataset("folder", path).split("train") for path in (root, other))
    assert values(one) == values(two)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda root: root.rename(root.with_name("gone")), "there is no such folder"),
        (
            lambda root: [path.rename(root / f"_{path.name}") for path in list(root.iterdir())],
            "holds none of the folders train, val, test",
        ),
        (
            lambda root: (root / "val" / "cat").rename(root / "val" / "cats"),
            r"train has 1 classes that val does not have: 'cat'\.",
        ),
        (
            lambda root: write_image(root / "val" / "dog" / "0.png", 0),
            r"val has 1 classes that train does not have: 'dog'\.",
        ),
        (
            lambda root: [path.unlink() for path in (root / "train" / "cat").iterdir()],
            "the class train/cat holds no image",
        ),
        (
            lambda root: [(root / "train" / n).rename(root / n) for n in CLASSES],
            "the folder train holds no class",
        ),
    ],
)
def test_broken_folders_are_refused_by_name(root, change, reason):
    change(root)
    with pytest.raises(InputError, match=reason) as caught:
        open_dataset("folder", root).split("train+val")
    assert str(caught.value).startswith(f"config.data.data_dir={str(root)!r}: ")
    assert "DIR/train/CLASS/*.jpg" in str(caught.value)


def test_a_split_that_is_not_used_may_be_broken(root, capsys):
    write_image(root / "test" / "0.png", 0)  # as on Kaggle: no classes
    shutil.rmtree(root / "val" / "cat")
    dataset = open_dataset("folder", root)
    assert capsys.readouterr().out.endswith("no image in a class folder of test\n")
    assert len(dataset.split("train")) == 30
    with pytest.raises(InputError, match=r"train has 1 classes that val does not have: 'cat'\."):
        dataset.split("val")
    with pytest.raises(InputError, match=r"eval_split='test': it holds no example.*'val' \(4\)"):
        dataset.split("test", "data.eval_split")
    write_image(root / "test" / "unknown" / "0.png", 0)
    with pytest.raises(InputError, match=r"train has 3 classes that test does not have"):
        open_dataset("folder", root).split("test")


def test_images_of_other_kinds_are_read_or_noted(root, capsys):
    for suffix in ("jpe", "JFIF", "avif"):
        write_image(root / "train" / "cat" / f"new.{suffix}", 50)
    for name in ("1.heic", "2.HEIC", "3.jp2", "Thumbs.db", "desktop.ini", ".4.heic"):
        (root / "train" / "cat" / name).touch()
    source = open_dataset("folder", root).split("train")
    assert sum(abs(value - 50) < 5 for value in values(source)) == 3
    note = f"note: {root}/train: not read: 2 .heic, 1 .jp2; convert them to .png or .jpg\n"
    assert capsys.readouterr().out == note


def test_folders_made_by_tools_are_not_read(root):
    for name in (".ipynb_checkpoints", "@eaDir", "__MACOSX"):
        write_image(root / "train" / "cat" / name / "0.png", 50)
        write_image(root / "train" / name / "0.png", 50)
    dataset = open_dataset("folder", root)
    assert dataset.class_names == sorted(CLASSES)
    assert len(dataset.split("train")) == 30


def test_a_relative_folder_is_looked_for_in_the_current_one(root, monkeypatch):
    monkeypatch.chdir(root.parent)
    assert len(open_dataset("folder", root.name).split("train")) == 30
    monkeypatch.chdir(root)
    with pytest.raises(InputError, match=f"'{root.name}': there is no such folder in {root}\\."):
        open_dataset("folder", root.name)


def test_a_link_to_a_folder_that_holds_it_is_refused(root):
    train = root / "train"
    (train / "cat" / "all").symlink_to(train)
    with pytest.raises(InputError, match="cat/all: links to a folder that contains it"):
        open_dataset("folder", root)
    (train / "cat" / "all").unlink()
    (train / "cat" / "more").symlink_to(train / "apple")
    assert len(open_dataset("folder", root).split("train")) == 40
    (train / "apple" / "more").symlink_to(train / "cat")
    with pytest.raises(InputError, match="apple/more/more: links to a folder that contains it"):
        open_dataset("folder", root)


def test_folders_that_are_not_read_are_noted(root, capsys):
    (root / "val").rename(root / "validation")
    open_dataset("folder", root)
    assert "only train, val, test are read, not validation" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["train", "deeper"])
def test_a_folder_that_cannot_be_read_is_not_passed_over(root, monkeypatch, name):
    def guarded(function):
        def wrapper(path="."):
            if os.path.basename(path) == name:  # the tests may run as root, who can read all
                raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
            return function(path)

        return wrapper

    for function in ("scandir", "listdir"):
        monkeypatch.setattr(os, function, guarded(getattr(os, function)))
    with pytest.raises(InputError, match=rf"{name}: cannot be read \(Permission denied\)"):
        open_dataset("folder", root)


def test_folder_needs_a_data_dir():
    with pytest.raises(InputError, match=r"config\.data\.data_dir=''"):
        open_dataset("folder", None)


def test_bad_images_stop_or_are_left_out(root, capsys):
    bad = root / "train" / "cat" / "3.png"
    bad.write_bytes(bad.read_bytes()[:50])
    (root / "train" / "apple" / "1.PNG").write_bytes(b"<html>404</html>")
    dataset = open_dataset("folder", root)
    with pytest.raises(BadImageError, match=r"folder 'train', example \d+ \(.*(cat/3|apple/1)"):
        make_loader(dataset.split("train"), mesh(), image_size=8)

    (root / "train" / "cat" / "gone.png").symlink_to(root / "nothing")
    dataset = open_dataset("folder", root)
    source = dataset.split("train", on_bad_image="skip")
    output = capsys.readouterr().out
    assert output.startswith("config.data.train_split='train': left out 3 bad images of 31:")
    assert "cat/gone.png: there is no such file\n" in output
    assert "cat/3.png" in output
    assert "apple/1.PNG): cannot be decoded (unknown image format)\n" in output  # no advice
    assert sorted(values(source)) == sorted(set(range(30)) - {1, 23})
    again = dataset.split("train", on_bad_image="skip")
    assert again.labels().tolist() == [label for _, label in read(source)]


def test_skip_says_nothing_of_good_images_and_refuses_all_bad(root, capsys):
    assert len(open_dataset("folder", root).split("val", on_bad_image="skip")) == 6
    assert capsys.readouterr().out == ""
    for path in (root / "val").rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(InputError, match=r"config\.data\.eval_split='val': none of its 6 images"):
        open_dataset("folder", root).split("val", "data.eval_split", "skip")
    with pytest.raises(InputError, match=r"config\.data\.on_bad_image='ignore'"):
        open_dataset("folder", root).split("val", on_bad_image="ignore")


def test_only_ten_bad_images_are_listed(root, capsys):
    for path in (root / "train" / "cat").iterdir():
        path.write_bytes(b"")
    source = open_dataset("folder", root).split("train", on_bad_image="skip")
    assert "…" not in capsys.readouterr().out
    (root / "train" / "Birch" / "0.png").write_bytes(b"")
    again = open_dataset("folder", root).split("train", on_bad_image="skip")
    first, *shown, last = capsys.readouterr().out.splitlines()
    assert "left out 11 bad images of 30" in first
    assert len(shown) == 10
    assert last == "  …"
    assert (len(source), len(again)) == (20, 19)


def test_bad_image_stops_a_run_by_name(root):
    (root / "train" / "cat" / "3.png").write_bytes(b"nothing")
    source = open_dataset("folder", root).split("train")
    for crop in (None, RandomCrop(seed=0)):
        loader = HostLoader(source, mesh(), 8, random_crop=crop)
        batches = loader.train_batches(batch_size=8, seed=0, start_step=0, num_steps=4)
        with pytest.raises(BadImageError, match=r"^folder 'train', example \d+ \(.*cat/3\.png\)"):
            list(batches)


TINY_CLASSES = ["n02", "n03", "n01"]  # the archive's list is not sorted


def write_gray_image(path, level):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (64, 64), (level, level, level)).save(path, "JPEG")


@pytest.fixture
def tiny_root(tmp_path, monkeypatch):
    """The archive's layout, with three classes; an image's level is ten times its label."""
    sizes = {"train": 6, "val": 4}
    small = dataclasses.replace(CATALOG["tiny_imagenet"], num_classes=3, num_examples=sizes)
    monkeypatch.setitem(CATALOG, "tiny_imagenet", small)
    root = tmp_path / "tiny-imagenet-200"
    for name in TINY_CLASSES:
        for i in range(2):
            path = root / "train" / name / "images" / f"{name}_{i}.JPEG"
            write_gray_image(path, 10 * sorted(TINY_CLASSES).index(name))
        (root / "train" / name / f"{name}_boxes.txt").write_text("")
    rows = [("val_0.JPEG", "n03"), ("val_1.JPEG", "n01"), ("val_2.JPEG", "n02")]
    rows.append(("val_3.JPEG", "n03"))
    for file, name in rows:
        write_gray_image(root / "val" / "images" / file, 10 * sorted(TINY_CLASSES).index(name))
    table = "".join(f"{file}\t{name}\t0\t32\t44\t62\n" for file, name in rows)
    (root / "val" / "val_annotations.txt").write_text(table)
    write_gray_image(root / "test" / "images" / "test_0.JPEG", 0)
    (root / "wnids.txt").write_text("\n".join(TINY_CLASSES) + "\n")
    return root


@pytest.mark.parametrize("inside", [True, False])
def test_images_have_the_labels_of_folder_and_table(tiny_root, inside):
    dataset = open_dataset("tiny_imagenet", tiny_root if inside else tiny_root.parent)
    assert dataset.class_names == ["n01", "n02", "n03"]
    assert dataset.info.num_classes == 3
    for split, size in (("train", 6), ("val", 4), ("train+val", 10)):
        examples = read(dataset.split(split))
        assert len(examples) == size
        for pixels, label in examples:
            assert pixels.shape == (64, 64, 3)
            np.testing.assert_allclose(pixels, 10 * label, atol=1)
    assert sorted(dataset.split("val").labels()) == [0, 1, 2, 2]


def test_a_folder_without_the_set_or_with_half_of_it_is_refused(tiny_root, tmp_path):
    with pytest.raises(InputError, match=r"there is no .*wnids\.txt.*unpacked tiny-imagenet-200"):
        open_dataset("tiny_imagenet", tmp_path / "nothing")
    next((tiny_root / "train" / "n01").rglob("*.JPEG")).unlink()
    with pytest.raises(InputError, match=r"'train': 5, .*the published data set .*'train': 6"):
        open_dataset("tiny_imagenet", tiny_root)
