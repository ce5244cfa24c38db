"""digits and fashion_mnist, which fit in memory and need no preparation."""

import gzip
import hashlib
import http.client
import os
import urllib.request
import zlib
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from structinit_jax.data.source import Dataset, Folder
from structinit_jax.errors import InputError
from structinit_jax.files import write_atomically

URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
# Original files of fashion_mnist (with the suffix .gz) -> SHA-256 of the decompressed content. The
# compressed files differ between sources.
CHECKSUMS = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
FASHION_CLASSES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)


def open_digits(data_dir: Folder = None) -> Dataset:
    """Opens the 1,797 8x8 gray images that come with scikit-learn.

    They are the test part of "Optical Recognition of Handwritten Digits" (UCI,
    https://doi.org/10.24432/C50P49). The gray levels 0, ..., 16 are scaled to 0, ..., 255 and
    rounded. Every fifth image (index % 5 == 4) is in `test` (359), the others are in `train`
    (1,438). The same writers appear in both. `data_dir` is not used.
    """
    # Reads the file directly, because importing scikit-learn takes a second.
    (package,) = find_spec("sklearn").submodule_search_locations
    table = np.loadtxt(Path(package, "datasets", "data", "digits.csv.gz"), delimiter=",")
    images = np.rint(table[:, :-1].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    labels = table[:, -1].astype(int)
    is_test = np.arange(len(table)) % 5 == 4
    splits = {
        split: _in_order(split, np.flatnonzero(chosen), images, labels)
        for split, chosen in (("train", ~is_test), ("test", is_test))
    }
    return Dataset.from_records("digits", splits, range(10), channels=1)


def open_fashion_mnist(data_dir: Folder) -> Dataset:
    """Opens Fashion-MNIST (Xiao et al. 2017): 70,000 28x28 gray images of clothes.

    `data_dir` is the folder with the four original files, by default `fashion_mnist` in TFDS's data
    directory. Missing files are downloaded to it. Raises `InputError` if a file cannot be
    downloaded or is not the original.
    """
    root = os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    folder = Path(data_dir or Path(root, "fashion_mnist").expanduser())
    arrays = [_read(folder / f"{name}.gz", sha256) for name, sha256 in CHECKSUMS.items()]
    splits = {
        split: _in_order(split, np.arange(len(labels)), images, labels)
        for split, images, labels in (("train", *arrays[:2]), ("test", *arrays[2:]))
    }
    return Dataset.from_records("fashion_mnist", splits, FASHION_CLASSES, channels=1)


def _in_order(split, indices, images, labels):
    """Returns records in the order of a data set prepared by TFDS, which mixes the classes."""

    def checksum(index):
        return hashlib.md5(f"{split}{index}".encode(), usedforsecurity=False).digest()

    order = sorted(indices.tolist(), key=checksum)
    return [{"image": images[index], "label": int(labels[index])} for index in order]


def _read(path, sha256):
    """Reads a file. If missing, it is downloaded, and put in place once it has been verified."""
    if path.exists():
        return _parse_idx(path.read_bytes(), path, sha256)
    url = f"{URL}/{path.name}"
    print(f"Downloading {url} to {path.parent} (once).", flush=True)
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            content = response.read()
        array = _parse_idx(content, path, sha256)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)  # Other processes may download the same file.
    except (OSError, http.client.HTTPException) as error:  # the latter if the connection breaks
        raise InputError(
            f"fashion_mnist: {url} cannot be downloaded to {path.parent} ({error}): set data_dir "
            f"to a folder with {', '.join(f'{name}.gz' for name in CHECKSUMS)}"
        ) from error
    return array


def _parse_idx(compressed, path, sha256):
    """Reads the idx format: two zeros, type 8 (uint8), rank, big-endian sizes, values.

    Raises an `InputError` that names the path if the checksum does not match.
    """
    try:
        content = gzip.decompress(compressed)
    except (OSError, EOFError, zlib.error):  # a proxy's error page, or a truncated file
        content = b""
    if hashlib.sha256(content).hexdigest() != sha256:
        raise InputError(f"{path} is not the original file of fashion_mnist")
    rank = content[3]
    shape = np.frombuffer(content, ">i4", count=rank, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * rank).reshape(shape)
