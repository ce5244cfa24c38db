"""Test sets for models trained on ImageNet-1K: what counts as a right answer in each.

TFDS labels all of them with the 1,000 classes of imagenet2012, so no class map is needed. Two rules
differ from plain accuracy. ImageNet-A and -R hold images of 200 classes only, and by their authors'
protocol the prediction is the best of those 200. ReaL gives an image every label that is right, or
none; images without one are left out.
"""

import dataclasses
import os

import numpy as np

from structinit_jax.data.datasets import open_dataset
from structinit_jax.data.source import ImageSource
from structinit_jax.errors import InputError

NUM_CLASSES = 1000
# Evaluation set -> its split and the number of classes in it.
EVALUATION_SETS = {
    "imagenet2012": ("validation", 1000),
    "imagenet2012_real": ("validation", 1000),
    "imagenet_v2": ("test", 1000),
    "imagenet_sketch": ("test", 1000),
    "imagenet_a": ("test", 200),
    "imagenet_r": ("test", 200),
}


@dataclasses.dataclass(frozen=True)
class ImageNetEvaluation:
    """A test set and its rule.

    Attributes:
      source: The images, for `load_examples`; `eval_batches` keeps their order.
      classes: The classes that a prediction is chosen from, int64 [K], ascending.
      targets: Which classes are right for each image, bool [n, 1000].
    """

    source: ImageSource
    classes: np.ndarray
    targets: np.ndarray

    def correct(self, logits: np.ndarray, start: int = 0) -> np.ndarray:
        """Judges the outputs of a model with 1,000 classes.

        Args:
          logits: For the images from `start` on, float [b, 1000].
          start: The first image's number.

        Returns:
          bool [b].

        Raises:
          InputError: The model has another number of classes.
        """
        if logits.shape[-1] != NUM_CLASSES:
            raise InputError(
                f"model.num_classes={logits.shape[-1]}: ImageNet's test sets need a model with"
                f" {NUM_CLASSES} classes in the order of imagenet2012."
            )
        predictions = self.classes[logits[:, self.classes].argmax(axis=-1)]
        numbers = start + np.arange(len(logits))
        return self.targets[numbers, predictions]


def open_imagenet_evaluation(
    name: str, data_dir: str | os.PathLike | None = None
) -> ImageNetEvaluation:
    """Opens an evaluation set by its TFDS name.

    Args:
      name: One of `EVALUATION_SETS`; for ImageNet-V2 also with a variant, such as
        'imagenet_v2/topimages'; by itself it is 'matched-frequency'.
      data_dir: As in `open_dataset`.

    Returns:
      The set and its rule.

    Raises:
      InputError: There is no such set, it is not prepared, or it is not complete.
    """
    if name.split("/")[0] not in EVALUATION_SETS:
        raise InputError(
            f"data.name={name!r}: no evaluation set of ImageNet. There are"
            f" {', '.join(EVALUATION_SETS)}."
        )
    split, num_classes = EVALUATION_SETS[name.split("/")[0]]
    source = open_dataset(name, data_dir).split(split, "data.eval_split")
    if name == "imagenet2012_real":
        answers = source.column("real_label")
        has_answer = np.array([len(labels) > 0 for labels in answers])
        source = source.select(has_answer)
        answers = [labels for labels in answers if len(labels)]
    else:
        answers = source.column("label")
    targets = np.zeros((len(source), NUM_CLASSES), bool)
    for row, labels in zip(targets, answers, strict=True):
        row[labels] = True
    classes = np.flatnonzero(targets.any(axis=0)) if num_classes < NUM_CLASSES else np.arange(1000)
    if len(classes) != num_classes:
        raise InputError(
            f"data.name={name!r}: the prepared set holds {len(classes)} classes, {num_classes} are"
            " expected. Prepare it again."
        )
    return ImageNetEvaluation(source, classes, targets)
