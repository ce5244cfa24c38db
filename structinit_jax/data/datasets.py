"""Opens data sets by name, and the test sets of ImageNet with their rules.

To use your own data set, write a function `my_dataset(data_dir) -> Dataset` that returns
`Dataset.from_records(...)`, and name it in the config: `data.name="my_module:my_dataset"`.
"""

import dataclasses
import itertools

import numpy as np

from structinit_jax.data.folder import open_folder
from structinit_jax.data.small import open_digits, open_fashion_mnist
from structinit_jax.data.source import Dataset, DatasetInfo, Folder, ImageSource, expand_user
from structinit_jax.errors import InputError, is_reference, load_reference

# Known data sets: a dry run needs no data. Splits without labels are left out: 'unlabelled' of
# stl10, 'test' of imagenet2012.
CATALOG: dict[str, DatasetInfo] = {
    "digits": DatasetInfo(10, (8, 8, 1), {"train": 1_438, "test": 359}),
    "fashion_mnist": DatasetInfo(10, (28, 28, 1), {"train": 60_000, "test": 10_000}),
    "cifar10": DatasetInfo(10, (32, 32, 3), {"train": 50_000, "test": 10_000}),
    "cifar100": DatasetInfo(100, (32, 32, 3), {"train": 50_000, "test": 10_000}),
    "svhn_cropped": DatasetInfo(
        10, (32, 32, 3), {"train": 73_257, "test": 26_032, "extra": 531_131}
    ),
    "stl10": DatasetInfo(10, (96, 96, 3), {"train": 5_000, "test": 8_000}),
    "oxford_flowers102": DatasetInfo(
        102, (None, None, 3), {"train": 1_020, "validation": 1_020, "test": 6_149}
    ),
    "oxford_iiit_pet": DatasetInfo(37, (None, None, 3), {"train": 3_680, "test": 3_669}),
    "food101": DatasetInfo(101, (None, None, 3), {"train": 75_750, "validation": 25_250}),
    "imagenet2012": DatasetInfo(1000, (None, None, 3), {"train": 1_281_167, "validation": 50_000}),
    # Test sets with the classes of imagenet2012.
    "imagenet2012_real": DatasetInfo(1000, (None, None, 3), {"validation": 50_000}),
    "imagenet_v2": DatasetInfo(1000, (None, None, 3), {"test": 10_000}),
    "imagenet_sketch": DatasetInfo(1000, (None, None, 3), {"test": 50_889}),
    "imagenet_a": DatasetInfo(1000, (None, None, 3), {"test": 7_500}),
    "imagenet_r": DatasetInfo(1000, (None, None, 3), {"test": 30_000}),
}
# Values of `config.data.eval_name`, test sets for models trained on imagenet2012 -> the split and
# how many of the 1,000 classes occur in it.
EVALUATION_SETS = {
    "imagenet2012": ("validation", 1000),
    "imagenet2012_real": ("validation", 1000),
    "imagenet_v2": ("test", 1000),
    "imagenet_sketch": ("test", 1000),
    "imagenet_a": ("test", 200),
    "imagenet_r": ("test", 200),
}


def open_dataset(
    name: str, data_dir: Folder = None, manual_dir: Folder = None, channels: int | None = None
) -> Dataset:
    """Opens a data set.

    Args:
      name: 'digits', 'fashion_mnist', 'folder', a TFDS name or `module:function` (a data set of
        your own).
      data_dir: The image folder, TFDS's folder for its data sets (None: `$TFDS_DATA_DIR` or
        `~/tensorflow_datasets`), or the argument of the function.
      manual_dir: Folder with the original files of fashion_mnist; None downloads them.
        `~` is expanded in both folders.
      channels: 1 converts the images to gray and 3 to color; None leaves them as they are.

    Raises:
      InputError: The name is unknown, or the data set cannot be read.
    """
    data_dir, manual_dir = expand_user(data_dir), expand_user(manual_dir)
    if name == "folder":
        dataset = open_folder(data_dir)
    elif name == "digits":
        dataset = open_digits()
    elif name == "fashion_mnist":
        dataset = open_fashion_mnist(data_dir, manual_dir)
    elif is_reference(name):
        dataset = load_reference(name, "data.name")(data_dir)
        if not isinstance(dataset, Dataset):
            raise InputError(
                f"config.data.name={name!r} returned {type(dataset).__name__}, expected a Dataset."
                " Return structinit_jax.data.source.Dataset.from_records(...)."
            )
    else:
        from structinit_jax.data import builders  # imports TFDS

        dataset = builders.open_tfds(name, data_dir)
    if channels is None:
        return dataset
    return dataclasses.replace(dataset, info=dataset.info.with_channels(channels))


def find_info(name: str, data_dir: Folder = None, channels: int | None = None) -> DatasetInfo:
    """Returns the info of a data set, which need not be present if it is in `CATALOG`."""
    info = CATALOG[name] if name in CATALOG else open_dataset(name, data_dir).info
    return info if channels is None else info.with_channels(channels)


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


def open_test_set(
    name: str, data_dir: Folder = None, on_bad_image: str = "stop", channels: int | None = None
) -> EvaluationSet:
    """Opens a test set for models trained on ImageNet-1K.

    TFDS labels all of them with the classes of imagenet2012. Two rules differ from top-1 accuracy:
    ImageNet-A and ImageNet-R contain 200 classes, and the best of these 200 is the prediction. ReaL
    has a set of correct labels for each image; images with an empty set are left out.

    For the arguments see `open_dataset` and `Dataset.split`. `name` is a key of `EVALUATION_SETS`,
    for ImageNet-V2 optionally with a variant, such as 'imagenet_v2/topimages'; its default is
    'matched-frequency'.

    Raises:
      InputError: The set is not prepared.
    """
    split, num_classes = EVALUATION_SETS[name.split("/")[0]]
    dataset = open_dataset(name, data_dir, channels=channels)
    source = dataset.split(split, f"data.eval_name={name!r}, split", on_bad_image)
    if name == "imagenet2012_real":
        return _open_real(f"{name} {split}", source)
    if num_classes == dataset.info.num_classes:
        return EvaluationSet(f"{name} {split}", source)
    rule = f"the best of its {num_classes} classes"
    return EvaluationSet(f"{name} {split}, {rule}", source, np.unique(source.labels()))


def _open_real(name, source):
    """Leaves out images without a label; the label of the others is their row of `answers`."""
    labels = source.column("real_label")
    labelled = [row for row in labels if len(row)]
    answers = np.array(list(itertools.zip_longest(*labelled, fillvalue=-1)), np.int32).T
    name = f"{name}, images without a label left out: {len(labels) - len(labelled):,}"
    source = source.select(np.array([len(row) > 0 for row in labels]))
    source = dataclasses.replace(source, new_labels=np.arange(len(source)))
    return EvaluationSet(name, source, answers=answers)
