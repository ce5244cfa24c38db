import threading

import jax
import numpy as np
import pytest
from tfds_sets import source_of

from structinit_jax.data import loader as loader_lib
from structinit_jax.data.images import CenterCrop, RandomCrop
from structinit_jax.data.loader import DeviceLoader, HostLoader, make_loader, stream_indices

NUM = 37


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


@pytest.fixture(scope="module")
def source():
    """Grayscale images of several sizes; each image's label is its index."""
    rng = np.random.default_rng(0)
    sizes = [(8, 8), (9, 12), (20, 11)]
    images = [rng.integers(0, 256, (*sizes[i % 3], 1), dtype=np.uint8) for i in range(NUM)]
    return source_of(images, range(NUM), range(NUM), channels=1)


@pytest.fixture(scope="module")
def device_loader(source, mesh):
    return make_loader(source, mesh, CenterCrop(8, 0.9))


@pytest.fixture(scope="module")
def host_loader(source, mesh):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader_lib, "IN_MEMORY_BYTES", 0)
        return make_loader(source, mesh, CenterCrop(8, 0.9))


def assert_same(ours, theirs, number):
    ours, theirs = list(ours), list(theirs)
    assert len(ours) == len(theirs) == number
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        for key in one:
            assert one[key].dtype == other[key].dtype
            assert one[key].sharding == other[key].sharding
            np.testing.assert_array_equal(jax.device_get(one[key]), jax.device_get(other[key]))


@pytest.mark.parametrize(
    ("batch_size", "start_step", "drop_remainder"),
    # 37 examples: batches that cross one epoch boundary, and batches that cross several.
    [(8, 0, False), (88, 11, False), (8, 11, True)],
)
@pytest.mark.parametrize("repeats", [1, 2])
def test_both_loaders_return_the_same_training_batches(
    device_loader, host_loader, batch_size, start_step, repeats, drop_remainder
):
    assert isinstance(device_loader, DeviceLoader)
    assert isinstance(host_loader, HostLoader)
    args = dict(batch_size=batch_size, seed=3, start_step=start_step, num_steps=12)
    args.update(repeats=repeats, drop_remainder=drop_remainder)
    ours, theirs = (loader.train_batches(**args) for loader in (device_loader, host_loader))
    assert_same(ours, theirs, 12 - start_step)


def test_random_crops_are_drawn_on_the_host(source, mesh):
    assert isinstance(make_loader(source, mesh, RandomCrop(8, seed=0)), HostLoader)


def test_a_mixing_group_has_no_image_twice(device_loader):
    args = dict(batch_size=32, seed=1, start_step=0, num_steps=4, repeats=3)
    batches = device_loader.train_batches(**args, drop_remainder=True)
    labels = np.stack([jax.device_get(batch["label"]) for batch in batches])
    assert all(len(set(group)) == 8 for group in labels.reshape(-1, 8).tolist())
    # A batch holds the same examples as in the stream, in another order.
    stream = stream_indices(1, np.arange(4 * 32), NUM, 3, epoch_length=32).reshape(4, 32)
    np.testing.assert_array_equal(np.sort(labels), np.sort(stream))


@pytest.mark.parametrize("batch_size", [8, 40])
def test_evaluation_sees_each_example_once(device_loader, host_loader, batch_size):
    loaders = (device_loader, host_loader)
    number = -(-NUM // batch_size)
    assert_same(*(loader.eval_batches(batch_size=batch_size) for loader in loaders), number)
    seen = []
    for batch in jax.device_get(list(device_loader.eval_batches(batch_size=batch_size))):
        seen += batch["label"].tolist()
    assert seen == [*range(NUM), *[0] * (number * batch_size - NUM)]


@pytest.mark.parametrize("batch_size", [6, 3 * 128])
def test_processes_share_each_global_batch(host_loader, source, batch_size):
    def order(start, stop):
        return np.arange(start, stop) % NUM

    parts = [
        list(host_loader.read_batches(order, range(2, 7), batch_size, number, process_count=3))
        for number in range(3)
    ]
    for step, batches in enumerate(zip(*parts, strict=True), start=2):
        whole = np.concatenate([batch["label"] for batch in batches])
        positions = batch_size * step + np.arange(batch_size)
        np.testing.assert_array_equal(whole, positions % NUM)


def test_a_stopped_iteration_ends_its_threads(host_loader):
    before = threading.active_count()
    batches = host_loader.eval_batches(batch_size=8)
    next(batches)
    assert threading.active_count() > before
    batches.close()
    assert threading.active_count() <= before


def test_no_implicit_transfers_and_one_send_per_epoch(device_loader, monkeypatch):
    sent, send = [], device_loader._send
    monkeypatch.setattr(device_loader, "_send", lambda x: sent.append(x.shape) or send(x))
    args = dict(batch_size=8, seed=0, start_step=0, num_steps=5 * NUM // 8)
    with jax.transfer_guard("disallow"):
        list(device_loader.train_batches(**args))
        list(device_loader.eval_batches(batch_size=16))
    orders = [shape for shape in sent if shape]
    assert len(orders) == 5 + 1


def test_each_device_gathers_its_own_part(device_loader):
    indices, zero = (device_loader._send(np.zeros(n, np.int32)) for n in (53, ()))
    arguments = (device_loader._images, device_loader._labels, indices, zero)
    text = device_loader._gather.lower(*arguments, 16).compile().as_text()
    assert "gather" in text
    assert not any(word in text for word in ("all-gather", "all-reduce", "all-to-all"))


def test_the_stream_is_shuffled_epochs_end_to_end():
    stream = stream_indices(seed=5, positions=np.arange(50), num_examples=10)
    epochs = stream.reshape(5, 10)
    np.testing.assert_array_equal(np.sort(epochs, axis=1), np.tile(np.arange(10), (5, 1)))
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 5
    for positions in (np.arange(0), np.arange(3, 9), np.arange(7, 31), np.array([39, 2, 40])):
        np.testing.assert_array_equal(stream_indices(5, positions, 10), stream[positions])
    # A change here would change the order of every resumed run.
    assert stream_indices(3, np.arange(8), 8).tolist() == [6, 1, 5, 2, 7, 4, 3, 0]


@pytest.mark.parametrize("repeats", [1, 3])
def test_a_shorter_epoch_is_the_first_part_of_its_permutation(repeats):
    whole = stream_indices(1, np.arange(44), 11, repeats).reshape(4, 11)
    shorter = stream_indices(1, np.arange(32), 11, repeats, epoch_length=8).reshape(4, 8)
    np.testing.assert_array_equal(shorter, whole[:, :8])
    # Repeats are adjacent, and the repeated examples are the first of an epoch without repeats.
    firsts = stream_indices(1, np.arange(44), 11).reshape(4, 11)[:, np.arange(11) // repeats]
    np.testing.assert_array_equal(whole, firsts)
