import os
import types
from pathlib import Path

import fork_main
import numpy as np
import pytest
from test_folder import write_image
from tfds_sets import source_of

from structinit_jax import prepare
from structinit_jax.data.datasets import open_dataset
from structinit_jax.errors import InputError


def test_the_report_names_classes_sizes_and_bad_images(tmp_path):
    for folder in ("train/cat", "train/dog", "val/cat", "val/dog"):
        for number in range(3):
            write_image(tmp_path / folder / f"{number}.png", 255, size=(20 + number, 10))
    (tmp_path / "train" / "dog" / "1.png").write_bytes(b"nothing")
    for name in (".0.png", "0.heic", "1.HEIC", os.fsdecode(b"2.\xff")):
        (tmp_path / "train" / "dog" / name).touch()
    (tmp_path / "test" / "cat").mkdir(parents=True)
    arguments = ("--name=folder", f"--data_dir={tmp_path}", "--check=0")
    said = fork_main.run(*arguments, module=prepare.__name__, exit_code=2).stdout
    for line in (
        f"{tmp_path.name}: 2 classes (cat, dog), 3 channels",
        r"left out: hidden (1), .heic (2), .\udcff (1)",
        "train: 6 examples; checked all",
        "train: 2 of 2 classes, with 2 to 3 of the checked examples each",
        "val: 10 to 10 pixels high, 20 to 22 wide",
        "val: pixels: mean (1.0, 0.0, 0.0), std (0.0, 0.0, 0.0)",
        "test: no examples",
    ):
        assert f"{line}\n" in said
    assert said.count("bad: ") == 1
    assert "dog/1.png" in said


def test_files_of_pixels_can_have_any_number_of_channels(tmp_path):
    write_image(tmp_path / "train" / "cat" / "0.png", 255)
    np.save(tmp_path / "train" / "cat" / "1.npy", np.full((4, 5, 5), 51, np.uint8))
    arguments = ("--name=folder", f"--data_dir={tmp_path}")
    said = fork_main.run(*arguments, "--channels=5", module=prepare.__name__).stdout
    assert said.startswith(f"{tmp_path.name}: 1 classes (cat), 5 channels\n")
    assert "left out: .png (1)\n  train: 1 examples; checked all" in said
    assert "train: pixels: mean (0.2, 0.2, 0.2, 0.2, 0.2), std (0.0" in said
    dataset = open_dataset("folder", tmp_path)  # of color images
    assert (len(dataset.split("train")), dict(dataset.left_out)[".npy"]) == (1, 1)
    (tmp_path / "train" / "cat" / "0.png").unlink()
    message = fork_main.error_of(*arguments, module=prepare.__name__)
    assert "for channels=3, there are no class folders with images (.jpg, " in message


def test_as_many_images_are_checked_as_asked_and_the_rest_is_counted():
    images = [np.zeros((8, 8), np.uint8)] * 1099 + [b"nothing"]
    source = source_of(images, [0] * 1100, ["cat"])
    for number in (0, 1100, 20_000):
        first, *_, last = prepare.describe_split(source, 1, number)
        assert first == "1,100 examples; checked all"
        assert last.startswith("bad: ")
    first, *_ = prepare.describe_split(source, 1, 9)
    assert "checked 9 " in first
    assert "--check=0 also decodes the other 1,091" in first
    _, problem = prepare.describe_split(source.select(np.array([1099])), 1, 0)
    assert problem.startswith("bad: ")


def test_labels_that_are_no_classes_are_bad():
    source = source_of(np.zeros((4, 8, 8), np.uint8), (-1, 0, 2, 7), ["cat", "dog"])
    lines = prepare.describe_split(source, 2, 0)
    assert lines[1].startswith("1 of 2 classes, with 0 to 1 of ")
    assert lines[-1] == "bad: labels [2, 7], expected 0 to 1"  # -1 stands for no label


def test_mean_and_deviation_are_those_of_all_pixels_by_channel():
    images = np.random.default_rng(0).integers(0, [256, 128, 64], (30, 9, 7, 3), np.uint8)
    images[..., 2] = 83  # of which the variance is rounded to a negative number
    source = source_of(images, [-1] * 30, ["a"])
    pixels = images.reshape(-1, 3) / 255
    expected = [tuple(f(pixels, axis=0).round(5).tolist()) for f in (np.mean, np.std)]
    assert list(prepare.mean_and_std(source)) == expected


def test_fields_of_a_config_are_refused():
    arguments = ("--name=digits", "--config.data.image_size=8")
    message = fork_main.error_of(*arguments, module=prepare.__name__)
    assert "prepare has no --config.data.image_size" in message


def test_stock_builders_need_tensorflow(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"^--name='cifar10' .*TensorFlow.* '\.\[prepare\]"):
        prepare.prepare("cifar10", tmp_path)


def test_archives_are_taken_from_the_folder_of_the_flag(tmp_path, monkeypatch):
    called = {}

    def find_builder(name, data_dir):
        called.update(name=name, data_dir=data_dir)
        return builder

    builder = types.SimpleNamespace(data_path=tmp_path / "imagenet2012")
    builder.download_and_prepare = lambda **options: called.update(options)
    monkeypatch.setattr(prepare.importlib.util, "find_spec", lambda name: "found")
    monkeypatch.setattr(prepare, "find_builder", find_builder)
    prepare.prepare("imagenet2012", "~/data", manual_dir="archives")
    assert called["download_config"].manual_dir == "archives"
    assert called["file_format"] == "array_record"
    assert called["data_dir"] == str(Path("~/data").expanduser())
    called.clear()
    builder.data_path.mkdir()
    for name in ("imagenet2012", "digits", "mine:images"):  # need no preparation
        prepare.prepare(name)
    assert called == {"name": "imagenet2012", "data_dir": None}
