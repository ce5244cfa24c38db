import gzip
import hashlib
import os
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from structinit_jax.data import builders
from structinit_jax.data.datasets import open_dataset
from structinit_jax.data.info import CATALOG
from structinit_jax.data.prepare import prepare
from structinit_jax.errors import InputError


def idx_bytes(array):
    header = struct.pack(f">BBBB{array.ndim}i", 0, 0, 8, array.ndim, *array.shape)
    return header + array.astype(np.uint8).tobytes()


def read(source):
    """Pixels and labels of a whole split."""
    examples = source.read(range(len(source)))
    return [image.decode() for image, _ in examples], [label for _, label in examples]


def as_rows(pixels, labels):
    """Sorted rows of pixels and label, since TFDS shuffles while it prepares."""
    rows = np.concatenate([np.reshape(pixels, (len(labels), -1)), np.c_[labels]], axis=1)
    return rows[np.lexsort(rows.T)]


def test_digits_are_sklearns_in_the_documented_split(data_dir):
    from sklearn.datasets import load_digits

    digits = load_digits()
    dataset = open_dataset("digits", data_dir)
    assert dataset.info == CATALOG["digits"]
    is_test = np.arange(1797) % 5 == 4
    for split, chosen in (("train", ~is_test), ("test", is_test)):
        images, labels = read(dataset.split(split))
        assert images[0].shape == (8, 8, 1)
        assert images[0].dtype == np.uint8
        pixels = np.rint(digits.images[chosen] * 255 / 16)
        expected = as_rows(pixels, digits.target[chosen])
        np.testing.assert_array_equal(as_rows(images, labels), expected)


def test_second_open_does_not_prepare_again(data_dir, capsys):
    files = list(Path(data_dir, "digits").rglob("*"))
    before = [path.stat().st_mtime_ns for path in files]
    open_dataset("digits", data_dir)
    assert [path.stat().st_mtime_ns for path in files] == before
    assert list(Path(data_dir, "digits").rglob("*")) == files
    assert capsys.readouterr().out == ""


def test_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert len(open_dataset("digits", "~/tf").split("train")) == 1438
    assert (tmp_path / "tf" / "digits").is_dir()
    assert not (tmp_path / "~").exists()
    prepare("digits", "~/tf")
    with pytest.raises(InputError, match=f"{tmp_path}/manual/train-images.* cannot be read"):
        open_dataset("fashion_mnist", "~/tf", "~/manual")
    with pytest.raises(InputError, match=f"'{tmp_path}/images': there is no such folder"):
        open_dataset("folder", "~/images")


def test_interrupted_preparation_is_not_trusted(tmp_path, monkeypatch, capsys):
    from structinit_jax.data.builders import Digits

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


def test_unwritable_data_dir(tmp_path):
    occupied = tmp_path / "file"
    occupied.touch()
    with pytest.raises(InputError, match=r"config\.data\.data_dir=.*cannot prepare digits"):
        open_dataset("digits", occupied / "below")


@pytest.mark.parametrize(
    ("name", "near"), [("cifr10", "cifar10"), ("CIFAR10", "cifar10"), ("Folder", "folder")]
)
def test_misspelt_name_suggests_near_ones(tmp_path, name, near):
    message = rf"config\.data\.name='{name}'.*Did you mean '{near}'"
    with pytest.raises(InputError, match=message):
        open_dataset(name, tmp_path)


@pytest.mark.parametrize(
    ("name", "variants"),
    [("imagenet_v2/top", r"'matched-frequency', .*, 'topimages'"), ("cifar10/top", "none")],
)
def test_unknown_variants_are_refused(tmp_path, name, variants):
    message = rf"config\.data\.name='{name}': .* no variant 'top'\. Its variants: {variants}\.$"
    with pytest.raises(InputError, match=message):
        open_dataset(name, tmp_path)


def test_unprepared_set_says_how(tmp_path):
    with pytest.raises(InputError) as caught:
        open_dataset("imagenet2012", tmp_path)
    message = str(caught.value)
    command = f"python -m structinit_jax.data.prepare --name=imagenet2012 --data_dir={tmp_path}"
    for part in (
        "config.data.name='imagenet2012' is not prepared",
        "pip install '.[prepare]'",
        command,
        f"ILSVRC2012_img_val.tar (by hand, from https://image-net.org) into {tmp_path}/downloads",
    ):
        assert part in message


