"""Batches of a training run and of an evaluation.

The order of the training examples is a function of the seed and the step alone, so a run resumes by
its step number: there is no iterator state to save, and the number of processes may change.
"""

import collections
import functools
import itertools
from collections.abc import Iterable, Iterator

import jax
import numpy as np

from structinit_jax.data.examples import Examples, Piece
from structinit_jax.errors import InputError


@functools.lru_cache(maxsize=4)  # a stream reads two epochs at a time at most
def _epoch_order(seed: int, epoch: int, num_examples: int) -> np.ndarray:
    """The shuffle of one epoch, int64 [num_examples].

    Sorting raw Philox output, since NumPy promises that it stays the same from version to version;
    `Generator.permutation` may change, and with it the order of a resumed run.
    """
    key = np.array([seed, epoch], np.uint64)
    order = np.argsort(np.random.Philox(key=key).random_raw(num_examples), kind="stable")
    order.flags.writeable = False  # it is shared through the cache
    return order


def stream_indices(
    seed: int, start: int, stop: int, num_examples: int, repeats: int = 1
) -> np.ndarray:
    """A piece of the training stream: independently shuffled epochs, end to end.

    Position i belongs to epoch i // num_examples. Batches may straddle two epochs, so within an
    epoch no example is lost or doubled.

    With repeated augmentation (Hoffer et al. 2020) an epoch has as many positions as ever, but each
    of its examples stands at `repeats` of them, one after another: it sees only the first part of
    its shuffle, as in timm.

    Args:
      seed: Non-negative seed of the shuffles.
      start: First position.
      stop: Position after the last one.
      num_examples: Size of an epoch.
      repeats: Consecutive positions that hold the same example.

    Returns:
      Example numbers, int64 [stop - start].
    """
    positions = np.arange(start, stop, dtype=np.int64)
    epochs, offsets = np.divmod(positions, num_examples)
    indices = np.empty_like(positions)
    for epoch in range(start // num_examples, -(-stop // num_examples)):
        inside = epochs == epoch
        indices[inside] = _epoch_order(seed, epoch, num_examples)[offsets[inside] // repeats]
    return indices


def _local_batch_size(batch_size: int, process_count: int) -> int:
    if batch_size % process_count:
        raise InputError(
            f"batch_size={batch_size}: the global batch is shared by {process_count} processes."
            f" Choose a multiple of {process_count}."
        )
    return batch_size // process_count


def train_batches(
    examples: Examples,
    *,
    batch_size: int,
    seed: int,
    start_step: int,
    num_steps: int,
    repeats: int = 1,
    process_index: int = 0,
    process_count: int = 1,
) -> Iterator[dict[str, np.ndarray]]:
    """This process's share of the training batches.

    The global batch of step s holds positions `s * batch_size` and following of `stream_indices`;
    process p has the p-th contiguous part of it.

    Args:
      examples: The training split.
      batch_size: Global batch size B.
      seed: Seed of the shuffles.
      start_step: First step to yield; the number of steps done before, when resuming.
      num_steps: Step to stop before, counted from step 0.
      repeats: As in `stream_indices`.
      process_index: Number of this process.
      process_count: Number of processes P.

    Returns:
      Iterator of `{"image": uint8 [B / P, H, W, C], "label": int32 [B / P]}`.

    Raises:
      InputError: `batch_size` is no multiple of `process_count`.
    """
    local = _local_batch_size(batch_size, process_count)

    def piece_of(number: int) -> Piece:
        start = (start_step + number) * batch_size + process_index * local
        indices = stream_indices(seed, start, start + local, len(examples), repeats)
        return Piece(indices, start)

    return examples.batches(piece_of, max(0, num_steps - start_step), local)


def eval_batches(
    examples: Examples, *, batch_size: int, process_index: int = 0, process_count: int = 1
) -> Iterator[dict[str, np.ndarray]]:
    """Every example once, in order; the end is padded with repeats of example 0.

    All processes get the same number of batches, since each global step needs all of them.

    Args:
      examples: The split to evaluate on.
      batch_size: Global batch size B.
      process_index: Number of this process.
      process_count: Number of processes P.

    Returns:
      Iterator of `{"image": uint8 [B / P, H, W, C], "label": int32 [B / P], "mask": float32
      [B / P]}`; the mask is 1 for an example and 0 for padding.

    Raises:
      InputError: `batch_size` is no multiple of `process_count`.
    """
    local = _local_batch_size(batch_size, process_count)

    def positions_of(number: int) -> np.ndarray:
        start = number * batch_size + process_index * local
        return np.arange(start, start + local)

    def piece_of(number: int) -> Piece:
        positions = positions_of(number)
        return Piece(np.where(positions < len(examples), positions, 0), int(positions[0]))

    num_batches = -(-len(examples) // batch_size)
    batches = examples.batches(piece_of, num_batches, local)
    return (
        {**batch, "mask": (positions_of(number) < len(examples)).astype(np.float32)}
        for number, batch in enumerate(batches)
    )


def place_batches(
    batches: Iterable[dict[str, np.ndarray]], sharding: jax.sharding.Sharding, depth: int = 2
) -> Iterator[dict[str, jax.Array]]:
    """Turns the local batches of all processes into global arrays.

    Copies to the device are asynchronous: starting them `depth` batches ahead lets them overlap
    the steps before.

    Args:
      batches: This process's batches, of arrays [B / P, ...].
      sharding: Where the first axis of the global arrays is cut.
      depth: How many placed batches wait while one is in use.

    Yields:
      The same batches as global arrays [B, ...].
    """
    iterator = iter(batches)
    waiting: collections.deque[dict[str, jax.Array]] = collections.deque()

    def place(number: int) -> None:
        for batch in itertools.islice(iterator, number):
            # With several processes JAX takes this explicit transfer for an implicit one.
            with jax.transfer_guard_host_to_device("allow"):
                waiting.append(
                    {
                        key: jax.make_array_from_process_local_data(sharding, array)
                        for key, array in batch.items()
                    }
                )

    place(depth)
    while waiting:
        place(1)
        yield waiting.popleft()
