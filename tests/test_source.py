from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tfds_sets import source_of

from structinit_jax.data import source as source_lib
from structinit_jax.data.datasets import open_dataset
from structinit_jax.data.images import BadImageError
from structinit_jax.data.source import Dataset, DatasetInfo, digest, parse_split, split_size
from structinit_jax.errors import InputError

INFO = DatasetInfo(10, 1, {"train": 57, "test": 9, "extra": 5})
PIXELS = np.zeros((4, 4, 3), np.uint8)


@pytest.mark.parametrize(
    "spec",
    [
        *("train", "train[:20]", "train[10%:]", "train[33%:66%]", "train[-3:]", "train[:-10%]"),
        *("train[:10]+test", "train[99%:] + train[:1%]", "all", "test[-25%:]", "train[1_0:]"),
        "test[-0:]",
    ],
)
def test_splits_are_tfds(spec):
    from tensorflow_datasets import core

    sizes = INFO.num_examples
    splits = {n: core.SplitInfo(name=n, shard_lengths=[k], num_bytes=0) for n, k in sizes.items()}
    theirs = core.ReadInstruction.from_spec(spec).to_absolute(splits)
    expected = [(p.splitname, range(p.from_ or 0, p.to or sizes[p.splitname])) for p in theirs]
    assert parse_split(spec, INFO) == expected
    assert split_size(spec, INFO) == sum(len(part) for _, part in expected)


@pytest.mark.parametrize(
    "spec",
    [
        *("trian", "train[:58]", "train[-58:]", "train[", "train[:-0]"),
        *("", "train[90%:10%]", "train[:1shard]", "train[:_]"),
        *("train[10:50%]", "train[10%:50]"),  # TFDS takes the unit of either bound for both
    ],
)
def test_bad_splits_are_refused_by_name(spec):
    with pytest.raises(InputError, match=r"^split='.* 'train' \(57\), 'test'"):
        parse_split(spec, INFO)


def test_slices_and_reads_agree():
    dataset = open_dataset("digits")
    part, train, test = map(dataset.split, ("train[100:110]+test[:5]", "train", "test"))
    expected = [*train.read(range(100, 110)), *test.read(range(5))]
    for (image, label), (right, right_label) in zip(part.read(range(15)), expected, strict=True):
        np.testing.assert_array_equal(image.decode(), right.decode())
        assert label == right_label
    assert part.labels().tolist() == [label for _, label in expected]
    some = [3, 14, 2, 10]  # from both parts, out of order
    assert [label for _, label in part.read(some)] == part.labels()[some].tolist()


def test_images_are_files_bytes_or_pixels(tmp_path):
    image = Image.new("RGB", (6, 5), (10, 20, 30))
    image.save(tmp_path / "0.png")
    content = (tmp_path / "0.png").read_bytes()
    images = [tmp_path / "0.png", content, np.asarray(image), bytearray(content)]
    images += [np.frombuffer(content, np.uint8), image]
    source = source_of(images, range(6), range(6), name="mixed")
    for found, _ in source.read(range(5)):
        np.testing.assert_array_equal(found.decode(), np.asarray(image))
        assert found.checksum()
    with pytest.raises(InputError, match=r"^mixed 'train', example 5=<PIL.* must be the path"):
        source[5]
    assert source[0][0].name == f"mixed 'train', example 0 ({tmp_path}/0.png)"
    chosen = source.select(np.array([True, False, True, False, False, False]))
    assert [label for _, label in chosen.read([0, 1])] == chosen.labels().tolist() == [0, 2]
    (tmp_path / "0.png").unlink()
    with pytest.raises(BadImageError, match=r"0\.png\): No such file"):
        source[0][0].decode()


@pytest.mark.parametrize("field", ["image", "label"])
def test_examples_without_an_image_or_a_label_are_named(field):
    record = {"image": PIXELS, "label": 0}
    del record[field]
    dataset = Dataset.from_records("mine", {"train": [record]}, ["a"])
    with pytest.raises(InputError, match=rf"^mine 'train', example 0 needs a field '{field}'"):
        dataset.split("train")[0]


@pytest.mark.parametrize("label", [2, -1, "a", 0.5])
def test_labels_that_are_no_classes_are_named(label):
    source = source_of([PIXELS] * 2, [np.int64(1), label], ["a", "b"], name="mine")
    with pytest.raises(InputError, match=rf"^mine 'train', example 1: label {label!r} is not"):
        list(source.read([0, 1]))