def test_tfrecord_set_is_refused(tmp_path, data_dir):
    shutil.copytree(Path(data_dir, "digits"), tmp_path / "digits")
    info = tmp_path / "digits" / "1.0.0" / "dataset_info.json"
    info.write_text(info.read_text().replace("array_record", "tfrecord"))
    with pytest.raises(InputError, match="is prepared as tfrecord, array_record is needed"):
        open_dataset("digits", tmp_path)


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("dataset_info.json", Path.unlink),
        ("dataset_info.json", lambda path: path.write_text("{")),
        ("features.json", Path.unlink),
        ("digits-train.array_record-00000-of-00001", Path.unlink),
        ("digits-train.array_record-00000-of-00001", lambda path: os.truncate(path, 100_000)),
        ("digits-train.array_record-00000-of-00001", lambda path: os.truncate(path, 65_536)),
    ],
    ids=["no info", "cut info", "no features", "no file", "cut file", "file cut at a block"],
)
def test_damaged_sets_are_named(tmp_path, data_dir, file, damage):
    shutil.copytree(Path(data_dir, "digits"), tmp_path / "digits")
    folder = tmp_path / "digits" / "1.0.0"
    damage(folder / file)
    message = rf"config\.data\.name='digits': .*{tmp_path}.* is damaged.*copy the data set again"
    with pytest.raises(InputError, match=message):
        open_dataset("digits", tmp_path).split("train")[0]
    if file.endswith("json"):
        with pytest.raises(InputError, match=message):
            prepare("digits", tmp_path)


def test_the_folder_without_a_set_is_named(tmp_path, data_dir):
    shutil.copytree(Path(data_dir, "digits"), tmp_path / "mine")
    assert open_dataset("mine", tmp_path).info == CATALOG["digits"]
    message = "data_dir='{}' holds no mine/VERSION with a features.json"
    for wrong in (tmp_path / "mine", tmp_path / "mine" / "1.0.0"):
        with pytest.raises(InputError, match=message.format(wrong)):
            open_dataset("mine", wrong)
    (tmp_path / "mine" / "1.0.0" / "features.json").unlink()
    with pytest.raises(InputError, match=message.format(tmp_path)):
        open_dataset("mine", tmp_path)


def test_idx_parser():
    array = np.arange(24).reshape(2, 3, 4)
    np.testing.assert_array_equal(builders.parse_idx(idx_bytes(array)), array)
    np.testing.assert_array_equal(builders.parse_idx(idx_bytes(array[0, 0])), array[0, 0])


def test_fashion_mnist_refuses_other_files(tmp_path):
    manual, data = tmp_path / "manual", tmp_path / "data"
    with pytest.raises(
        InputError, match=r"train-images.* cannot be read: .*No such file.*apt-get install"
    ):
        open_dataset("fashion_mnist", data, manual)
    manual.mkdir()
    for name in builders.CHECKSUMS:
        (manual / f"{name}.gz").write_bytes(gzip.compress(idx_bytes(np.zeros((2, 28, 28)))))
    with pytest.raises(InputError, match=r"train-images.* is not the original file: .*SHA-256"):
        open_dataset("fashion_mnist", data, manual)
    (manual / "train-images-idx3-ubyte.gz").write_bytes(b"<html>404</html>")
    with pytest.raises(InputError, match=r"train-images.* cannot be read: .*[Nn]ot a gzip"):
        open_dataset("fashion_mnist", data, manual)


def test_fashion_mnist_without_network_says_how(tmp_path, monkeypatch):
    # Port 9 of this host: refused at once, whatever network there is.
    monkeypatch.setattr(builders.FashionMNIST, "URL", "http://127.0.0.1:9/")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with pytest.raises(InputError, match=r"cannot be downloaded.*--config\.data\.manual_dir=DIR"):
        open_dataset("fashion_mnist", tmp_path)


def test_fashion_mnist_prepares_small_files(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    sizes, sums = {"train": 6, "t10k": 3}, {}
    written = {}
    for name in builders.CHECKSUMS:
        size = sizes[name.split("-")[0]]
        is_images = "images" in name
        array = rng.integers(0, 255 if is_images else 9, (size, 28, 28) if is_images else size)
        written[name] = array
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(idx_bytes(array)))
        sums[name] = hashlib.sha256(idx_bytes(array)).hexdigest()
    monkeypatch.setattr(builders, "CHECKSUMS", sums)
    dataset = open_dataset("fashion_mnist", tmp_path / "data", tmp_path)
    assert dict(dataset.info.num_examples) == {"train": 6, "test": 3}
    np.testing.assert_array_equal(
        as_rows(*read(dataset.split("train"))),
        as_rows(written["train-images-idx3-ubyte"], written["train-labels-idx1-ubyte"]),
    )


def test_the_original_files_of_fashion_mnist_are_known():
    folder = Path(os.environ.get("FASHION_MNIST_DIR", "/usr/share/datasets/fashion-mnist"))
    if not folder.is_dir():
        pytest.skip(f"no {folder}; set FASHION_MNIST_DIR or apt-get install dataset-fashion-mnist")
    files = {
        name: builders._read_idx(folder / f"{name}.gz", checksum)
        for name, checksum in builders.CHECKSUMS.items()
    }
    for part, size in CATALOG["fashion_mnist"].num_examples.items():
        prefix = "t10k" if part == "test" else part
        assert files[f"{prefix}-images-idx3-ubyte"].shape == (size, 28, 28)
        labels = files[f"{prefix}-labels-idx1-ubyte"]
        np.testing.assert_array_equal(np.bincount(labels), [size // 10] * 10)
