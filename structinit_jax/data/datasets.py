"""Opens data sets by name.

To use your own data set, write a function `my_dataset(data_dir) -> Dataset` that returns
`Dataset.from_records(...)`, and name it in the config: `data.name="my_module:my_dataset"`.
"""

import dataclasses
import os

from structinit_jax.checks import find, is_reference
from structinit_jax.data.folder import open_folder
from structinit_jax.data.small import open_digits, open_fashion_mnist
from structinit_jax.data.source import Dataset, DatasetInfo, Folder

# Known data sets: a dry run needs no data. Splits without labels are left out: 'unlabelled' of
# stl10, 'test' of imagenet2012.
CATALOG: dict[str, DatasetInfo] = {
    "digits": DatasetInfo(10, 1, {"train": 1_438, "test": 359}),
    "fashion_mnist": DatasetInfo(10, 1, {"train": 60_000, "test": 10_000}),
    "cifar10": DatasetInfo(10, 3, {"train": 50_000, "test": 10_000}),
    "cifar100": DatasetInfo(100, 3, {"train": 50_000, "test": 10_000}),
    "svhn_cropped": DatasetInfo(10, 3, {"train": 73_257, "test": 26_032, "extra": 531_131}),
    "stl10": DatasetInfo(10, 3, {"train": 5_000, "test": 8_000}),
    "oxford_flowers102": DatasetInfo(102, 3, {"train": 1_020, "validation": 1_020, "test": 6_149}),
    "oxford_iiit_pet": DatasetInfo(37, 3, {"train": 3_680, "test": 3_669}),
    "food101": DatasetInfo(101, 3, {"train": 75_750, "validation": 25_250}),
    "imagenet2012": DatasetInfo(1000, 3, {"train": 1_281_167, "validation": 50_000}),
}

# Data sets that are not read through TFDS.
OPENERS = {"digits": open_digits, "fashion_mnist": open_fashion_mnist, "folder": open_folder}


def open_dataset(name: str, data_dir: Folder = None, channels: int | None = None) -> Dataset:
    """Opens a data set.

    Args:
      name: 'digits', 'fashion_mnist', 'folder', a TFDS name or `module:function` (a data set of
        your own).
      data_dir: TFDS's folder for its data sets (None: `$TFDS_DATA_DIR` or
        `~/tensorflow_datasets`), the image folder, the folder of fashion_mnist's files, or the
        argument of the function. `~` is expanded.
      channels: 1 converts the images to gray and 3 to color; None leaves them as they are.

    Raises:
      InputError: The name is unknown, or the data set cannot be read.
    """
    # Shells leave `~` alone in `--flag=~/folder`.
    data_dir = data_dir and os.path.expanduser(data_dir)
    if name in OPENERS or is_reference(name):
        dataset = find(name, OPENERS, "name")(data_dir)
    else:
        from structinit_jax.data import builders  # imports TFDS

        dataset = builders.open_tfds(name, data_dir)
    if channels is None:
        return dataset
    return dataclasses.replace(dataset, info=dataclasses.replace(dataset.info, channels=channels))


def find_info(name: str, data_dir: Folder = None) -> DatasetInfo:
    """Returns the info of a data set, which need not be present if it is in `CATALOG`."""
    return CATALOG[name] if name in CATALOG else open_dataset(name, data_dir).info
