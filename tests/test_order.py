import numpy as np
import pytest

from structinit_jax.data.order import stream_indices


def test_stream_is_shuffled_epochs_end_to_end():
    stream = stream_indices(seed=0, start=0, stop=50, num_examples=10)
    epochs = stream.reshape(5, 10)
    np.testing.assert_array_equal(np.sort(epochs, axis=1), np.tile(np.arange(10), (5, 1)))
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 5
    assert stream.dtype == np.int64
    assert (stream != stream_indices(1, 0, 50, 10)).any()


def test_stream_is_uniform():
    first = [stream_indices(seed, 0, 1, 5)[0] for seed in range(2000)]
    np.testing.assert_allclose(np.bincount(first, minlength=5), 400, atol=90)


def test_stream_order_is_pinned():
    # A change here would change the order of every resumed run.
    assert stream_indices(3, 0, 8, 8).tolist() == [6, 1, 5, 2, 7, 4, 3, 0]


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (3, 9), (7, 31), (10, 20), (39, 40)])
def test_any_part_of_the_stream_equals_the_whole(start, stop):
    whole = stream_indices(5, 0, 40, 10)
    np.testing.assert_array_equal(stream_indices(5, start, stop, 10), whole[start:stop])


@pytest.mark.parametrize("repeats", [1, 3])
def test_a_shorter_epoch_is_the_first_part_of_its_permutation(repeats):
    whole = stream_indices(1, 0, 44, 11, repeats).reshape(4, 11)
    shorter = stream_indices(1, 0, 32, 11, repeats, epoch_length=8).reshape(4, 8)
    np.testing.assert_array_equal(shorter, whole[:, :8])
    np.testing.assert_array_equal(stream_indices(1, 5, 19, 11, repeats, 8), shorter.ravel()[5:19])


def test_repeated_examples_stand_together():
    epochs = stream_indices(1, 0, 40, 20, repeats=2).reshape(2, 10, 2)
    np.testing.assert_array_equal(epochs[..., 0], epochs[..., 1])
    firsts = stream_indices(1, 0, 40, 20).reshape(2, 20)[:, :10]
    np.testing.assert_array_equal(epochs[..., 0], firsts)
