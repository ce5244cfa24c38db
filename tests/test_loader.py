import jax
import numpy as np
import pytest

from structinit_jax.augment import AugmentOptions
from structinit_jax.data import loader
from structinit_jax.data.device import DeviceExamples
from structinit_jax.data.examples import ArrayExamples, LazyExamples
from structinit_jax.data.info import DatasetInfo

OPTIONS = AugmentOptions(
    num_classes=10, mean=(0.5,) * 3, std=(0.5,) * 3, image_size=16, crop="resized"
)


def route(options, shape, num_examples=100):
    info = DatasetInfo(10, shape, {"train": num_examples})
    return loader.split_augmentation(options, info, num_examples, seed=7)


def test_images_of_one_size_are_cropped_on_the_devices():
    found = route(OPTIONS, (32, 32, 3))
    assert (found.image_size, found.host_crop) == (32, None)
    assert found.on_device is OPTIONS


@pytest.mark.parametrize(
    ("shape", "num_examples"), [((None, None, 3), 100), ((32, 48, 3), 100), ((32, 32, 3), 10**6)]
)
def test_other_images_are_cropped_with_decoding(shape, num_examples):
    found = route(OPTIONS, shape, num_examples)
    assert found.image_size == 16
    assert (found.host_crop.seed, found.host_crop.scale) == (7, (0.08, 1.0))
    assert found.on_device.crop == "none"


def test_without_a_random_crop_images_come_at_the_models_size():
    found = route(AugmentOptions(num_classes=10, mean=(0.5,), std=(0.5,), image_size=16), (8, 8, 1))
    assert (found.image_size, found.host_crop) == (16, None)


class Source:
    """Twenty images whose pixels and labels are their numbers."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return {"image": np.full((4, 4, 1), index, np.uint8), "label": index}

    def open(self, index):
        raise LookupError(index)

    def read(self, indices):
        return [self[index] for index in indices]


def test_both_feeds_give_the_same_batches_and_repeats_stand_together():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    images = np.stack([Source()[i]["image"] for i in range(20)])
    kept = DeviceExamples(ArrayExamples(images, np.arange(20, dtype=np.int32)), mesh)
    decoded = loader.HostLoader(LazyExamples(Source(), 4), mesh)
    assert isinstance(kept, DeviceExamples)
    assert isinstance(decoded, loader.HostLoader)
    options = dict(batch_size=8, seed=1, start_step=1, num_steps=5, repeats=2)
    batches = [list(f.train_batches(**options)) for f in (kept, decoded)]
    batches += [list(f.eval_batches(batch_size=8)) for f in (kept, decoded)]
    for one, other in (batches[:2], batches[2:]):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))
    whole = list(kept.train_batches(**options | dict(start_step=0)))
    labels = np.concatenate([jax.device_get(batch["label"]) for batch in whole])
    epochs = labels.reshape(2, 10, 2)
    assert np.all(epochs[..., 0] == epochs[..., 1])
    assert all(len(set(epoch[:, 0].tolist())) == 10 for epoch in epochs)
