"""Scikit-learn's handwritten digits as a TFDS data set: real images without a download."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image


class Digits(tfds.core.GeneratorBasedBuilder):
    """The 1,797 8x8 grey images that come inside the scikit-learn wheel.

    They are the test part of the UCI "Optical Recognition of Handwritten Digits" set. The 17 grey
    levels 0..16 are scaled to 0..255 and rounded. The split is fixed: every fifth image (index % 5
    == 4) is `test`, the others are `train`, which makes 359 and 1,438. The same writers appear in
    both, so the test accuracy says nothing about writers never seen.
    """

    name = "digits"
    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=type(self).__doc__,
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(shape=(8, 8, 1)),
                    "label": tfds.features.ClassLabel(num_classes=10),
                }
            ),
            supervised_keys=("image", "label"),
            homepage="https://doi.org/10.24432/C50P49",
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator]:
        del dl_manager
        is_test = np.arange(1797) % 5 == 4
        return {
            "train": self._generate_examples(np.flatnonzero(~is_test)),
            "test": self._generate_examples(np.flatnonzero(is_test)),
        }

    def _generate_examples(self, indices: np.ndarray) -> Iterator[tuple[int, dict[str, Any]]]:
        from sklearn.datasets import load_digits

        digits = load_digits()
        pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)
        for index in indices.tolist():
            image = Image.fromarray(pixels[index])
            yield index, {"image": image, "label": int(digits.target[index])}
