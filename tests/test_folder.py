import dataclasses
import os
import shutil
import unicodedata

import jax
import numpy as np
import pytest
from PIL import Image

from structinit_jax.data import folder
from structinit_jax.data.crops import RandomCrop
from structinit_jax.data.datasets import open_dataset
from structinit_jax.data.images import BadImageError
from structinit_jax.data.loader import HostLoader
from structinit_jax.errors import InputError

CLASSES = ["apple", "Birch", "cat"]


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


def test_slices_hold_some_of_every_class_and_partition_the_split(root, tmp_path_factory):
    dataset = open_dataset("folder", root)
    first, rest = values(dataset.split("train[:80%]")), values(dataset.split("train[80%:]"))
    assert (len(first), len(rest)) == (24, 6)
    assert first + rest == values(dataset.split("train"))
    assert {value // 10 for value in first} == {0, 1, 2}
    other = shutil.copytree(root, tmp_path_factory.mktemp("elsewhere") / "copy")
    assert values(open_dataset("folder", other).split("train")) == first + rest


def test_colors_are_read_as_gray(root):
    gray = open_dataset("folder", root, channels=1).split("val")
    with Image.open(root / "val" / "cat" / "deeper" / "0.png") as image:
        expected = np.asarray(image.convert("L"))
    pixels = next(pixels for pixels, label in read(gray) if label == 2)
    np.testing.assert_array_equal(pixels[..., 0], expected)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda root: root.rename(root.with_name("gone")), "there is no such folder"),
        (lambda root: [(root / s).rename(root / f"_{s}") for s in ("train", "val")], "no class"),
        (lambda root: (root / "val" / "cat").rename(root / "val" / "cats"), "have: 'cat'"),
        (lambda root: write_image(root / "val" / "dog" / "0.png", 0), "have: 'dog'"),
        (lambda root: [p.unlink() for p in (root / "train" / "cat").iterdir()], "train/cat holds"),
        (lambda root: [(root / "train" / n).rename(root / n) for n in CLASSES], "no class"),
    ],
)
def test_broken_folders_are_refused_by_name(root, change, reason):
    change(root)
    with pytest.raises(InputError, match=reason) as caught:
        open_dataset("folder", root).split("train+val")
    assert str(caught.value).startswith(f"config.data.data_dir={str(root)!r}: ")


def test_class_names_that_look_alike_are_told_apart(root):
    for split, form in (("train", "NFC"), ("val", "NFD")):
        write_image(root / split / unicodedata.normalize(form, "Käfer") / "0.png", 0)
    with pytest.raises(InputError, match=r"'K\\xe4fer'"):
        open_dataset("folder", root).split("val")


def test_only_images_are_read(root, capsys):
    cat = root / "train" / "cat"
    for name in (".ipynb_checkpoints", "@eaDir", "$RECYCLE.BIN", "lost+found"):
        write_image(cat / name / "0.png", 50)
        write_image(root / "train" / name / "0.png", 50)
    for name in ("1.heic", "Thumbs.db", ".4.png"):
        (cat / name).touch()
    os.mkfifo(cat / "pipe.png")
    (cat / "zero.png").symlink_to("/dev/zero")
    (cat / "link.png").symlink_to(cat / "0.bmp")
    (root / "validation").mkdir()
    write_image(root / "test" / "0.png", 0)  # as on Kaggle
    write_image(cat / "new.avif", 50)
    dataset = open_dataset("folder", root)
    assert dataset.class_names == sorted(CLASSES)
    assert len(dataset.split("train")) == 32
    with pytest.raises(InputError):  # has no classes, which matters only if it is used
        dataset.split("test")
    notes = capsys.readouterr().out
    assert "only train, val, test are read, not validation" in notes
    assert "these files are not read: 1 .db, 1 .heic, 2 devices and pipes" in notes


def test_names_need_not_be_text(root):
    for name in (b"caf\xe9", b"two\nlines"):
        write_image(root / "train" / os.fsdecode(name) / os.fsdecode(name + b".png"), 50)
    dataset = open_dataset("folder", root)
    source = dataset.split("train")
    assert dataset.class_names[2:] == ["caf\\udce9", "cat", "two\\nlines"]
    names = [image.name for image in source.images()]
    assert all(name.isprintable() for name in names)
    assert sum("caf\\udce9.png" in name for name in names) == 1


def test_bad_images_stop_or_are_left_out(root, capsys):
    bad = root / "train" / "cat" / "3.png"
    bad.write_bytes(bad.read_bytes()[:50])
    (root / "train" / "apple" / "1.PNG").write_bytes(b"<html>404</html>")
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    for crop in (None, RandomCrop(seed=0)):
        loader = HostLoader(open_dataset("folder", root).split("train"), mesh, 8, 1.0, crop)
        batches = loader.train_batches(batch_size=8, seed=0, start_step=0, num_steps=4)
        with pytest.raises(BadImageError, match=r"^folder 'train', example \d+ \(.*(cat/3|apple)"):
            list(batches)

    (root / "train" / "cat" / "gone.png").symlink_to(root / "nothing")
    source = open_dataset("folder", root).split("train", on_bad_image="skip")
    output = capsys.readouterr().out
    assert output.startswith("config.data.train_split='train': left out 3 bad images of 31:")
    assert all(name in output for name in ("cat/gone.png", "cat/3.png", "apple/1.PNG"))
    assert sorted(values(source)) == sorted(set(range(30)) - {1, 23})
    for path in (root / "val").rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(InputError, match=r"config\.data\.eval_split='val': none of its 6 images"):
        open_dataset("folder", root).split("val", "data.eval_split", "skip")


TINY_CLASSES = ["n02", "n03", "n01"]  # the archive's list is not sorted


def test_tiny_imagenet_has_the_labels_of_folder_and_table(tmp_path, monkeypatch):
    sizes = {"train": 3, "val": 4}
    small = dataclasses.replace(folder.TINY_IMAGENET, num_classes=3, num_examples=sizes)
    monkeypatch.setattr(folder, "TINY_IMAGENET", small)
    root = tmp_path / "tiny-imagenet-200"
    levels = {"n01": 0, "n02": 10, "n03": 20}  # ten times the label
    for name in TINY_CLASSES:
        write_image(root / "train" / name / "images" / f"{name}_0.png", levels[name], (64, 64))
    rows = list(enumerate(["n03", "n01", "n02", "n03"]))
    for number, name in rows:
        write_image(root / "val" / "images" / f"val_{number}.png", levels[name], (64, 64))
    table = "".join(f"val_{number}.png\t{name}\t0\t32\t44\t62\n" for number, name in rows)
    (root / "val" / "val_annotations.txt").write_text(table)
    (root / "wnids.txt").write_text("\n".join(TINY_CLASSES) + "\n")
    for place in (root, tmp_path):
        dataset = open_dataset("tiny_imagenet", place)
        assert dataset.class_names == ["n01", "n02", "n03"]
        for split, size in sizes.items():
            examples = read(dataset.split(split))
            assert len(examples) == size
            assert all(pixels[0, 0, 0] == 10 * label for pixels, label in examples)
    next((root / "train" / "n01").rglob("*.png")).unlink()
    for place in (root, tmp_path / "nothing"):
        with pytest.raises(InputError, match=r"^config\.data\.data_dir="):
            open_dataset("tiny_imagenet", place)
