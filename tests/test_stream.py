import itertools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from structinit_jax.data import examples as examples_lib
from structinit_jax.data.examples import (
    ArrayExamples,
    LazyExamples,
    check_examples,
    fit_image,
    load_examples,
)
from structinit_jax.data.info import DatasetInfo
from structinit_jax.data.stream import eval_batches, place_batches, stream_indices, train_batches
from structinit_jax.errors import InputError

INFO = DatasetInfo(10, (None, None, 3), {"train": 23})


class FakeSource:
    """Images of several sizes; the label is the index."""

    def __init__(self, length=23):
        rng = np.random.default_rng(0)
        sizes = [(8, 8), (9, 12), (20, 11)]
        self.images = [
            rng.integers(0, 256, (*sizes[i % 3], 3), dtype=np.uint8) for i in range(length)
        ]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return {"image": self.images[index], "label": index}

    def open(self, index):
        raise NotImplementedError

    def read(self, indices):
        return [self[index] for index in indices]


@pytest.fixture(params=["array", "lazy"])
def examples(request, monkeypatch):
    if request.param == "lazy":
        monkeypatch.setattr(examples_lib, "IN_MEMORY_BYTES", 0)
    loaded = load_examples(FakeSource(), INFO, image_size=8)
    assert isinstance(loaded, ArrayExamples if request.param == "array" else LazyExamples)
    return loaded


def labels_of(batches):
    return [batch["label"].tolist() for batch in batches]


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
def test_any_piece_of_the_stream_equals_the_whole(start, stop):
    whole = stream_indices(5, 0, 40, 10)
    np.testing.assert_array_equal(stream_indices(5, start, stop, 10), whole[start:stop])


def test_train_batches_follow_the_stream(examples):
    batches = list(train_batches(examples, batch_size=6, seed=1, start_step=0, num_steps=9))
    order = stream_indices(1, 0, 54, 23)
    assert list(itertools.chain(*labels_of(batches))) == order.tolist()
    for batch in batches:
        assert batch["image"].shape == (6, 8, 8, 3)
        assert (batch["image"].dtype, batch["label"].dtype) == (np.uint8, np.int32)


def test_lazy_and_array_examples_give_the_same(monkeypatch):
    array = load_examples(FakeSource(), INFO, image_size=8, crop_fraction=0.875)
    monkeypatch.setattr(examples_lib, "IN_MEMORY_BYTES", 0)
    lazy = load_examples(FakeSource(), INFO, image_size=8, crop_fraction=0.875)
    args = {"batch_size": 5, "seed": 2, "start_step": 3, "num_steps": 8}
    pairs = zip(train_batches(array, **args), train_batches(lazy, **args), strict=True)
    for one, other in pairs:
        jax.tree.map(np.testing.assert_array_equal, one, other)


def test_resumed_batches_are_the_tail(examples):
    def run(start_step):
        return labels_of(
            train_batches(examples, batch_size=4, seed=0, start_step=start_step, num_steps=12)
        )

    assert run(5) == run(0)[5:]
    assert run(12) == []


@pytest.mark.parametrize("process_count", [2, 3])
def test_processes_share_each_global_batch(examples, process_count):
    args = {"batch_size": 6, "seed": 0, "start_step": 2, "num_steps": 7}
    whole = labels_of(train_batches(examples, **args))
    shards = [
        labels_of(train_batches(examples, **args, process_index=p, process_count=process_count))
        for p in range(process_count)
    ]
    assert [list(itertools.chain(*parts)) for parts in zip(*shards, strict=True)] == whole


@pytest.mark.parametrize("process_count", [1, 2])
def test_eval_sees_each_example_once(examples, process_count):
    seen, counts = [], []
    for p in range(process_count):
        batches = list(
            eval_batches(examples, batch_size=20, process_index=p, process_count=process_count)
        )
        counts.append(len(batches))
        for batch in batches:
            assert len(batch["label"]) == len(batch["mask"]) == 20 // process_count
            assert batch["mask"].dtype == np.float32
            seen += batch["label"][batch["mask"] == 1].tolist()
            assert (batch["label"][batch["mask"] == 0] == 0).all()
    assert sorted(seen) == list(range(23))
    assert set(counts) == {2}


def test_batch_size_must_fit_the_processes(examples):
    with pytest.raises(InputError, match="batch_size=7"):
        eval_batches(examples, batch_size=7, process_count=2)


def test_fit_image():
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (8, 8, 1), dtype=np.uint8)
    np.testing.assert_array_equal(fit_image(image, 8, 1.0), image)
    wide = np.zeros((10, 30, 3), np.uint8)
    wide[:, 10:20] = 200  # the centre square
    np.testing.assert_array_equal(fit_image(wide, 10, 1.0), np.full((10, 10, 3), 200))
    for height, width in itertools.product(range(5, 40, 7), repeat=2):
        image = np.zeros((height, width, 1), np.uint8)
        assert fit_image(image, 14, 0.875).shape == (14, 14, 1)


def test_model_and_data_must_agree():
    check_examples(INFO, num_classes=10, channels=3)
    with pytest.raises(InputError, match=r"model\.num_classes=100: .* 10 classes"):
        check_examples(INFO, num_classes=100, channels=3)
    with pytest.raises(InputError, match=r"data\.channels=1: "):
        check_examples(INFO, num_classes=10, channels=1)


def test_placed_batches_run_ahead_and_keep_their_order():
    taken = []

    def local_batches():
        for number in range(5):
            taken.append(number)
            yield {"image": np.full((len(jax.devices()), 2), number, np.uint8)}

    mesh = jax.make_mesh((len(jax.devices()),), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    with jax.transfer_guard("disallow"):
        placed = place_batches(local_batches(), sharding, depth=2)
        first = next(placed)
        assert taken == [0, 1, 2]
        numbers = [first, *placed]
    assert [int(np.asarray(batch["image"])[0, 0]) for batch in numbers] == [0, 1, 2, 3, 4]
    assert first["image"].sharding == sharding
