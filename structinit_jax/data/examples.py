"""Examples brought to one size: decoded once into memory, or one by one when that is too much."""

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from PIL import Image

from structinit_jax.data.crop import CropOptions, crop_and_resize, draw_box, draw_interpolation
from structinit_jax.data.info import DatasetInfo
from structinit_jax.data.source import READ_BLOCK, Source
from structinit_jax.errors import InputError

IN_MEMORY_BYTES = 2_000_000_000
# One more than there are cores, for those that wait for a file; far more get in each other's way (a
# third of the speed at 16 on two cores), and beyond 16 they wait for the interpreter lock.
READ_THREADS = min(16, (os.cpu_count() or 1) + 1)


class Piece(NamedTuple):
    """What a batch holds.

    Attributes:
      indices: Example numbers, int64 [b].
      start: Position in the stream of the first of them; the others follow.
    """

    indices: np.ndarray
    start: int


@runtime_checkable  # for the run-time type checks of the tests
class Examples(Protocol):
    """What the loader needs; both classes below have it."""

    def __len__(self) -> int: ...

    def batches(
        self, piece_of: Callable[[int], Piece], num_batches: int, batch_size: int
    ) -> Iterator[dict[str, np.ndarray]]:
        """Yields `{"image": uint8 [b, H, W, C], "label": int32 [b]}`.

        Args:
          piece_of: The examples of batch 0, 1, ...; a pure function.
          num_batches: How many batches to yield.
          batch_size: Examples in each of them.
        """
        ...


@dataclasses.dataclass(frozen=True)
class ArrayExamples:
    """A whole split in memory.

    Attributes:
      images: uint8 [n, H, W, C].
      labels: int32 [n].
    """

    images: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def batches(
        self, piece_of: Callable[[int], Piece], num_batches: int, batch_size: int
    ) -> Iterator[dict[str, np.ndarray]]:
        """See `Examples.batches`."""
        del batch_size
        for number in range(num_batches):
            indices = piece_of(number).indices
            yield {"image": self.images[indices], "label": self.labels[indices]}


@dataclasses.dataclass(frozen=True)
class LazyExamples:
    """A split decoded example by example, by threads ahead of the training loop.

    Attributes:
      source: The split, images of any size.
      image_size: Height and width to return, in pixels.
      crop_fraction: As in `fit_image`.
      random_resized_crop: Takes a random part in place of the central one.
    """

    source: Source
    image_size: int
    crop_fraction: float = 1.0
    random_resized_crop: CropOptions | None = None

    def __len__(self) -> int:
        return len(self.source)

    def example(self, index: int, position: int) -> dict[str, Any]:
        """Decodes one example.

        Args:
          index: Its number.
          position: Where in the stream it stands, for the random crop.

        Returns:
          `{"image": uint8 [image_size, image_size, C], "label": int32}`.
        """
        if self.random_resized_crop is None:
            example = self.source[index]
            image, label = example["image"], example["label"]
            image = fit_image(image, self.image_size, self.crop_fraction)
        else:
            encoded, label = self.source.open(index)
            box = draw_box(encoded.size, self.random_resized_crop, position)
            interpolation = draw_interpolation(self.random_resized_crop, position)
            image = crop_and_resize(encoded, box, self.image_size, interpolation)
        return {"image": image, "label": np.int32(label)}

    def batches(
        self, piece_of: Callable[[int], Piece], num_batches: int, batch_size: int
    ) -> Iterator[dict[str, np.ndarray]]:
        """See `Examples.batches`."""
        import grain

        # Every example asks for its batch's piece: the threads work on a few batches at a time.
        stream = _Stream(self, functools.lru_cache(maxsize=8)(piece_of), num_batches, batch_size)
        options = grain.ReadOptions(num_threads=READ_THREADS, prefetch_buffer_size=2 * batch_size)
        return iter(grain.MapDataset.source(stream).to_iter_dataset(options).batch(batch_size))


