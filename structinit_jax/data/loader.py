"""From a split to global batches on the devices."""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from structinit_jax.augment import AugmentOptions
from structinit_jax.data import stream
from structinit_jax.data.crop import CropOptions
from structinit_jax.data.device import DeviceExamples
from structinit_jax.data.examples import IN_MEMORY_BYTES, LazyExamples, load_examples
from structinit_jax.data.info import DatasetInfo
from structinit_jax.data.source import Source


class AugmentationSplit(NamedTuple):
    """Where training images are cut to the model's size.

    Attributes:
      image_size: side of the uint8 images that reach the training step.
      host_crop: a random crop cut out with decoding, or None.
      on_device: what is left to do in the step.
    """

    image_size: int
    host_crop: CropOptions | None
    on_device: AugmentOptions


def split_augmentation(
    options: AugmentOptions, info: DatasetInfo, num_examples: int, seed: int
) -> AugmentationSplit:
    """Crops on the devices where all images have one size and fit there; else with decoding.

    Args:
      options: the recipe.
      info: of the data set.
      num_examples: of the training split.
      seed: of the crops on the host.
    """
    if options.crop != "resized":
        return AugmentationSplit(options.image_size, None, options)
    height, width, channels = info.image_shape
    if height is not None and height == width:
        size = num_examples * height * width * channels
        if size <= IN_MEMORY_BYTES:
            return AugmentationSplit(height, None, options)
    crop = CropOptions(
        seed=seed,
        scale=options.crop_scale,
        ratio=options.crop_ratio,
        interpolation=options.interpolation,
    )
    return AugmentationSplit(options.image_size, crop, dataclasses.replace(options, crop="none"))


class HostLoader:
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
        batches = stream.train_batches(self._examples, **options, **self._process)
        return stream.place_batches(batches, self._sharding)

    def eval_batches(self, *, batch_size: int) -> Iterator[dict[str, jax.Array]]:
        """See `DeviceExamples.eval_batches`."""
        batches = stream.eval_batches(self._examples, batch_size=batch_size, **self._process)
        return stream.place_batches(batches, self._sharding)


Loader = DeviceExamples | HostLoader


def make_loader(
    source: Source,
    info: DatasetInfo,
    mesh: Mesh,
    *,
    image_size: int,
    crop_fraction: float = 1.0,
    random_crop: CropOptions | None = None,
) -> Loader:
    """Global batches of a split: gathered on the devices where it fits into memory.

    Args:
      source: A split from `Dataset.split`.
      info: Of its data set.
      mesh: The devices; batches are split over all its axes.
      image_size: Height and width of the batches' images in pixels.
      crop_fraction: Side of the central crop, as a fraction of the shorter side.
      random_crop: Cuts a random box in place of the central crop.
    """
    examples = load_examples(source, info, image_size, crop_fraction, random_crop)
    if isinstance(examples, LazyExamples):
        return HostLoader(examples, mesh)
    return DeviceExamples(examples, mesh)