def test_common_examples_of_two_splits_are_counted():
    for first, second, common in (
        ("train", "test", 0),
        ("train[:90%]", "train[90%:]", 0),
        ("train[:20]+test", "train[15:30]+test[3:]", 5 + 6),
        ("train+train", "train", 57),
    ):
        assert source_lib.count_common(first, second, INFO) == common


@pytest.fixture
def root(tmp_path):
    """An image folder with 20 images in train and 20 in val."""
    for name in ("train/ant", "train/bee", "val/ant", "val/bee"):
        folder = tmp_path / "here" / name
        folder.mkdir(parents=True)
        for number in range(10):
            (folder / f"{number}.png").write_bytes(b"pixels")  # the digest does not decode images
    return tmp_path / "here"


def of_folder(root, *specs):
    dataset = open_dataset("folder", root)
    return [digest(dataset.split(spec), dataset.class_names) for spec in specs]


CHANGES = {
    "another class": lambda folder: (folder / "ant/3.png").rename(folder / "bee/30.png"),
    "another name": lambda folder: (folder / "ant/3.png").rename(folder / "ant/30.png"),
    "one more": lambda folder: (folder / "bee/30.png").touch(),
    "other pixels": lambda folder: (folder / "bee/7.png").write_bytes(b"others"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_files_change_the_digest_of_their_split(root, change):
    train, val, both = of_folder(root, "train", "val", "val+train")
    CHANGES[change](root / "train")
    now, val_now, both_now = of_folder(root, "train", "val", "val+train")
    assert (now == train, val_now == val, both_now == both) == (False, True, False)


def test_the_digest_is_of_the_chosen_examples_in_their_order(root):
    specs = ("train", "train[:10]", "train[10:]", "train[10:]+train[:10]")
    before = of_folder(root, *specs)
    assert len(set(before)) == len(specs)
    (root / "train" / "ant" / "notes.txt").touch()
    assert of_folder(root.rename(root.parent / "elsewhere"), *specs) == before


def test_of_a_large_set_all_sizes_and_a_sample_are_covered(root, monkeypatch):
    monkeypatch.setattr(source_lib, "SMALL_SET", 20)
    monkeypatch.setattr(source_lib, "MAX_DIGESTED", 5)
    (before,) = of_folder(root, "train")
    sampled = open_dataset("folder", root).split("train").evenly_spaced(5)
    paths = [Path(sampled.parts[0][index]["image"]) for index in sampled.rows[:, 1].tolist()]
    for path in (root / "train").rglob("*.png"):
        path.write_bytes(b"others")
        assert (of_folder(root, "train") == [before]) == (path not in paths)
        path.write_bytes(b"longer than before")
        assert of_folder(root, "train") != [before]
        path.write_bytes(b"pixels")
    # The labels of a list are covered too.
    records = [{"image": PIXELS, "label": 0} for _ in range(20)]
    listed = Dataset.from_records("mine", {"train": records}, "ab").split("train")
    before = digest(listed, "ab")
    records[1]["label"] = 1
    assert digest(listed, "ab") != before


def test_of_a_small_set_all_images_are_covered(root, monkeypatch):
    monkeypatch.setattr(source_lib, "MAX_DIGESTED", 1)
    (before,) = of_folder(root, "train")
    for path in (root / "train").rglob("*.png"):
        path.write_bytes(b"others")
        assert of_folder(root, "train") != [before]
        path.write_bytes(b"pixels")


@pytest.mark.parametrize("kind", [list, tuple])  # a tuple is only sampled, like other records
def test_the_digest_covers_images_labels_and_classes_of_a_list(kind):
    def of_list(*labels, last=PIXELS, names="ab"):
        records = [{"image": PIXELS, "label": label} for label in labels]
        records[-1]["image"] = last
        dataset = Dataset.from_records("mine", {"train": kind(records)}, names)
        return digest(dataset.split("train"), dataset.class_names)

    images = (PIXELS, PIXELS + 1, PIXELS.reshape(2, 8, 3), PIXELS.tobytes())
    digests = [of_list(0, 1, 1, last=image) for image in images]
    digests += [of_list(0, 0, 1), of_list(0, 1), of_list(0, 1, 1, names="ba")]
    assert len(set(digests)) == len(digests)
    assert of_list(np.int32(0), 1, 1) == digests[0]
