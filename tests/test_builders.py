"""Data sets of TFDS without TensorFlow, and `structinit_jax.prepare`."""

import json
import resource

import fork_main
import numpy as np
import pytest
from PIL import Image
from tfds_sets import write_small_set

from structinit_jax import prepare
from structinit_jax.data.datasets import open_dataset
from structinit_jax.data.source import Dataset, DatasetInfo, digest
from structinit_jax.errors import InputError


def test_a_prepared_set_is_read(tmp_path):
    write_small_set(tmp_path)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    dataset = open_dataset("imagenet_sketch", tmp_path)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, 10_000)
    assert dataset.info == DatasetInfo(1000, 3, {"test": 2})
    assert len(dataset.class_names) == 1000
    for image, label in dataset.split("test").read([1, 0]):
        pixels = np.broadcast_to(np.uint8([label, 0, 9]), (2, 3, 3))
        np.testing.assert_array_equal(image.decode(), pixels)
    gray, _ = open_dataset("imagenet_sketch", tmp_path, channels=1).split("test")[0]
    assert gray.decode().shape == (2, 3, 1)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("cifr10", "did you mean 'cifar10'"),
        ("xyzzy", "did you mean '[^ ]*' or '[^ ]*' or '[^ ]*'\\?$"),  # and not all 300
        ("digits:9.9.9", "did you mean 'digits'"),
        ("imagenet2012", r"structinit_jax\.prepare --name=imagenet2012 --data_dir="),
    ],
)
def test_sets_that_cannot_be_opened_are_named(tmp_path, name, reason):
    with pytest.raises(InputError, match=rf"data set '{name}'(.|\n)*{reason}"):
        open_dataset(name, tmp_path)


def test_damaged_sets_and_those_prepared_as_tfrecord_are_named(tmp_path):
    write_small_set(tmp_path)
    info = tmp_path / "imagenet_sketch" / "1.0.0" / "dataset_info.json"
    info.write_text(info.read_text().replace("array_record", "tfrecord"))
    with pytest.raises(InputError, match=rf"tfds convert_format --dataset_version_dir={tmp_path}"):
        open_dataset("imagenet_sketch", tmp_path)
    for path in (info, info.with_name("features.json")):
        text = path.read_text()
        for damaged in ("{", "[]", "[" * 100_000):
            path.write_text(damaged)
            with pytest.raises(InputError, match=rf"open data set 'imagenet_sketch'.*{tmp_path}"):
                open_dataset("imagenet_sketch", tmp_path)
        path.write_text(text)


@pytest.mark.parametrize("name", ["imagenet_sketch", "not_of_tfds"])
@pytest.mark.parametrize("key", ["pythonClassName", "python_class_name", "type"])
def test_classes_that_a_set_names_are_not_imported(tmp_path, monkeypatch, name, key):
    write_small_set(tmp_path)
    (tmp_path / "imagenet_sketch").rename(tmp_path / name)
    folder = tmp_path / name / "1.0.0"
    info = folder / "dataset_info.json"
    info.write_text(info.read_text().replace("imagenet_sketch", name))
    features = folder / "features.json"
    content = json.loads(features.read_text())
    if key == "type":
        content = {"type": "payload.Text", "content": {}}
    else:
        del content["featuresDict"]["features"]["file_name"]["pythonClassName"]
        content["featuresDict"]["features"]["file_name"][key] = "payload.Text"
    features.write_text(json.dumps(content))
    (tmp_path / "payload.py").write_text("raise KeyboardInterrupt('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match=r"payload\.Text"):
        open_dataset(name, tmp_path)


def test_the_digest_covers_the_images(tmp_path):
    def of_set(folder, blue):
        write_small_set(tmp_path / folder, blue=blue)
        dataset = open_dataset("imagenet_sketch", tmp_path / folder)
        return digest(dataset.split("test"), dataset.class_names)

    assert of_set("here", 9) == of_set("there", 9) != of_set("changed", 10)


# -- structinit_jax.prepare ------------------------------------------------------------------------


def test_the_report_names_classes_sizes_and_bad_images(tmp_path):
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(3):
                image = Image.new("RGB", (20 + number, 10), "red")
                image.save(tmp_path / split / name / f"{number}.png")
    (tmp_path / "train" / "dog" / "1.png").write_bytes(b"nothing")
    for name in (".0.png", "0.heic", "1.HEIC"):
        (tmp_path / "train" / "dog" / name).touch()
    arguments = ("--name=folder", f"--data_dir={tmp_path}", "--check=0")
    result = fork_main.run(*arguments, module=prepare.__name__)
    assert result.returncode == 2
    said = result.stdout
    for line in (
        f"{tmp_path.name}: 2 classes (cat, dog), 3 channels",
        "left out: hidden (1), .heic (2)",
        "train: 6 examples; checked all",
        "train: 2 of 2 classes in these, 2 to 3 examples of each",
        "val: 10 to 10 pixels high, 20 to 22 wide",
        "val: pixels: mean (1.0, 0.0, 0.0), std (0.0, 0.0, 0.0)",
    ):
        assert f"{line}\n" in said
    assert said.count("bad: ") == 1
    assert "dog/1.png" in said


def test_mean_and_deviation_are_those_of_all_pixels_by_channel():
    images = np.random.default_rng(0).integers(0, [256, 128, 64], (30, 9, 7, 3), np.uint8)
    records = [{"image": image, "label": -1} for image in images]
    source = Dataset.from_records("noise", {"train": records}, ["a"]).split("train")
    pixels = images.reshape(-1, 3) / 255
    expected = [tuple(f(pixels, axis=0).round(3).tolist()) for f in (np.mean, np.std)]
    assert list(prepare.mean_and_std(source)) == expected


def test_stock_builders_need_tensorflow(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"TensorFlow to prepare(.|\n)*pip install '\.\[prepare\]"):
        prepare.prepare("cifar10", tmp_path)
