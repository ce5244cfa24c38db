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
from structinit_jax.data.info import EVALUATION_SETS, DatasetInfo
from structinit_jax.data.source import ImageSource
from structinit_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class EvaluationSet:
    """What a model is evaluated on, and which predictions are right.

    Attributes:
      name: Data set, split and rule, for messages.
      source: The images. Their labels are classes, or where there are `answers` rows of them.
      info: Facts of the data set.
      classes: The classes that a prediction is chosen from, int64 [k], ascending; None for all.
      answers: The classes that are right, int32 [n, most], each row filled up with -1; None where
        the label is the only one.
    """

    name: str
    source: ImageSource
    info: DatasetInfo
    classes: np.ndarray | None = None
    answers: np.ndarray | None = None


def open_imagenet_evaluation(
    name: str, data_dir: str | os.PathLike | None = None, on_bad_image: str = "stop"
) -> EvaluationSet:
    """Opens a test set by its TFDS name.

    Args:
      name: One of `EVALUATION_SETS`; for ImageNet-V2 also with a variant, such as
        'imagenet_v2/topimages'; by itself it is 'matched-frequency'.
      data_dir: As in `open_dataset`.
      on_bad_image: As in `Dataset.split`.

    Returns:
      The whole set and its rule.

    Raises:
      InputError: The set is not prepared, or it is not complete.
    """
    split, num_classes = EVALUATION_SETS[name.split("/")[0]]
    dataset = open_dataset(name, data_dir)
    source = dataset.split(split, f"data.eval_name={name!r}, split", on_bad_image)
    if name == "imagenet2012_real":
        return _real(f"{name} {split}", source, dataset.info)
    if num_classes == dataset.info.num_classes:
        return EvaluationSet(f"{name} {split}", source, dataset.info)
    classes = np.unique(np.asarray(source.column("label"), np.int64))
    if len(classes) != num_classes:
        raise InputError(
            f"data.eval_name={name!r}: the prepared set holds {len(classes)} classes, {num_classes}"
            " are expected. Prepare it again."
        )
    rule = f"the best of its {num_classes} classes"
    return EvaluationSet(f"{name} {split}, {rule}", source, dataset.info, classes)


def _real(name: str, source: ImageSource, info: DatasetInfo) -> EvaluationSet:
    answers = source.column("real_label")
    counts = np.array([len(labels) for labels in answers])
    source = source.select(counts > 0)
    filled = np.full((len(source), counts.max()), -1, np.int32)
    for row, labels in zip(filled, (labels for labels in answers if len(labels)), strict=True):
        row[: len(labels)] = labels
    rule = f"images without a label left out: {np.sum(counts == 0):,}"
    return EvaluationSet(
        f"{name}, {rule}", source.relabel(np.arange(len(source))), info, None, filled
    )
