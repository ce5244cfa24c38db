"""Batches of a split as global arrays on the devices, for training and evaluation.

A split that fits into device memory is decoded once and kept there (`DeviceLoader`). Otherwise
Grain's threads decode its images while the devices train (`HostLoader`). Both return the same
batches in the order of `data.order`.
"""

import abc
import collections
import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Int32, UInt8

from structinit_jax.augment import AugmentOptions
from structinit_jax.data.datasets import READ_BLOCK, ImageSource
from structinit_jax.data.images import RandomCrop, resize_and_center_crop
from structinit_jax.data.info import DatasetInfo
from structinit_jax.data.order import stream_indices
from structinit_jax.errors import InputError

IN_MEMORY_BYTES = 2_000_000_000
# One more than there are cores, since some wait for a file. 16 threads on two cores run at a third
# of the speed, and more than 16 only wait for the interpreter lock.
READ_THREADS = min(16, (os.cpu_count() or 1) + 1)

Batch = dict[str, jax.Array]
# (start, stop) -> the examples at these positions, int64 [stop - start]; -1 marks padding.
Order = Callable[[int, int], np.ndarray]


class AugmentationSplit(NamedTuple):
    """Where training images are cropped.

    Attributes:
      image_size: Side of the uint8 images that reach the training step, in pixels.
      host_crop: Random crop applied while decoding, or None.
      on_device: Augmentation that remains for the training step.
    """

    image_size: int
    host_crop: RandomCrop | None
    on_device: AugmentOptions


def split_augmentation(
    options: AugmentOptions, info: DatasetInfo, num_examples: int, seed: int
) -> AugmentationSplit:
    """Assigns the random crop to the devices or to the decoder.

    The devices crop images that all have one square size and fit into device memory. Other images
    are cropped while they are decoded.

    Args:
      options: The whole augmentation.
      info: The data set.
      num_examples: Size of the training split.
      seed: Seed of the crops on the host.
    """
    if options.crop != "resized":
        return AugmentationSplit(options.image_size, None, options)
    height, width, channels = info.image_shape
    one_size = height is not None and height == width
    if one_size and num_examples * height * width * channels <= IN_MEMORY_BYTES:
        return AugmentationSplit(height, None, options)
    crop = RandomCrop(seed, options.crop_scale, options.crop_ratio, options.interpolation)
    return AugmentationSplit(options.image_size, crop, dataclasses.replace(options, crop="none"))


