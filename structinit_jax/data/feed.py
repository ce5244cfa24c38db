"""From a split to global batches on the devices: which way images take, by the size of the set."""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from structinit_jax.augment import AugmentOptions
from structinit_jax.data import loader
from structinit_jax.data.catalog import DatasetFacts
from structinit_jax.data.crop import CropOptions
from structinit_jax.data.device import DeviceExamples
from structinit_jax.data.examples import IN_MEMORY_BYTES, Examples, LazyExamples


class Route(NamedTuple):
    """Where training images are cut to the model's size.

    Attributes:
      image_size: side of the uint8 images that reach the training step.
      host_crop: a random crop cut out with decoding, or None.
      augment: what is left to do in the step.
    """

    image_size: int
    host_crop: CropOptions | None
    augment: AugmentOptions


def choose_route(
    options: AugmentOptions, facts: DatasetFacts, num_examples: int, seed: int
) -> Route:
    """Crops on the devices where all images have one size and fit there; else with decoding.

    Args:
      options: the recipe.
      facts: of the data set.
      num_examples: of the training split.
      seed: of the crops on the host.
    """
    if options.crop != "resized":
        return Route(options.image_size, None, options)
    height, width, channels = facts.image_shape
    if height is not None and height == width:
        size = num_examples * height * width * channels
        if size <= IN_MEMORY_BYTES:
            return Route(height, None, options)
    crop = CropOptions(
        seed=seed,
        scale=options.crop_scale,
        ratio=options.crop_ratio,
        interpolation=options.interpolation,
    )
    return Route(options.image_size, crop, dataclasses.replace(options, crop="none"))


class HostFeed:
    """A split that is decoded while the training runs; each process decodes its share.

    Args:
      examples: the split.
      mesh: the devices; batches are split over all its axes.
    """

    def __init__(self, examples: LazyExamples, mesh: Mesh):
        self._examples = examples
        self._sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._process = dict(process_index=jax.process_index(), process_count=jax.process_count())

    def train_batches(self, **options) -> Iterator[dict[str, jax.Array]]:
        """See `DeviceExamples.train_batches`."""
        batches = loader.train_batches(self._examples, **options, **self._process)
        return loader.place_batches(batches, self._sharding)

    def eval_batches(self, *, batch_size: int) -> Iterator[dict[str, jax.Array]]:
        """See `DeviceExamples.eval_batches`."""
        batches = loader.eval_batches(self._examples, batch_size=batch_size, **self._process)
        return loader.place_batches(batches, self._sharding)


Feed = DeviceExamples | HostFeed


def make_feed(examples: Examples, mesh: Mesh) -> Feed:
    """Global batches of a split: gathered on the devices where it is in memory."""
    if isinstance(examples, LazyExamples):
        return HostFeed(examples, mesh)
    return DeviceExamples(examples, mesh)
