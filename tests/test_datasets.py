import io
import json
import os
import sys

import jax
import numpy as np
import pytest
from PIL import Image

from structinit_jax.data.datasets import Dataset, num_cores, open_dataset
from structinit_jax.data.loader import make_loader
from structinit_jax.errors import InputError

# A user's own module: a new data set is this much, and its name in the config.
MODULE = '''
import numpy as np
from structinit_jax.data.datasets import Dataset

def colors(data_dir):
    """Plain images, named in the config as data.name="my_module:colors"."""
    def records(n):
        return [
            {"image": np.full((4, 4, 3), 50 * (i % 3), np.uint8), "label": i % 3}
            for i in range(n)
        ]
    splits = {"train": records(10), "test": records(4)}
    return Dataset.from_records(f"colors of {data_dir}", splits, ["black", "gray", "light"])

def nothing(data_dir):
    return {"train": []}
'''


@pytest.fixture
def my_module(tmp_path, monkeypatch):
    (tmp_path / "my_colors.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "my_colors"
    sys.modules.pop("my_colors", None)


def pixels(source, index):
    return source[index][0].decode()


def test_a_data_set_of_the_users_own_is_loaded_in_batches(my_module):
    dataset = open_dataset(f"{my_module}:colors", "/data")
    assert dataset.name == "colors of /data"
    assert dataset.info.num_classes == 3
    assert dataset.info.num_examples == {"train": 10, "test": 4}
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    loader = make_loader(dataset.split("train[2:]+test"), mesh, image_size=4)
    batches = loader.train_batches(batch_size=8, seed=0, start_step=0, num_steps=3)
    labels = []
    for batch in jax.device_get(list(batches)):
        for image, label in zip(batch["image"], batch["label"], strict=True):
            np.testing.assert_array_equal(image, np.full((4, 4, 3), 50 * label))
            labels.append(int(label))
    expected = [i % 3 for i in (*range(2, 10), *range(4))]
    assert sorted(labels) == sorted(2 * expected)


@pytest.mark.parametrize(
    "name", ["no_such_module:colors", "my_colors:no_such", "my_colors:nothing"]
)
def test_a_data_set_of_the_users_own_that_does_not_work_is_named(my_module, name):
    with pytest.raises(InputError, match=f"config.data.name='{name}'"):
        open_dataset(name)


def test_versions_and_namespaces_are_tfds_names(tmp_path):
    for name in ("digits:9.9.9", "cifar10:9.9.9", "huggingface:nothing"):
        with pytest.raises(InputError, match=rf"config\.data\.name='{name}': TFDS"):
            open_dataset(name, tmp_path)


@pytest.mark.parametrize("name", ["", "../cifar10", "my module:f", "c:", "cifar10;ls"])
def test_malformed_names_are_refused(name, tmp_path):
    with pytest.raises(InputError, match=r"config\.data\.name=.* is not the name of a data set"):
        open_dataset(name, tmp_path)


def test_slices_and_reads_agree(data_dir):
    dataset = open_dataset("digits", data_dir)
    part, whole = dataset.split("train[100:110]+test[:5]"), dataset.split("train")
    test = dataset.split("test")
    assert len(part) == 15
    for number, (image, label) in enumerate(part.read(range(15))):
        source, index = (whole, 100 + number) if number < 10 else (test, number - 10)
        np.testing.assert_array_equal(image.decode(), pixels(source, index))
        assert label == source[index][1] == part.labels()[number]
    backwards = part.read(list(range(14, -1, -1)))
    assert [label for _, label in backwards] == part.labels()[::-1].tolist()
    with pytest.raises(InputError, match=r"config\.data\.eval_split='trian'.*'train' \(1,438\)"):
        dataset.split("trian", "data.eval_split")


def make_dataset(tmp_path, labels=(0, 1, 2)):
    """One image each as a file, as bytes and as pixels; all of one color."""
    image = Image.new("RGB", (6, 5), (10, 20, 30))
    image.save(tmp_path / "0.png")
    file = io.BytesIO()
    image.save(file, "PNG")
    images = [tmp_path / "0.png", file.getvalue(), np.asarray(image)]
    records = [{"image": x, "label": y} for x, y in zip(images, labels, strict=True)]
    return Dataset.from_records("mixed", {"train": records}, ["a", "b", "c"])


def test_images_are_files_bytes_or_pixels(tmp_path):
    source = make_dataset(tmp_path).split("train")
    for number in range(3):
        np.testing.assert_array_equal(
            pixels(source, number), np.full((5, 6, 3), (10, 20, 30), np.uint8)
        )
    assert source[0][0].name == f"mixed 'train', example 0 ({tmp_path}/0.png)"
    (tmp_path / "0.png").unlink()
    with pytest.raises(
        InputError, match=r"0\.png: there is no such file\. Restore .*on_bad_image='skip'"
    ):
        source[0]
    (tmp_path / "0.png").mkdir()
    with pytest.raises(InputError, match=r"0\.png: cannot be read"):
        source[0]


def test_labels_out_of_range_are_refused_by_name(tmp_path):
    source = make_dataset(tmp_path, labels=(1, 2, 3)).split("train")
    assert [label for _, label in source.read([0, 1])] == [1, 2]
    with pytest.raises(
        InputError, match=r"^mixed 'train', example 2: its label is 3, expected 0 to 2"
    ):
        source[2]


def test_threads_are_as_many_as_the_cores_that_the_process_may_use(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5}, raising=False)
    assert num_cores() == 2
    monkeypatch.delattr(os, "sched_getaffinity")
    assert num_cores() == 64


