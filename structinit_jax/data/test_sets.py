"""Opens test sets for models trained on ImageNet-1K, with the correct predictions of each.

TFDS labels all of them with the classes of imagenet2012. Two rules differ from top-1 accuracy:
ImageNet-A and ImageNet-R contain 200 classes, and the best of these 200 is the prediction. ReaL has
a set of correct labels for each image; images with an empty set are left out.
"""

import dataclasses
import itertools

import numpy as np

from structinit_jax.data.datasets import Folder, ImageSource, open_dataset
from structinit_jax.data.info import EVALUATION_SETS
from structinit_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class EvaluationSet:
    """Images to evaluate a model on, and the correct predictions.

    Attributes:
      name: Data set, split and rule, for messages.
      source: The images. Labels are classes, or rows of `answers`.
      classes: Classes that a prediction is chosen from, int64 [k], ascending; None for all.
      answers: The correct classes of each label, int32 [n, most], each row padded with -1; None if
        the label is the only correct class.
    """

    name: str
    source: ImageSource
    classes: np.ndarray | None = None
    answers: np.ndarray | None = None


def open_test_set(name: str, data_dir: Folder = None, on_bad_image: str = "stop") -> EvaluationSet:
    """Opens a test set of ImageNet.

    Args:
      name: A key of `EVALUATION_SETS`, for ImageNet-V2 optionally with a variant, for example
        'imagenet_v2/topimages'; the default is 'matched-frequency'.
      data_dir: See `open_dataset`.
      on_bad_image: See `Dataset.split`.

    Raises:
      InputError: The set is not prepared or is incomplete.
    """
    split, num_classes = EVALUATION_SETS[name.split("/")[0]]
    dataset = open_dataset(name, data_dir)
    source = dataset.split(split, f"data.eval_name={name!r}, split", on_bad_image)
    if name == "imagenet2012_real":
        return _open_real(f"{name} {split}", source)
    if num_classes == dataset.info.num_classes:
        return EvaluationSet(f"{name} {split}", source)
    classes = np.unique(source.labels())
    if len(classes) != num_classes:
        raise InputError(
            f"config.data.eval_name={name!r}: the set holds {len(classes)} classes, {num_classes}"
            " are expected. Prepare it again."
        )
    rule = f"the best of its {num_classes} classes"
    return EvaluationSet(f"{name} {split}, {rule}", source, classes)


def _open_real(name, source):
    """Leaves out images without a label; the label of the others is their row of `answers`."""
    labels = source.column("real_label")
    counts = np.array([len(row) for row in labels])
    source = source.select(counts > 0)
    labelled = (row for row in labels if len(row))
    answers = np.array(list(itertools.zip_longest(*labelled, fillvalue=-1)), np.int32).T
    name = f"{name}, images without a label left out: {np.sum(counts == 0):,}"
    return EvaluationSet(name, source.relabel(np.arange(len(source))), answers=answers)
