"""TFDS's fashion_mnist, prepared without TensorFlow and, if need be, without a network."""

import gzip
import hashlib
import os
import urllib.request
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image
from tensorflow_datasets.image_classification import mnist

from structinit_jax.errors import InputError

# SHA-256 of the decompressed content: the same bytes are around under different gzip headers.
CHECKSUMS = {
    "train-images-idx3-ubyte.gz": (
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888"
    ),
    "train-labels-idx1-ubyte.gz": (
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9"
    ),
    "t10k-images-idx3-ubyte.gz": (
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b"
    ),
    "t10k-labels-idx1-ubyte.gz": (
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"
    ),
}
PROBE_TIMEOUT_S = 5
BY_HAND = (
    "Put the four files "
    + ", ".join(CHECKSUMS)
    + " into a folder and pass --config.data.manual_dir=DIR. On Debian and Ubuntu `apt-get install"
    " dataset-fashion-mnist` puts them in /usr/share/datasets/fashion-mnist."
)


def parse_idx(content: bytes) -> np.ndarray:
    """Reads the idx format: two zeros, type 8 (uint8), rank, big-endian sizes, then the values.

    Args:
      content: A whole decompressed file.

    Returns:
      A uint8 array of the shape that the header gives.
    """
    rank = content[3]
    shape = np.frombuffer(content, ">i4", count=rank, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * rank).reshape(shape)


def read_verified(path: Path, sha256: str) -> bytes:
    """Decompresses one of the files and checks what is in it.

    Args:
      path: A gzip file.
      sha256: The checksum that the decompressed content must have, in hexadecimal.

    Returns:
      The decompressed content.

    Raises:
      InputError: The file is missing, is no gzip file or holds something else.
    """
    try:
        content = gzip.decompress(path.read_bytes())
    except FileNotFoundError as error:
        raise InputError(f"fashion_mnist: there is no file {path}. {BY_HAND}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"fashion_mnist: cannot read {path}: {error}. {BY_HAND}") from error
    got = hashlib.sha256(content).hexdigest()
    if got != sha256:
        raise InputError(
            f"fashion_mnist: {path} is not the original file: its decompressed content has"
            f" SHA-256 {got}, expected {sha256}. Delete it and fetch it again. {BY_HAND}"
        )
    return content


def check_reachable(url: str) -> None:
    """Asks for `url` once, since TFDS itself would retry for minutes without a network.

    Args:
      url: An http(s) address; proxies are taken from the environment.

    Raises:
      InputError: There is no answer within `PROBE_TIMEOUT_S` seconds.
    """
    try:
        request = urllib.request.Request(url, method="HEAD")
        urllib.request.urlopen(request, timeout=PROBE_TIMEOUT_S).close()
    except OSError as error:
        raise InputError(
            f"fashion_mnist is not prepared yet and cannot be downloaded from {url} ({error})."
            f" {BY_HAND}"
        ) from error


# Unregistered, so that `tfds.builder("fashion_mnist")` stays the stock builder; under the same name
# and version both read and write the same folder.
with tfds.core.registered.skip_registration():

    class FashionMNIST(mnist.FashionMNIST):
        """The stock builder with a TensorFlow-free preparation.

        Args:
          manual_dir: Folder holding the four original files; None downloads them.
          **kwargs: For the TFDS builder, such as `data_dir`.
        """

        name = "fashion_mnist"

        def __init__(self, *, manual_dir: str | os.PathLike | None = None, **kwargs: Any):
            self._manual_dir = manual_dir
            super().__init__(**kwargs)

        def _split_generators(self, dl_manager: Any) -> dict[str, Iterator]:
            if self._manual_dir is not None:
                folder = Path(self._manual_dir).expanduser()
                paths = {name: folder / name for name in CHECKSUMS}
            else:
                urls = {name: self.URL + name for name in CHECKSUMS}
                check_reachable(next(iter(urls.values())))
                paths = dl_manager.download(urls)
            arrays = {
                name: parse_idx(read_verified(Path(paths[name]), sha256))
                for name, sha256 in CHECKSUMS.items()
            }
            return {
                split: self._generate_examples(
                    arrays[f"{prefix}-images-idx3-ubyte.gz"],
                    arrays[f"{prefix}-labels-idx1-ubyte.gz"],
                )
                for split, prefix in (("train", "train"), ("test", "t10k"))
            }

        def _generate_examples(
            self, images: np.ndarray, labels: np.ndarray
        ) -> Iterator[tuple[int, dict[str, Any]]]:
            for index, (image, label) in enumerate(zip(images, labels.tolist(), strict=True)):
                yield index, {"image": Image.fromarray(image), "label": label}
