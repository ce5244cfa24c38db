import gzip
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from structinit_jax.data import datasets, fashion_mnist
from structinit_jax.data.datasets import open_dataset
from structinit_jax.data.info import CATALOG
from structinit_jax.errors import InputError


def idx_bytes(array):
    header = struct.pack(f">BBBB{array.ndim}i", 0, 0, 8, array.ndim, *array.shape)
    return header + array.astype(np.uint8).tobytes()


@pytest.fixture(scope="module")
def digits_dir(tmp_path_factory):
    data_dir = tmp_path_factory.mktemp("digits")
    open_dataset("digits", data_dir)
    return data_dir


def as_rows(pixels, labels):
    """Sorted rows of pixels and label, since TFDS shuffles while it prepares."""
    rows = np.concatenate([np.reshape(pixels, (len(labels), -1)), np.c_[labels]], axis=1)
    return rows[np.lexsort(rows.T)]


def test_digits_are_sklearns_in_the_documented_split(digits_dir):
    from sklearn.datasets import load_digits

    digits = load_digits()
    dataset = open_dataset("digits", digits_dir)
    assert dataset.info == CATALOG["digits"]
    is_test = np.arange(1797) % 5 == 4
    for split, chosen in (("train", ~is_test), ("test", is_test)):
        source = dataset.split(split)
        examples = [source[i] for i in range(len(source))]
        assert examples[0]["image"].shape == (8, 8, 1)
        assert examples[0]["image"].dtype == np.uint8
        got = as_rows([e["image"] for e in examples], [e["label"] for e in examples])
        pixels = np.rint(digits.images[chosen] * 255 / 16)
        np.testing.assert_array_equal(got, as_rows(pixels, digits.target[chosen]))


def test_second_open_does_not_prepare_again(digits_dir, capsys):
    before = {path: path.stat().st_mtime_ns for path in digits_dir.rglob("*")}
    open_dataset("digits", digits_dir)
    assert {path: path.stat().st_mtime_ns for path in digits_dir.rglob("*")} == before
    assert capsys.readouterr().out == ""


def test_interrupted_preparation_is_not_trusted(tmp_path, monkeypatch, capsys):
    from structinit_jax.data.digits import Digits

    def stop_midway(self, indices):
        yield from self.original(indices[:10])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Digits, "original", Digits._generate_examples, raising=False)
        patch.setattr(Digits, "_generate_examples", stop_midway)
        # Keep the half-written folder, as a SIGKILL would.
        patch.setattr("etils.epath.Path.rmtree", lambda *args, **kwargs: None, raising=False)
        with pytest.raises(KeyboardInterrupt):
            open_dataset("digits", tmp_path)
    assert open_dataset("digits", tmp_path).info == CATALOG["digits"]
    assert capsys.readouterr().out.count("Preparing digits") == 2


def test_slices_and_reads_agree(digits_dir):
    dataset = open_dataset("digits", digits_dir)
    part, whole = dataset.split("train[100:110]+test[:5]"), dataset.split("train")
    assert len(part) == 15
    for number, example in enumerate(part.read(list(range(10)))):
        np.testing.assert_array_equal(example["image"], whole[100 + number]["image"])
        assert example["label"] == whole[100 + number]["label"]
    with pytest.raises(InputError, match=r"data\.eval_split='trian'.*'train' \(1,438\)"):
        dataset.split("trian", "data.eval_split")


def test_unwritable_data_dir(tmp_path):
    occupied = tmp_path / "file"
    occupied.touch()
    with pytest.raises(InputError, match=r"data\.data_dir=.*cannot prepare digits"):
        open_dataset("digits", occupied / "below")


def test_misspelt_name_suggests_near_ones(tmp_path):
    with pytest.raises(InputError, match=r"data\.name='cifr10'.*Did you mean 'cifar10'"):
        open_dataset("cifr10", tmp_path)


def test_unprepared_set_says_how(tmp_path):
    with pytest.raises(InputError) as caught:
        open_dataset("imagenet2012", tmp_path)
    message = str(caught.value)
    command = f"python -m structinit_jax.data.prepare --name=imagenet2012 --data_dir={tmp_path}"
    for part in (
        "data.name='imagenet2012' is not prepared",
        "pip install '.[prepare]'",
        command,
        f"ILSVRC2012_img_val.tar (by hand, from https://image-net.org) into {tmp_path}/downloads",
    ):
        assert part in message