PIXELS = np.zeros((4, 4, 3), np.uint8)
STRUCTURED = np.zeros(1, [("image", np.uint8, (4, 4, 3)), ("label", int)])[0]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"img": PIXELS, "label": 0}, "its record must be a dict .* got dict without 'image'"),
        ({"image": PIXELS}, "its record must be a dict .* got dict without 'label'"),
        ((PIXELS, 0), r"its record must be a dict .* got tuple\."),
        (STRUCTURED, r"its record must be a dict .* got void\."),
        ({"image": PIXELS.tolist(), "label": 0}, "its 'image' is of type list, expected encoded"),
        ({"image": Image.new("L", (4, 4)), "label": 0}, "its 'image' is of type Image"),
        ({"image": PIXELS, "label": "cat"}, "its label is 'cat', expected 0 to 1"),
        ({"image": PIXELS, "label": 0.5}, "its label is 0.5, expected 0 to 1"),
        ({"image": PIXELS, "label": np.array([0, 1])}, r"its label is array\(\[0, 1\]\), expected"),
        ({"image": PIXELS, "label": None}, "its label is None, expected 0 to 1"),
        ({"image": PIXELS, "label": np.inf}, "its label is inf, expected 0 to 1"),
    ],
)
@pytest.mark.parametrize("on_bad_image", ["stop", "skip"])
def test_records_of_another_form_are_refused(record, reason, on_bad_image):
    records = [{"image": PIXELS, "label": np.int64(1)}, record]
    dataset = Dataset.from_records("mine", {"train": records}, ["a", "b"])
    with pytest.raises(InputError, match=f"^mine 'train', example 1: {reason}"):
        dataset.split("train", on_bad_image=on_bad_image).read([0, 1])


def test_records_that_return_too_few_examples_are_refused():
    class Short(list):
        def __getitems__(self, indices):
            return [self[index] for index in indices[1:]]

    records = Short([{"image": PIXELS, "label": 0}] * 3)
    source = Dataset.from_records("mine", {"train": records}, ["a"]).split("train")
    with pytest.raises(InputError, match=r"^Short.__getitems__ returned 1 examples for 2 indices"):
        source.read([0, 1])


def test_images_of_another_size_than_declared_are_refused():
    def first(shape):
        records = [{"image": np.zeros((4, 6, 3), np.uint8), "label": 0}]
        return Dataset.from_records("mine", {"train": records}, ["a"], shape).split("train")[0]

    for shape in ((4, 6, 3), (None, 6, 3), (None, None, 1)):
        assert first(shape)[0].decode().shape == (4, 6, shape[-1])
    for shape in ((4, 4, 3), (5, None, 3)):
        with pytest.raises(InputError, match=r"^mine 'train', example 0: it has 4x6 pixels, but"):
            first(shape)


def test_class_names_are_text():
    """A checkpoint holds them as JSON."""
    names = np.unique([3, 5, 3])
    dataset = Dataset.from_records("mine", {"train": []}, names)
    assert json.loads(json.dumps(list(dataset.class_names))) == ["3", "5"]
    assert dataset.info.num_classes == 2


@pytest.mark.parametrize("shape", [(4, 4, 4), (None, None, 2)])
def test_other_numbers_of_channels_are_refused(shape):
    with pytest.raises(InputError, match=r"^mine: image_shape=.* with 1 or 3 channels"):
        Dataset.from_records("mine", {"train": []}, ["a"], shape)


def test_a_split_named_all_is_refused():
    with pytest.raises(InputError, match="no split can be named 'all'"):
        Dataset.from_records("mine", {"all": []}, ["a"])


def test_selected_examples_keep_their_labels(tmp_path):
    source = make_dataset(tmp_path).split("train").relabel(np.array([7, 8, 9]))
    chosen = source.select(np.array([True, False, True]))
    assert [label for _, label in chosen.read([0, 1])] == [7, 9]
    assert chosen.labels().tolist() == [7, 9]
    assert chosen.column("label") == [0, 2]
