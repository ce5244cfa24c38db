"""Small data sets: one in the place of a set that TFDS prepares, and records of images."""

import tensorflow_datasets as tfds
from PIL import Image

from structinit_jax.data.source import Dataset


@tfds.core.registered.skip_registration()
def write_small_set(data_dir, num_classes=1000, blue=9, channels=3):
    """Writes two images in the place and with the features of TFDS's imagenet_sketch.

    The red value of an image is its label; TFDS stores them in an order of its own.
    """
    features = {
        "image": tfds.features.Image(shape=(None, None, channels)),
        "label": tfds.features.ClassLabel(num_classes=num_classes),
        "file_name": tfds.features.Text(),
    }

    class SmallSet(tfds.core.GeneratorBasedBuilder):
        name = "imagenet_sketch"
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features)
            )

        def _split_generators(self, dl_manager):
            return {"test": self._generate_examples()}

        def _generate_examples(self):
            for label in (4, 7):
                image = Image.new("RGB", (3, 2), (label, 0, blue))
                image = image.convert({1: "L", 3: "RGB"}[channels])
                yield label, {"image": image, "label": label, "file_name": f"{label}.JPEG"}

    SmallSet(data_dir=data_dir).download_and_prepare(file_format="array_record")


def source_of(images, labels, class_names, name="many", **options):
    """A split 'train' of images and their labels."""
    records = [{"image": i, "label": label} for i, label in zip(images, labels, strict=True)]
    return Dataset.from_records(name, {"train": records}, class_names, **options).split("train")