@dataclasses.dataclass(frozen=True)
class _Stream:
    """The batches end to end, as the random-access source that Grain reads."""

    examples: LazyExamples
    piece_of: Callable[[int], Piece]
    num_batches: int
    batch_size: int

    def __len__(self) -> int:
        return self.num_batches * self.batch_size

    def __getitem__(self, position: int) -> dict[str, Any]:
        number, offset = divmod(position, self.batch_size)
        piece = self.piece_of(number)
        return self.examples.example(int(piece.indices[offset]), piece.start + offset)


def fit_image(image: np.ndarray, image_size: int, crop_fraction: float) -> np.ndarray:
    """Resizes (bicubic) and takes the centre crop.

    Args:
      image: uint8 [h, w, C].
      image_size: Height and width of the result, in pixels.
      crop_fraction: The shorter side becomes `image_size / crop_fraction` pixels; 0.875 is usual
        in ImageNet evaluation, 1 keeps all of a square image.

    Returns:
      uint8 [image_size, image_size, C].
    """
    height, width, channels = image.shape
    scale = round(image_size / crop_fraction) / min(height, width)
    if scale != 1:
        # Rounding must not leave a side shorter than the crop: the shorter one is exact.
        size = (round(width * scale), round(height * scale))
        pixels = image[..., 0] if channels == 1 else image
        image = np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC))
    top = (image.shape[0] - image_size) // 2
    left = (image.shape[1] - image_size) // 2
    crop = image[top : top + image_size, left : left + image_size]
    return crop.reshape(image_size, image_size, channels)


def load_examples(
    source: Source,
    info: DatasetInfo,
    image_size: int,
    crop_fraction: float = 1.0,
    random_resized_crop: CropOptions | None = None,
) -> Examples:
    """Chooses between memory and lazy decoding.

    A split goes into memory, at one size, if it takes less than `IN_MEMORY_BYTES`. With a random
    crop it never does, since each crop is cut out of the original.

    Args:
      source: A split from `Dataset.split`.
      info: Facts of its data set.
      image_size: Height and width to return, in pixels.
      crop_fraction: As in `fit_image`.
      random_resized_crop: For training on images that are larger than `image_size`; draws by
        position in the stream.

    Returns:
      The examples, in the order of `source`.
    """
    if random_resized_crop is not None:
        return LazyExamples(source, image_size, random_resized_crop=random_resized_crop)
    shape = (len(source), image_size, image_size, info.image_shape[-1])
    if np.prod(shape, dtype=np.int64) > IN_MEMORY_BYTES:
        return LazyExamples(source, image_size, crop_fraction)
    examples = ArrayExamples(np.empty(shape, np.uint8), np.empty(len(source), np.int32))

    def decode(start: int) -> None:
        indices = range(start, min(start + READ_BLOCK, len(source)))
        for index, example in zip(indices, source.read(list(indices)), strict=True):
            examples.images[index] = fit_image(example["image"], image_size, crop_fraction)
            examples.labels[index] = example["label"]

    # More threads than cores only contend for the interpreter lock when images are small.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(decode, range(0, len(source), READ_BLOCK)):
            pass
    return examples


def check_examples(info: DatasetInfo, *, num_classes: int, channels: int) -> None:
    """Compares the model's view of the data with the data.

    Args:
      info: Facts of the data set.
      num_classes: Width of the model's output.
      channels: Channels of the model's input.

    Raises:
      InputError: One of them disagrees with `info`.
    """
    if num_classes != info.num_classes:
        raise InputError(
            f"model.num_classes={num_classes}: the data set has {info.num_classes} classes."
            f" Pass --config.model.num_classes={info.num_classes}."
        )
    if channels != info.image_shape[-1]:
        raise InputError(
            f"data.channels={channels}: the data set's images have {info.image_shape[-1]}."
            f" Pass --config.data.channels={info.image_shape[-1]}."
        )
