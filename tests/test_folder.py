import numpy as np
import pytest
from PIL import Image

from structinit_jax.data.crop import CropOptions
from structinit_jax.data.datasets import open_dataset
from structinit_jax.data.decode import BadImageError
from structinit_jax.data.examples import LazyExamples, load_examples
from structinit_jax.data.source import Source
from structinit_jax.data.stream import train_batches
from structinit_jax.errors import InputError

CLASSES = ["apple", "Birch", "cat"]


def write_image(path, value, size=(9, 7)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (value, 255 - value, 0)).save(path)


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
    assert isinstance(source, Source)
    examples = source.read(list(range(30)))
    # Sorted as Python sorts: capitals first.
    labels = {name: label for label, name in enumerate(sorted(CLASSES))}
    expected = {10 * i + n: labels[name] for i, name in enumerate(CLASSES) for n in range(10)}
    assert {int(e["image"][0, 0, 0]): e["label"] for e in examples} == expected
    assert examples[0]["image"].shape == (7, 9, 3)
    assert source.column("label") == [e["label"] for e in examples]
    encoded, label = source.open(4)
    np.testing.assert_array_equal(encoded.decode(), source[4]["image"])
    assert label == source[4]["label"]


def test_slices_hold_some_of_every_class_and_partition_the_split(root):
    dataset = open_dataset("folder", root)

    def values(spec):
        source = dataset.split(spec)
        return [int(source[i]["image"][0, 0, 0]) for i in range(len(source))]

    first, rest = values("train[:80%]"), values("train[80%:]")
    assert (len(first), len(rest)) == (24, 6)
    assert first + rest == values("train")
    assert {value // 10 for value in first} == {0, 1, 2}
    assert values("val[:1]+train[:2]") == values("val")[:1] + first[:2]
    with pytest.raises(InputError, match=r"data\.eval_split='test'.*'train' \(30\), 'val' \(6\)"):
        dataset.split("test", "data.eval_split")


def test_order_does_not_depend_on_where_the_folder_lies(root, tmp_path_factory):
    import shutil

    other = tmp_path_factory.mktemp("elsewhere") / "copy"
    shutil.copytree(root, other)
    one, two = (open_dataset("folder", path).split("train") for path in (root, other))
    assert [e["image"].sum() for e in one.read(list(range(30)))] == [
        e["image"].sum() for e in two.read(list(range(30)))
    ]


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
        open_dataset("folder", root)
    assert str(caught.value).startswith(f"data.data_dir={str(root)!r}: ")
    assert "DIR/train/CLASS/*.jpg" in str(caught.value)


def test_folder_needs_a_data_dir():
    with pytest.raises(InputError, match=r"data\.data_dir=''"):
        open_dataset("folder", None)


def test_bad_images_stop_or_are_left_out(root, capsys):
    bad = root / "train" / "cat" / "3.png"
    bad.write_bytes(bad.read_bytes()[:50])
    (root / "train" / "apple" / "1.PNG").write_bytes(b"<html>404</html>")
    dataset = open_dataset("folder", root)
    with pytest.raises(BadImageError, match=r"folder 'train', example \d+ \(.*(cat/3|apple/1)"):
        load_examples(dataset.split("train"), dataset.info, image_size=8)

    source = dataset.split("train", on_bad_image="skip")
    said = capsys.readouterr().out
    assert said.startswith("data.train_split='train': 2 of 30 images are bad and left out:")
    assert "cat/3.png" in said
    assert "apple/1.PNG): cannot be decoded (no known image format)" in said
    values = [int(e["image"][0, 0, 0]) for e in source.read(list(range(len(source))))]
    assert sorted(values) == sorted(set(range(30)) - {1, 23})
    again = dataset.split("train", on_bad_image="skip")
    assert [e["label"] for e in again.read(list(range(28)))] == source.column("label")
    with pytest.raises(BadImageError, match=r"\(.*apple/1\.PNG|\(.*cat/3"):
        dataset.split("train").read(list(range(30)))


def test_skip_says_nothing_of_good_images_and_refuses_all_bad(root, capsys):
    assert len(open_dataset("folder", root).split("val", on_bad_image="skip")) == 6
    assert capsys.readouterr().out == ""
    for path in (root / "val").rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(InputError, match=r"data\.eval_split='val': none of its 6 images"):
        open_dataset("folder", root).split("val", "data.eval_split", "skip")
    with pytest.raises(InputError, match=r"data\.on_bad_image='ignore'"):
        open_dataset("folder", root).split("val", on_bad_image="ignore")


def test_bad_image_stops_a_lazy_run_by_name(root):
    (root / "train" / "cat" / "3.png").write_bytes(b"nothing")
    source = open_dataset("folder", root).split("train")
    for options in (None, CropOptions(seed=0)):
        examples = LazyExamples(source, 8, random_resized_crop=options)
        batches = train_batches(examples, batch_size=10, seed=0, start_step=0, num_steps=3)
        with pytest.raises(BadImageError, match=r"^folder 'train', example \d+ \(.*cat/3\.png\)"):
            list(batches)
