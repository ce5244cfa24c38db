"""Loads the batches of a split as global arrays on the devices, for training and evaluation.

A small split is decoded once and kept in device memory (`DeviceLoader`). Images of a larger split
are decoded by threads while the devices train (`HostLoader`). Both return the same batches for any
number of processes. The order is a function of (seed, position in the stream).
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from structinit_jax import rngs
from structinit_jax.data.images import CenterCrop, RandomCrop
from structinit_jax.data.source import MAX_THREADS, READ_BLOCK, ImageSource, num_cores

IN_MEMORY_BYTES = 2_000_000_000
# One more than cores, to hide file latency. 16 threads on two cores run at a third of the speed.
READ_THREADS = min(MAX_THREADS, num_cores() + 1)

Batch = dict[str, jax.Array]


@functools.lru_cache(maxsize=4)  # a batch rarely spans more than two epochs
def _epoch_order(seed, epoch, num_examples):
    bits = rngs.host_bits(seed, epoch, rngs.ORDER, num_examples)
    return np.argsort(bits, kind="stable")


def stream_indices(
    seed: int,
    positions: np.ndarray,
    num_examples: int,
    repeats: int = 1,
    epoch_length: int | None = None,
) -> np.ndarray:
    """Returns the example indices at positions of the training stream, int64.

    The stream is a sequence of independently shuffled epochs. Each epoch has `epoch_length`
    positions, by default `num_examples`, and uses the first part of its permutation. With repeated
    augmentation (Hoffer et al. 2020), each example occupies `repeats` consecutive positions in an
    epoch of the same length, as in timm.
    """
    epoch_length = num_examples if epoch_length is None else epoch_length
    epochs, offsets = np.divmod(positions, epoch_length)
    indices = np.empty(len(positions), np.int64)
    for epoch in np.unique(epochs):
        inside = epochs == epoch
        indices[inside] = _epoch_order(seed, epoch, num_examples)[offsets[inside] // repeats]
    return indices


def bytes_on_device(num_examples: int, crop: CenterCrop | RandomCrop, channels: int) -> int:
    """Returns the bytes that a split takes up in the memory of each device.

    This is 0 if the split is not kept there because it is too large or its crops are random.
    """
    size = num_examples * crop.image_size**2 * channels
    return 0 if isinstance(crop, RandomCrop) or size > IN_MEMORY_BYTES else size


class Loader:
    """The batches of a split; `len` returns the number of examples.

    Subclasses define `__len__` and `_batches(order, steps, batch_size)`, which yields the batch of
    each step. A step's batch starts at position `step * batch_size`. `order(start, stop)` returns
    the example indices at these positions, int64.
    """

    def train_batches(
        self,
        *,
        batch_size: int,
        seed: int,
        start_step: int,
        num_steps: int,
        repeats: int = 1,
        drop_remainder: bool = False,
    ) -> Iterator[Batch]:
        """Yields the batches of steps `start_step` (counted from 0) to `num_steps - 1`.

        A batch is `{"image": uint8 [B, H, W, C], "label": int32 [B]}`, split over the devices. The
        batch size B is global and a multiple of the number of devices. With `drop_remainder`, each
        epoch ends after its last full batch; otherwise a batch can straddle two epochs. For
        `repeats`, see `stream_indices`; a batch holds the first copies of its images, then the
        second copies, and so on, as in timm. Within an epoch, a mixing group of at most B / repeats
        images therefore has no image twice.
        """
        length = len(self) - (len(self) % batch_size if drop_remainder else 0)
        by_copy = np.argsort(np.arange(batch_size) % repeats, kind="stable")

        def order(start, stop):
            steps, places = np.divmod(np.arange(start, stop), batch_size)
            positions = steps * batch_size + by_copy[places]
            return stream_indices(seed, positions, len(self), repeats, length)

        return self._batches(order, range(start_step, num_steps), batch_size)

    def eval_batches(self, *, batch_size: int) -> Iterator[Batch]:
        """Yields every example once, in order; the last batch is padded with example 0."""

        def order(start, stop):
            positions = np.arange(start, stop)
            return np.where(positions < len(self), positions, 0)

        return self._batches(order, range(-(-len(self) // batch_size)), batch_size)


def make_loader(source: ImageSource, mesh: Mesh, crop: CenterCrop | RandomCrop) -> Loader:
    """Makes the loader of a split; splits of at most 2 GB are kept in device memory.

    With random crops, no split is kept in device memory. Batches are split over all axes of the
    mesh.
    """
    loader = HostLoader(source, mesh, crop)
    if not bytes_on_device(len(source), crop, source.info.channels):
        return loader
    print(f"decoding the {len(source):,} images of {source.name}", flush=True)
    (whole,) = loader.read_batches(np.arange, range(1), len(source), 0, process_count=1)
    return DeviceLoader(whole["image"], whole["label"], mesh)


@dataclasses.dataclass
class HostLoader(Loader):
    """Decodes images while the devices train; each process decodes its part of every batch."""

    source: ImageSource
    mesh: Mesh
    crop: CenterCrop | RandomCrop

    def __len__(self) -> int:
        return len(self.source)

    def _batches(self, order, steps, batch_size):
        sharding = NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))
        processes = sorted({device.process_index for device in self.mesh.devices.flat})
        index = processes.index(jax.process_index())
        batches = self.read_batches(order, steps, batch_size, index, len(processes))
        # Copies to the devices are asynchronous.
        return (_make_global(batch, sharding) for batch in batches)

    def read_batches(
        self,
        order: Callable[[int, int], np.ndarray],
        steps: range,
        batch_size: int,
        process_index: int,
        process_count: int,
    ) -> Iterator[dict[str, np.ndarray]]:
        """Yields the contiguous part of each global batch that belongs to a process.

        Threads read ahead and write their images into the batch. For `order`, see `Loader`.
        """
        size = batch_size // process_count
        side = self.crop.image_size
        shape = (size, side, side, self.source.info.channels)
        pool = ThreadPoolExecutor(READ_THREADS)
        # Small batches are split among the threads, too. Reading 256 small TFDS images in one call
        # takes half as long as reading them eight at a time.
        chunk = min(READ_BLOCK, math.ceil(size / MAX_THREADS))

        def start(step):
            first = step * batch_size + process_index * size
            indices = order(first, first + size)
            batch = {"image": np.empty(shape, np.uint8), "label": np.empty(size, np.int32)}
            rows = [range(size)[i : i + chunk] for i in range(0, size, chunk)]
            return batch, [pool.submit(self._fill, batch, r, first, indices) for r in rows]

        started = map(start, steps)
        try:
            ahead = collections.deque(itertools.islice(started, 2))
            while ahead:
                ahead.extend(itertools.islice(started, 1))  # Three batches are read at a time.
                batch, tasks = ahead.popleft()
                for task in tasks:
                    task.result()
                yield batch
        finally:
            pool.shutdown(cancel_futures=True)

    def _fill(self, batch, rows, first, indices):
        """Reads the examples of some rows of a batch that starts at position `first`."""
        examples = self.source.read(indices[rows.start : rows.stop].tolist())
        for row, (image, label) in zip(rows, examples, strict=True):
            batch["image"][row] = self.crop(image, first + row)
            batch["label"][row] = label


class DeviceLoader(Loader):
    """Keeps a whole split in the memory of every device and gathers batches there.

    The host sends the order of each epoch, 4 bytes per example, and nothing per step. The images,
    uint8 [n, H, W, C], and labels, int32 [n], are the same in every process.
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray, mesh: Mesh):
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._sharded = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        # Flattened, so that each example is contiguous in memory on TPUs, too.
        self._images = self._send(images.reshape(len(images), -1))
        self._labels = self._send(labels)
        # Not a method: jit would keep the loader and its images alive in a reference cycle.
        self._gather = jax.jit(
            functools.partial(_gather_batch, self._sharded, images.shape[1:]),
            static_argnames="batch_size",
            out_shardings=(self._sharded, self._replicated),
        )

    def __len__(self) -> int:
        return len(self._labels)

    def _batches(self, order, steps, batch_size):
        # One epoch plus the overlap of its last batch.
        window = len(self) + batch_size
        end = -1
        for step in steps:
            first = step * batch_size
            if first + batch_size > end:
                end = first + window
                indices = self._send(order(first, end).astype(np.int32))
                offset = self._send(np.zeros((), np.int32))
            batch, offset = self._gather(self._images, self._labels, indices, offset, batch_size)
            yield batch

    def _send(self, array):
        return _make_global(array, self._replicated)


def _gather_batch(sharding, image_shape, images, labels, order, offset, batch_size):
    """Returns the examples order[offset : offset + batch_size], and the next offset."""
    indices = jax.lax.dynamic_slice_in_dim(order, offset, batch_size)
    # Each device gathers only its own part.
    indices = jax.lax.with_sharding_constraint(indices, sharding)
    # By default, `take` would look for indices that are out of bounds.
    batch = {
        "image": jnp.take(images, indices, axis=0, mode="clip").reshape(batch_size, *image_shape),
        "label": jnp.take(labels, indices, mode="clip"),
    }
    return batch, offset + batch_size


def _make_global(arrays, sharding):
    make = functools.partial(jax.make_array_from_process_local_data, sharding)
    # With several processes, JAX mistakes this explicit transfer for an implicit one.
    with jax.transfer_guard("allow"):
        return jax.tree.map(make, arrays)
