"""Small data sets in device memory: a training step needs no data from the host."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int32, UInt8

from structinit_jax.data.examples import ArrayExamples
from structinit_jax.data.stream import stream_indices

Batch = dict[str, jax.Array]


class DeviceExamples:
    """A split of which every device holds all, uint8 [n, H, W, C] (under 2 GB, as in memory).

    Batches are gathered on the devices, each its own part, and equal those of
    `stream.train_batches` and `stream.eval_batches` put through `stream.place_batches`. Per epoch
    the host sends its order, 4 bytes an example; per step it sends nothing, so the loop runs under
    `jax.transfer_guard("disallow")`. On several processes each must hold the whole split.

    Args:
      examples: The split, the same in every process.
      mesh: The devices; batches are split over all its axes.
    """

    def __init__(self, examples: ArrayExamples, mesh: Mesh):
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        self._split = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._image_shape = examples.images.shape[1:]
        # Flat rows: a TPU would pad a last axis of 3 channels to 128.
        self._images = self._send(examples.images.reshape(len(examples), -1))
        self._labels = self._send(examples.labels)
        # Kept here, so that every evaluation finds them compiled.
        self._gather = jax.jit(
            self._gather_batch,
            static_argnames="batch_size",
            out_shardings=(self._split, self._everywhere),
        )
        self._mask = jax.jit(
            self._mask_batch, static_argnames="batch_size", out_shardings=self._split
        )

    def __len__(self) -> int:
        return len(self._labels)

    def train_batches(
        self, *, batch_size: int, seed: int, start_step: int, num_steps: int, repeats: int = 1
    ) -> Iterator[Batch]:
        """The global training batches, on the devices.

        Args:
          batch_size: Global batch size B, a multiple of the number of devices.
          seed: Seed of the shuffles.
          start_step: First step to yield.
          num_steps: Step to stop before, counted from step 0.
          repeats: As in `stream_indices`.

        Yields:
          `{"image": uint8 [B, H, W, C], "label": int32 [B]}`, split over the devices.
        """
        # The order of an epoch and of what a batch may need beyond its end.
        window = len(self) + batch_size
        order, start, end = None, None, -1
        for first in range(start_step * batch_size, num_steps * batch_size, batch_size):
            if first + batch_size > end:
                end = first + window
                order = stream_indices(seed, first, end, len(self), repeats)
                order = self._send(order.astype(np.int32))
                start = self._send(np.zeros((), np.int32))
            batch, start = self._gather(
                self._images, self._labels, order, start, batch_size=batch_size
            )
            yield batch

    def eval_batches(self, *, batch_size: int) -> Iterator[Batch]:
        """Every example once, in order; the end is padded with repeats of example 0.

        Args:
          batch_size: Global batch size B, a multiple of the number of devices.

        Yields:
          `{"image": uint8 [B, H, W, C], "label": int32 [B], "mask": float32 [B]}`, split over the
          devices; the mask is 1 for an example and 0 for padding.
        """
        num_batches = -(-len(self) // batch_size)
        order = np.arange(num_batches * batch_size, dtype=np.int32)
        order = self._send(np.where(order < len(self), order, 0))
        start = self._send(np.zeros((), np.int32))
        for _ in range(num_batches):
            mask = self._mask(start, batch_size=batch_size)
            batch, start = self._gather(
                self._images, self._labels, order, start, batch_size=batch_size
            )
            yield {**batch, "mask": mask}

    def _send(self, array: np.ndarray) -> jax.Array:
        """Puts a whole copy on every device."""
        with jax.transfer_guard("allow"):  # with several processes JAX takes it for an accident
            return jax.make_array_from_process_local_data(self._everywhere, np.asarray(array))

    def _gather_batch(
        self,
        images: UInt8[Array, "n pixels"],
        labels: Int32[Array, " n"],
        order: Int32[Array, " window"],
        start: Int32[Array, ""],
        batch_size: int,
    ) -> tuple[Batch, Int32[Array, ""]]:
        """Returns the examples order[start : start + batch_size], and the next start."""
        indices = jax.lax.dynamic_slice_in_dim(order, start, batch_size)
        # Each device looks up its own part only.
        indices = jax.lax.with_sharding_constraint(indices, self._split)
        rows = jnp.take(images, indices, axis=0, mode="clip")
        batch = {
            "image": rows.reshape(batch_size, *self._image_shape),
            "label": jnp.take(labels, indices, mode="clip"),
        }
        return batch, start + batch_size

    def _mask_batch(self, start: Int32[Array, ""], batch_size: int) -> Float[Array, " B"]:
        positions = start + jnp.arange(batch_size, dtype=jnp.int32)
        return (positions < len(self)).astype(jnp.float32)
