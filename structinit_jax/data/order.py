"""Orders the training examples as a function of the seed and the position in the stream.

A run therefore needs only its step number to resume, on any number of processes. Grain's `shuffle`
does not promise the same order in later versions.
"""

import functools

import numpy as np


@functools.lru_cache(maxsize=4)  # a batch reads at most two epochs at a time
def _epoch_order(seed, epoch, num_examples):
    # NumPy guarantees the raw output of Philox across versions, unlike `Generator.permutation`.
    key = np.array([seed, epoch], np.uint64)
    order = np.argsort(np.random.Philox(key=key).random_raw(num_examples), kind="stable")
    order.flags.writeable = False  # the cache returns the same array again
    return order


def stream_indices(
    seed: int,
    start: int,
    stop: int,
    num_examples: int,
    repeats: int = 1,
    epoch_length: int | None = None,
) -> np.ndarray:
    """Returns a part of the training stream: independently shuffled epochs, one after another.

    By default a batch may straddle two epochs, so each epoch contains every example exactly once. A
    shorter epoch uses the first part of its permutation. With repeated augmentation (Hoffer et al.
    2020), each example occupies `repeats` consecutive positions, and an epoch of the same length
    also uses the first part of its permutation, as in timm.

    Args:
      seed: Non-negative seed of the permutations.
      start: First position.
      stop: Position after the last one.
      num_examples: Number of examples.
      repeats: Number of consecutive positions that hold the same example.
      epoch_length: Number of positions in an epoch, at most `num_examples` and by default equal.

    Returns:
      Example indices, int64 [stop - start].
    """
    positions = np.arange(start, stop, dtype=np.int64)
    length = epoch_length or num_examples
    epochs, offsets = np.divmod(positions, length)
    indices = np.empty_like(positions)
    for epoch in range(start // length, -(-stop // length)):
        inside = epochs == epoch
        indices[inside] = _epoch_order(seed, epoch, num_examples)[offsets[inside] // repeats]
    return indices
