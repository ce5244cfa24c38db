import gzip
import hashlib
import http.client
import struct
import urllib.request

import numpy as np
import pytest
from tensorflow_datasets.core.hashing import Hasher

from structinit_jax.data import small
from structinit_jax.data.datasets import CATALOG, open_dataset
from structinit_jax.errors import InputError

NOWHERE = "http://127.0.0.1:9"  # refuses connections at once, whatever the network


def idx_bytes(array):
    header = struct.pack(f">BBBB{array.ndim}i", 0, 0, 8, array.ndim, *array.shape)
    return header + array.astype(np.uint8).tobytes()


def assert_holds(dataset, split, indices, pixels, labels):
    """Asserts that a split holds the images and labels at the indices, in TFDS's storage order."""
    order = sorted(indices, key=Hasher(split).hash_key)
    source = dataset.split(split)
    images = source.map(lambda image, label: image.decode()[..., 0])
    np.testing.assert_array_equal(images, pixels[order])
    np.testing.assert_array_equal(source.labels(), labels[order])


def test_digits_are_sklearns_in_the_documented_split():
    from sklearn.datasets import load_digits

    digits, dataset = load_digits(), open_dataset("digits")
    assert dataset.info == CATALOG["digits"]
    pixels = np.rint(digits.images * 255 / 16)
    splits = {"train": [i for i in range(1797) if i % 5 != 4], "test": range(4, 1797, 5)}
    for split, indices in splits.items():
        assert_holds(dataset, split, indices, pixels, digits.target)
    gray, color = (open_dataset("digits", channels=n).split("test")[0][0].decode() for n in (1, 3))
    np.testing.assert_array_equal(color, np.repeat(gray, 3, axis=-1))


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Small stand-ins for the files of fashion_mnist: their folder, and their arrays by name."""
    rng, arrays = np.random.default_rng(0), {}
    for name in small.CHECKSUMS:
        size = 6 if name.startswith("train") else 3
        arrays[name] = rng.integers(0, 9, (size, 28, 28) if "images" in name else size)
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(idx_bytes(arrays[name])))
    sums = {name: hashlib.sha256(idx_bytes(array)).hexdigest() for name, array in arrays.items()}
    monkeypatch.setattr(small, "CHECKSUMS", sums)
    return tmp_path, arrays


def test_fashion_mnist_is_read_from_files_and_downloaded_once(files, tmp_path, monkeypatch):
    folder, arrays = files
    data_dir = tmp_path / "data"
    monkeypatch.setenv("TFDS_DATA_DIR", str(data_dir))
    # First from a URL, then from the download folder, then from the user's own folder.
    for url, arguments in ((folder.as_uri(), []), (NOWHERE, []), (NOWHERE, [folder])):
        monkeypatch.setattr(small, "URL", url)
        dataset = open_dataset("fashion_mnist", *arguments)
        for split, prefix in (("train", "train"), ("test", "t10k")):
            images, labels = (arrays[f"{prefix}-{x}-ubyte"] for x in ("images-idx3", "labels-idx1"))
            assert_holds(dataset, split, range(len(labels)), images, labels)
    (tmp_path / "plain").touch()
    modes = {path.stat().st_mode for path in [tmp_path / "plain", *data_dir.rglob("*.gz")]}
    assert len(modes) == 1  # other users can read the downloads


def test_downloads_that_fail_are_named(files, tmp_path, monkeypatch):
    monkeypatch.setattr(small, "URL", NOWHERE)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with pytest.raises(InputError, match=r"fashion_mnist: .*refused.*data_dir"):
        open_dataset("fashion_mnist", tmp_path / "data")
    (tmp_path / "file").touch()
    monkeypatch.setattr(small, "URL", files[0].as_uri())
    with pytest.raises(InputError, match=r"fashion_mnist: .*file/data .*data_dir"):
        open_dataset("fashion_mnist", tmp_path / "file" / "data")

    def break_off(url, timeout):
        raise http.client.IncompleteRead(b"")

    monkeypatch.setattr(urllib.request, "urlopen", break_off)
    with pytest.raises(InputError, match=r"fashion_mnist: .*IncompleteRead.*data_dir"):
        open_dataset("fashion_mnist", tmp_path / "data")


def test_files_that_are_not_the_originals_are_named(files, tmp_path, monkeypatch):
    folder, _ = files
    monkeypatch.setattr(small, "URL", NOWHERE)
    labels = folder / "t10k-labels-idx1-ubyte.gz"
    labels.write_bytes(labels.read_bytes()[:-5])
    with pytest.raises(InputError, match=r"t10k-labels.*gz is not the original file"):
        open_dataset("fashion_mnist", folder)
    labels.write_bytes(gzip.compress(b"another"))
    monkeypatch.setattr(small, "URL", folder.as_uri())
    data_dir = tmp_path / "data"
    for place in (folder, data_dir):  # such as MNIST's file, or a proxy's page
        with pytest.raises(InputError, match=r"t10k-labels.*gz is not the original file"):
            open_dataset("fashion_mnist", place)
    assert len(list(data_dir.rglob("*.*"))) == 3  # the wrong file is not kept