class Loader(abc.ABC):
    """The batches of a split."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Number of examples in the split."""

    @abc.abstractmethod
    def _batches(
        self, order: Order, steps: range, batch_size: int, with_mask: bool = False
    ) -> Iterator[Batch]:
        """Yields the batch of each step, which starts at position `step * batch_size`."""

    def train_batches(
        self, *, batch_size: int, seed: int, start_step: int, num_steps: int, repeats: int = 1
    ) -> Iterator[Batch]:
        """Yields the global training batches.

        Args:
          batch_size: Global batch size B, a multiple of the number of devices.
          seed: Seed of the order.
          start_step: Number of steps already done; 0 at the start of a run.
          num_steps: Number of steps of the whole run, so `num_steps - start_step` are left.
          repeats: See `stream_indices`.

        Yields:
          `{"image": uint8 [B, H, W, C], "label": int32 [B]}`, split over the devices.
        """

        def order(start: int, stop: int) -> np.ndarray:
            return stream_indices(seed, start, stop, len(self), repeats)

        return self._batches(order, range(start_step, num_steps), batch_size)

    def eval_batches(self, *, batch_size: int) -> Iterator[Batch]:
        """Yields every example once, in order; the last batch is padded with example 0.

        Args:
          batch_size: Global batch size B, a multiple of the number of devices.

        Yields:
          `{"image": uint8 [B, H, W, C], "label": int32 [B], "mask": float32 [B]}`, split over the
          devices. The mask is 1 for an example and 0 for padding.
        """

        def order(start: int, stop: int) -> np.ndarray:
            positions = np.arange(start, stop)
            return np.where(positions < len(self), positions, -1)

        return self._batches(order, range(-(-len(self) // batch_size)), batch_size, with_mask=True)


def make_loader(
    source: ImageSource,
    info: DatasetInfo,
    mesh: Mesh,
    *,
    image_size: int,
    crop_fraction: float = 1.0,
    random_crop: RandomCrop | None = None,
) -> Loader:
    """Makes the loader of a split, in device memory if the split takes less than 2 GB.

    Args:
      source: A split from `Dataset.split`.
      info: The data set.
      mesh: The devices; batches are split over all its axes.
      image_size: Side of the images in the batches, in pixels.
      crop_fraction: Side of the central crop as a fraction of the shorter side.
      random_crop: Replaces the central crop. Crops are taken from the stored images, so such a
        split is never kept in device memory.
    """
    shape = (len(source), image_size, image_size, info.image_shape[-1])
    if random_crop is None and np.prod(shape, dtype=np.int64) <= IN_MEMORY_BYTES:
        return DeviceLoader(*decode_all(source, shape, crop_fraction), mesh)
    return HostLoader(source, mesh, image_size, crop_fraction, random_crop)


class HostLoader(Loader):
    """Decodes images while the devices train; each process decodes its part of every batch.

    For the arguments see `make_loader`.
    """

    def __init__(
        self,
        source: ImageSource,
        mesh: Mesh,
        image_size: int,
        crop_fraction: float = 1.0,
        random_crop: RandomCrop | None = None,
    ):
        self._source, self._image_size = source, image_size
        self._crop_fraction, self._random_crop = crop_fraction, random_crop
        self._sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))

    def __len__(self) -> int:
        return len(self._source)

    def _batches(
        self, order: Order, steps: range, batch_size: int, with_mask: bool = False
    ) -> Iterator[Batch]:
        def read(position: int, index: int) -> dict[str, Any]:
            image, label = self._source[max(index, 0)]
            if self._random_crop is None:
                pixels = image.decode()
                pixels = resize_and_center_crop(pixels, self._image_size, self._crop_fraction)
            else:
                pixels = self._random_crop(image, position, self._image_size)
            mask = {"mask": np.float32(index >= 0)} if with_mask else {}
            return {"image": pixels, "label": np.int32(label), **mask}

        processes = (jax.process_index(), jax.process_count())
        return place_batches(
            read_batches(read, order, steps, batch_size, *processes), self._sharding
        )


class DeviceLoader(Loader):
    """Keeps a whole split in the memory of every device and gathers batches there.

    For each epoch the host sends the order, 4 bytes per example. It sends nothing for a step, so
    the loop runs under `jax.transfer_guard("disallow")`.

    Args:
      images: uint8 [n, H, W, C], the same in every process.
      labels: int32 [n].
      mesh: The devices; batches are split over all its axes.
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray, mesh: Mesh):
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._sharded = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._image_shape = images.shape[1:]
        # Rows of pixels, because a TPU would pad a last axis of 3 channels to 128.
        self._images = self._send(images.reshape(len(images), -1))
        self._labels = self._send(labels)
        # Jitted once, so that later calls of `train_batches` and `eval_batches` are compiled.
        self._gather = jax.jit(
            self._gather_batch,
            static_argnames=("batch_size", "with_mask"),
            out_shardings=(self._sharded, self._replicated),
        )

    def __len__(self) -> int:
        return len(self._labels)

    def _batches(
        self, order: Order, steps: range, batch_size: int, with_mask: bool = False
    ) -> Iterator[Batch]:
        # An epoch, and what its last batch may need of the next one.
        window = len(self) + batch_size
        indices, offset, end = None, None, -1
        for step in steps:
            first = step * batch_size
            if first + batch_size > end:
                end = first + window
                indices = self._send(order(first, end).astype(np.int32))
                offset = self._send(np.zeros((), np.int32))
            batch, offset = self._gather(
                self._images, self._labels, indices, offset, batch_size, with_mask
            )
            yield batch

    def _send(self, array: np.ndarray) -> jax.Array:
        """Copies an array to every device."""
        # With several processes, JAX mistakes this explicit transfer for an implicit one.
        with jax.transfer_guard("allow"):
            return jax.make_array_from_process_local_data(self._replicated, array)

    def _gather_batch(
        self,
        images: UInt8[Array, "n pixels"],
        labels: Int32[Array, " n"],
        order: Int32[Array, " window"],
        offset: Int32[Array, ""],
        batch_size: int,
        with_mask: bool,
    ) -> tuple[Batch, Int32[Array, ""]]:
        """Returns the examples order[offset : offset + batch_size], and the next offset."""
        indices = jax.lax.dynamic_slice_in_dim(order, offset, batch_size)
        # Each device gathers its own part only.
        indices = jax.lax.with_sharding_constraint(indices, self._sharded)
        rows = jnp.take(images, jnp.maximum(indices, 0), axis=0, mode="clip")
        batch = {
            "image": rows.reshape(batch_size, *self._image_shape),
            "label": jnp.take(labels, jnp.maximum(indices, 0), mode="clip"),
        }
        if with_mask:
            batch["mask"] = (indices >= 0).astype(jnp.float32)
        return batch, offset + batch_size


def decode_all(
    source: ImageSource, shape: tuple[int, int, int, int], crop_fraction: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Decodes a split into memory.

    Args:
      source: A split from `Dataset.split`.
      shape: Shape of the images, (n, H, H, C) with n of at most `len(source)`.
      crop_fraction: See `resize_and_center_crop`.

    Returns:
      The first n images, uint8 [n, H, H, C], and their labels, int32 [n].
    """
    images, labels = np.empty(shape, np.uint8), np.empty(shape[0], np.int32)

    def decode(start: int) -> None:
        indices = range(start, min(start + READ_BLOCK, shape[0]))
        for index, (image, label) in zip(indices, source.read(indices), strict=True):
            images[index] = resize_and_center_crop(image.decode(), shape[1], crop_fraction)
            labels[index] = label

    # More threads than cores would only contend for the interpreter lock.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(decode, range(0, shape[0], READ_BLOCK)))  # raises the first error
    return images, labels


def read_batches(
    read: Callable[[int, int], dict[str, Any]],
    order: Order,
    steps: range,
    batch_size: int,
    process_index: int = 0,
    process_count: int = 1,
) -> Iterator[dict[str, np.ndarray]]:
    """Reads the contiguous part of each global batch that belongs to this process.

    `read(position, index)` returns an example as a dict of arrays. It is called by Grain's threads,
    which also stack the arrays to `[batch_size / process_count, ...]`.

    Raises:
      InputError: `batch_size` is not divisible by `process_count`.
    """
    import grain

    if batch_size % process_count:
        raise InputError(
            f"config.batch_size={batch_size} is not divisible by the {process_count} processes."
        )
    size = batch_size // process_count

    @functools.lru_cache(maxsize=8)  # the threads work on a few batches at a time
    def part(step: int) -> tuple[int, np.ndarray]:
        start = step * batch_size + process_index * size
        return start, order(start, start + size)

    def read_number(number: int) -> dict[str, Any]:
        start, indices = part(steps[number // size])
        return read(start + number % size, int(indices[number % size]))

    examples = grain.MapDataset.range(len(steps) * size).map(read_number)
    options = grain.ReadOptions(num_threads=READ_THREADS, prefetch_buffer_size=2 * size)
    return iter(examples.to_iter_dataset(options).batch(size))


def place_batches(
    batches: Iterable[dict[str, np.ndarray]], sharding: Sharding, depth: int = 2
) -> Iterator[Batch]:
    """Combines the local batches of all processes, arrays [B / P, ...], into global ones [B, ...].

    Copies to the devices are asynchronous. They start `depth` batches ahead, so that they overlap
    with the steps before.
    """

    def place(batch: dict[str, np.ndarray]) -> Batch:
        # With several processes, JAX mistakes this explicit transfer for an implicit one.
        with jax.transfer_guard_host_to_device("allow"):
            make_global = functools.partial(jax.make_array_from_process_local_data, sharding)
            return jax.tree.map(make_global, batch)

    placed = map(place, batches)
    ahead = collections.deque(itertools.islice(placed, depth))
    while ahead:
        ahead.extend(itertools.islice(placed, 1))
        yield ahead.popleft()