def test_tfrecord_set_is_refused(tmp_path, digits_dir):
    import shutil

    shutil.copytree(digits_dir, tmp_path, dirs_exist_ok=True)
    info = tmp_path / "digits" / "1.0.0" / "dataset_info.json"
    info.write_text(info.read_text().replace("array_record", "tfrecord"))
    with pytest.raises(InputError, match="is prepared as tfrecord; array_record is needed"):
        open_dataset("digits", tmp_path)


def test_idx_parser():
    array = np.arange(24).reshape(2, 3, 4)
    np.testing.assert_array_equal(fashion_mnist.parse_idx(idx_bytes(array)), array)
    np.testing.assert_array_equal(fashion_mnist.parse_idx(idx_bytes(array[0, 0])), array[0, 0])


def test_fashion_mnist_refuses_other_files(tmp_path):
    manual, data = tmp_path / "manual", tmp_path / "data"
    with pytest.raises(InputError, match=r"there is no file .*train-images.*apt-get install"):
        open_dataset("fashion_mnist", data, manual)
    manual.mkdir()
    for name in fashion_mnist.CHECKSUMS:
        (manual / name).write_bytes(gzip.compress(idx_bytes(np.zeros((2, 28, 28)))))
    with pytest.raises(InputError, match=r"train-images.* is not the original file: .*SHA-256"):
        open_dataset("fashion_mnist", data, manual)
    (manual / "train-images-idx3-ubyte.gz").write_bytes(b"<html>404</html>")
    with pytest.raises(InputError, match=r"cannot read .*train-images.*[Nn]ot a gzip"):
        open_dataset("fashion_mnist", data, manual)


def test_fashion_mnist_without_network_says_how(tmp_path, monkeypatch):
    # Port 9 of this host: refused at once, whatever network there is.
    monkeypatch.setattr(fashion_mnist.FashionMNIST, "URL", "http://127.0.0.1:9/")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with pytest.raises(InputError, match=r"cannot be downloaded.*--config\.data\.manual_dir=DIR"):
        open_dataset("fashion_mnist", tmp_path)


def test_fashion_mnist_prepares_small_files(tmp_path, monkeypatch):
    import hashlib

    rng = np.random.default_rng(0)
    sizes, sums = {"train": 6, "t10k": 3}, {}
    written = {}
    for name in fashion_mnist.CHECKSUMS:
        size = sizes[name.split("-")[0]]
        is_images = "images" in name
        array = rng.integers(0, 255 if is_images else 9, (size, 28, 28) if is_images else size)
        written[name] = array
        (tmp_path / name).write_bytes(gzip.compress(idx_bytes(array)))
        sums[name] = hashlib.sha256(idx_bytes(array)).hexdigest()
    monkeypatch.setattr(fashion_mnist, "CHECKSUMS", sums)
    dataset = open_dataset("fashion_mnist", tmp_path / "data", tmp_path)
    assert dict(dataset.info.num_examples) == {"train": 6, "test": 3}
    got = dataset.split("train").read(list(range(6)))
    np.testing.assert_array_equal(
        as_rows([e["image"] for e in got], [e["label"] for e in got]),
        as_rows(written["train-images-idx3-ubyte.gz"], written["train-labels-idx1-ubyte.gz"]),
    )


@pytest.mark.slow
def test_fashion_mnist_from_the_original_files(tmp_path):
    folder = os.environ.get("FASHION_MNIST_DIR", "/usr/share/datasets/fashion-mnist")
    if not Path(folder).is_dir():
        pytest.skip(f"no {folder}; set FASHION_MNIST_DIR or apt-get install dataset-fashion-mnist")
    dataset = open_dataset("fashion_mnist", tmp_path, folder)
    assert dataset.info == CATALOG["fashion_mnist"]
    labels = [e["label"] for e in dataset.split("test").read(list(range(10_000)))]
    np.testing.assert_array_equal(np.bincount(labels), [1000] * 10)
    assert datasets.tfds.data_source("fashion_mnist", split="train[:10%]", data_dir=tmp_path)
