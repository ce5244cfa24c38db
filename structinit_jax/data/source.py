"""Random access to the examples of a split, wherever they lie."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, runtime_checkable

import numpy as np

from structinit_jax.data.decode import BadImageError, EncodedImage
from structinit_jax.errors import InputError

READ_BLOCK = 256
SHOWN_BAD_IMAGES = 10


@runtime_checkable
class Source(Protocol):
    """A split of a data set; `Dataset.split` returns one."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns `{"image": uint8 [h, w, C], "label": int}`."""
        ...

    def read(self, indices: list[int]) -> list[dict[str, Any]]:
        """Returns several of them."""
        ...

    def open(self, index: int) -> tuple[EncodedImage, int]:
        """Returns the image before it is decoded, and the label."""
        ...


@runtime_checkable
class Records(Protocol):
    """Encoded examples, `{"image": bytes, "label": int}` and where known a "file_name"."""

    def __len__(self) -> int: ...

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Returns several of them; one read of many is far faster than many reads."""
        ...


class ImageSource:
    """Decodes the records of a split; safe to call from many threads.

    Args:
      records: Encoded examples.
      channels: 1 or 3; images stored otherwise (grey, CMYK, palette) are converted.
      name: What messages call the split.
      kept: Which records are examples, int64 [n]; None for all of them.
      labels: Their labels, int [n]; None for the records' own.
    """

    def __init__(
        self,
        records: Records,
        channels: int,
        name: str,
        kept: np.ndarray | None = None,
        labels: np.ndarray | None = None,
    ):
        self._records, self._channels, self._name = records, channels, name
        self._kept = np.arange(len(records)) if kept is None else kept
        self._labels = labels

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns `{"image": uint8 [H, W, C], "label": int}`."""
        return self.read([index])[0]

    def read(self, indices: list[int]) -> list[dict[str, Any]]:
        """Returns several examples."""
        return [
            {"image": image.decode(), "label": label}
            for image, label in map(self._open, indices, self._fetch(indices))
        ]

    def open(self, index: int) -> tuple[EncodedImage, int]:
        """Returns the image before it is decoded, and the label."""
        return self._open(index, self._fetch([index])[0])

    def open_all(self) -> Iterator[tuple[EncodedImage, int]]:
        """Yields what `open` returns for every example, in order."""
        for start in range(0, len(self), READ_BLOCK):
            indices = range(start, min(start + READ_BLOCK, len(self)))
            yield from map(self._open, indices, self._fetch(indices))

    def column(self, key: str) -> list[Any]:
        """Returns one entry of every record, such as "label", without decoding an image."""
        blocks = (
            self._fetch(range(start, min(start + READ_BLOCK, len(self))))
            for start in range(0, len(self), READ_BLOCK)
        )
        return [record[key] for block in blocks for record in block]

    def select(self, wanted: np.ndarray) -> "ImageSource":
        """Returns the examples where `wanted`, bool [n], is true, in the same order."""
        labels = None if self._labels is None else self._labels[wanted]
        return ImageSource(self._records, self._channels, self._name, self._kept[wanted], labels)

    def relabel(self, labels: np.ndarray) -> "ImageSource":
        """Returns the same examples with other labels, int [n]."""
        return ImageSource(self._records, self._channels, self._name, self._kept, labels)

    def split_bad_images(self) -> tuple["ImageSource", list[str]]:
        """Decodes every image once to find those that cannot be.

        Returns:
          The source without the bad images, in the same order, and what is wrong with each of them.
        """

        def problems(start: int) -> list[str | None]:
            indices = range(start, min(start + READ_BLOCK, len(self)))
            return [
                self._problem(*pair) for pair in zip(indices, self._fetch(indices), strict=True)
            ]

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            blocks = pool.map(problems, range(0, len(self), READ_BLOCK))
            found = [problem for block in blocks for problem in block]
        source = self.select(np.array([problem is None for problem in found], bool))
        return source, [problem for problem in found if problem is not None]

    def _problem(self, index: int, record: dict[str, Any]) -> str | None:
        try:
            # All of a JPEG's data is read at any size; an eighth takes a third of the time.
            self._open(index, record)[0].decode(at_least=(1, 1))
        except BadImageError as error:
            return str(error)
        return None

    def _fetch(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        return self._records.__getitems__(self._kept[np.asarray(indices, np.int64)].tolist())

    def _open(self, index: int, record: dict[str, Any]) -> tuple[EncodedImage, int]:
        file_name = record.get("file_name", b"")
        file_name = file_name.decode() if isinstance(file_name, bytes) else file_name
        name = f"{self._name}, example {self._kept[index]}" + (file_name and f" ({file_name})")
        label = record["label"] if self._labels is None else self._labels[index]
        return EncodedImage(record["image"], self._channels, name), int(label)


def leave_out_bad_images(source: ImageSource, field: str, spec: str) -> ImageSource:
    """The policy data.on_bad_image='skip': counts, reports and leaves out.

    Every image is decoded once, before anything else happens. So the examples that remain are
    numbered as if the others had never been there, in every process and after every restart: an
    epoch is each of them once, and so is an evaluation. The price is this pass at each start, 1 to
    3 ms an image and core; deleting the images that it names saves it.

    Args:
      source: A split.
      field: The config field that names the split, for messages.
      spec: The split, for messages.

    Returns:
      The split without its bad images.

    Raises:
      InputError: No good image is left.
    """
    good, problems = source.split_bad_images()
    if problems:
        shown = problems[:SHOWN_BAD_IMAGES]
        shown += ["…"] if len(problems) > len(shown) else []
        print(
            f"{field}={spec!r}: {len(problems):,} of {len(source):,} images are bad and left out:"
            + "".join(f"\n  {problem}" for problem in shown),
            flush=True,
        )
    if not len(good):
        raise InputError(f"{field}={spec!r}: none of its {len(source):,} images can be decoded.")
    return good
