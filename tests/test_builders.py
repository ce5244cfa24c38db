"""Data sets of TFDS without TensorFlow, and `structinit_jax.prepare`."""

import gzip
import hashlib
import shutil
import struct

import fork_main
import numpy as np
import pytest
from PIL import Image

from structinit_jax import prepare
from structinit_jax.data import builders
from structinit_jax.data.datasets import CATALOG, open_dataset
from structinit_jax.data.source import Dataset
from structinit_jax.errors import InputError


def idx_bytes(array):
    header = struct.pack(f">BBBB{array.ndim}i", 0, 0, 8, array.ndim, *array.shape)
    return header + array.astype(np.uint8).tobytes()


def assert_holds(source, pixels, labels):
    """Compares in sorted order, since TFDS shuffles while it prepares."""
    images = [image.decode() for image, _ in source.read(range(len(source)))]
    rows = [
        np.concatenate([np.reshape(array, (len(y), -1)), np.c_[y]], axis=1)
        for array, y in ((images, source.labels()), (pixels, labels))
    ]
    found, expected = (each[np.lexsort(each.T)] for each in rows)
    np.testing.assert_array_equal(found, expected)


def test_digits_are_sklearns_in_the_documented_split(data_dir):
    from sklearn.datasets import load_digits

    digits = load_digits()
    dataset = open_dataset("digits", data_dir)
    assert dataset.info == CATALOG["digits"]
    is_test = np.arange(1797) % 5 == 4
    for split, chosen in (("train", ~is_test), ("test", is_test)):
        pixels = np.rint(digits.images[chosen] * 255 / 16)
        assert_holds(dataset.split(split), pixels, digits.target[chosen])
    gray, color = (open_dataset("digits", data_dir, channels=n).split("test")[0] for n in (1, 3))
    assert gray[0].decode().shape == (8, 8, 1)
    np.testing.assert_array_equal(color[0].decode(), np.repeat(gray[0].decode(), 3, axis=-1))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("cifr10", "did you mean 'cifar10'"),
        ("digits:9.9.9", "TFDS"),
        ("imagenet2012", r"structinit_jax\.prepare --name=imagenet2012 --data_dir="),
    ],
)
def test_sets_that_cannot_be_opened_are_named(tmp_path, name, reason):
    with pytest.raises(InputError, match=rf"^config\.data\.name='{name}'(.|\n)*{reason}"):
        open_dataset(name, tmp_path)


def test_damaged_sets_and_those_prepared_as_tfrecord_are_named(tmp_path, data_dir):
    shutil.copytree(f"{data_dir}/digits", tmp_path / "digits")
    info = tmp_path / "digits" / "1.0.0" / "dataset_info.json"
    info.write_text(info.read_text().replace("array_record", "tfrecord"))
    with pytest.raises(InputError, match=rf"tfds convert_format --dataset_version_dir={tmp_path}"):
        open_dataset("digits", tmp_path)
    info.write_text("{")
    with pytest.raises(InputError, match=rf"config\.data\.name='digits'.*{tmp_path}"):
        open_dataset("digits", tmp_path)


def test_fashion_mnist_from_files(tmp_path, monkeypatch):
    rng, sums, written = np.random.default_rng(0), {}, {}
    for name in builders.CHECKSUMS:
        size = 6 if name.startswith("train") else 3
        array = rng.integers(0, 9, (size, 28, 28) if "images" in name else size)
        written[name] = array
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(idx_bytes(array)))
        sums[name] = hashlib.sha256(idx_bytes(array)).hexdigest()
    with pytest.raises(InputError, match=r"train-images.*gz is not the original file"):
        open_dataset("fashion_mnist", tmp_path / "data", tmp_path)  # such as MNIST
    monkeypatch.setattr(builders, "CHECKSUMS", sums)
    dataset = open_dataset("fashion_mnist", tmp_path / "data", tmp_path)
    images, labels = written["train-images-idx3-ubyte"], written["train-labels-idx1-ubyte"]
    assert_holds(dataset.split("train"), images, labels)
    with pytest.raises(InputError, match=r"fashion_mnist: .*No such file.*apt-get install"):
        open_dataset("fashion_mnist", tmp_path / "other", tmp_path / "nothing")
    # Port 9 of this host: refused at once, whatever network there is.
    monkeypatch.setattr(builders.FashionMNIST, "URL", "http://127.0.0.1:9/")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with pytest.raises(InputError, match=r"fashion_mnist: .*refused.*--config\.data\.manual_dir="):
        open_dataset("fashion_mnist", tmp_path / "other")


# -- structinit_jax.prepare ------------------------------------------------------------------------


def test_the_report_names_classes_sizes_and_bad_images(tmp_path):
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(3):
                image = Image.new("RGB", (20 + number, 10), "red")
                image.save(tmp_path / split / name / f"{number}.png")
    (tmp_path / "train" / "dog" / "1.png").write_bytes(b"nothing")
    arguments = ("--name=folder", f"--data_dir={tmp_path}", "--check=0")
    said = fork_main.run(*arguments, module=prepare.__name__).stdout
    for line in (
        "folder: 2 classes (cat, dog), 3 channels",
        "train: 6 examples; checked all",
        "train: 2 of 2 classes, 2 to 3 examples of each",
        "val: 10 to 10 pixels high, 20 to 22 wide",
        "val: pixels: mean (1.0, 0.0, 0.0), std (0.0, 0.0, 0.0)",
    ):
        assert f"{line}\n" in said
    assert said.count("bad: ") == 1
    assert "dog/1.png" in said


@pytest.mark.parametrize("channels", [1, 3])
def test_mean_and_deviation_are_those_of_all_pixels_by_channel(channels):
    images = np.random.default_rng(0).integers(0, [256, 128, 64], (30, 9, 7, 3), np.uint8)
    records = [{"image": image[..., :channels], "label": -1} for image in images]
    shape = (None, None, channels)
    source = Dataset.from_records("noise", {"train": records}, ["a"], shape).split("train")
    pixels = images[..., :channels].reshape(-1, channels) / 255
    expected = [tuple(f(pixels, axis=0).round(3).tolist()) for f in (np.mean, np.std)]
    assert list(prepare.mean_and_std(source)) == expected


def test_stock_builders_need_tensorflow(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"TensorFlow to prepare(.|\n)*pip install '\.\[prepare\]"):
        prepare.prepare("cifar10", tmp_path)
