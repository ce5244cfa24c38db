"""The order of the training examples, a function of the seed and the position in the stream.

A run therefore resumes by its step number alone: there is no iterator state to save, and the number
of processes may change. Grain's `shuffle` and `repeat` are not used for it because they do not
promise the same order in later versions, and because data sets in device memory need the order
without reading an example.
"""

import functools

import numpy as np


@functools.lru_cache(maxsize=4)  # a batch reads at most two epochs at a time
def _epoch_order(seed: int, epoch: int, num_examples: int) -> np.ndarray:
    """The permutation of one epoch, int64 [num_examples].

    NumPy guarantees the raw output of Philox across versions, unlike `Generator.permutation`.
    """
    key = np.array([seed, epoch], np.uint64)
    order = np.argsort(np.random.Philox(key=key).random_raw(num_examples), kind="stable")
    order.flags.writeable = False  # the cache returns the same array again
    return order


def stream_indices(
    seed: int, start: int, stop: int, num_examples: int, repeats: int = 1
) -> np.ndarray:
    """Returns a part of the training stream: independently shuffled epochs, one after another.

    Position i belongs to epoch i // num_examples. A batch may straddle two epochs, so no example is
    lost or doubled within an epoch.

    With repeated augmentation (Hoffer et al. 2020), an epoch keeps its length, but each example
    occupies `repeats` consecutive positions. An epoch then holds only the first part of its
    permutation, as in timm.

    Args:
      seed: Non-negative seed of the permutations.
      start: First position.
      stop: Position after the last one.
      num_examples: Length of an epoch.
      repeats: Number of consecutive positions that hold the same example.

    Returns:
      Example indices, int64 [stop - start].
    """
    positions = np.arange(start, stop, dtype=np.int64)
    epochs, offsets = np.divmod(positions, num_examples)
    indices = np.empty_like(positions)
    for epoch in range(start // num_examples, -(-stop // num_examples)):
        inside = epochs == epoch
        indices[inside] = _epoch_order(seed, epoch, num_examples)[offsets[inside] // repeats]
    return indices
