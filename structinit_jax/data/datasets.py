"""Opens data sets by name: this package's own and, without TensorFlow, those prepared by TFDS."""

import contextlib
import dataclasses
import functools
import os
import resource
from collections.abc import Iterator

from etils import epy

from structinit_jax.data.folder import open_folder
from structinit_jax.data.images import can_convert
from structinit_jax.data.small import open_digits, open_fashion_mnist
from structinit_jax.data.source import Dataset, DatasetInfo, Folder
from structinit_jax.errors import (
    InputError,
    find,
    is_reference,
    require,
    require_function,
    suggest,
)

with epy.lazy_imports():  # the import takes a quarter of a second
    import tensorflow_datasets as tfds

# Known data sets, so that a dry run needs no data. Splits without labels are left out: stl10's
# 'unlabelled' and imagenet2012's 'test'.
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
      name: 'digits', 'fashion_mnist', 'folder', a TFDS name or `module:function` (your own
        data set).
      data_dir: Depending on `name`, TFDS's data directory (None: `$TFDS_DATA_DIR` or
        `~/tensorflow_datasets`), the image folder, the folder with fashion_mnist's files, or the
        argument of the function. `~` is expanded.
      channels: Number of channels: 1 converts color images to gray, and 3 gray ones to color. If
        None, that of the data set; 3 for image folders.

    Raises:
      InputError: The name is unknown, or the data set cannot be read.
    """
    # Shells do not expand `~` in `--flag=~/folder`.
    data_dir = os.path.expanduser(data_dir) if data_dir else None
    if name == "folder":
        dataset = open_folder(data_dir, channels or 3)
    elif name in OPENERS or is_reference(name):
        opener = find(name, OPENERS, "name")
        require_function("name", opener, ("data_dir",))
        dataset = opener(data_dir)
        require("name", name, "a function that returns a Dataset", isinstance(dataset, Dataset))
    else:
        dataset = _open_tfds(name, data_dir)
    if channels is None:
        return dataset
    found = dataset.info.channels
    needs = f"{found}, as in the data set"
    require("channels", channels, needs, can_convert(found, channels))
    return dataclasses.replace(dataset, info=dataclasses.replace(dataset.info, channels=channels))


def find_builder(name: str, data_dir: Folder) -> "tfds.core.DatasetBuilder":
    """Finds the TFDS builder of a data set, prepared or not, or raises `InputError`."""
    with _errors_of_tfds(name, data_dir):
        return tfds.builder(name, data_dir=data_dir)


def _open_tfds(name, data_dir):
    builder = find_builder(name, data_dir)
    path = builder.data_path
    if not path.exists():
        raise InputError(
            f"data set {name!r} is not prepared: looked in {path}. Pass data_dir=DIR, the folder"
            f" that holds {name.partition(':')[0]}/, or download it with\n"
            f"  python -m structinit_jax.prepare --name={name} --data_dir={builder.data_dir_root}"
        )
    with _errors_of_tfds(name, data_dir):
        builder = tfds.builder_from_directory(path)  # also finds formats added later
        features = builder.info.features
        image = features["image"]
        class_names = features["label"].names
    if tfds.core.FileFormat.ARRAY_RECORD not in builder.info.available_file_formats():
        raise InputError(
            f"data set {name!r} is not prepared as array_record. Convert it, once, where"
            " TensorFlow is installed (pip install '.[prepare]'):\n"
            f"  tfds convert_format --dataset_version_dir={path} --out_file_format=array_record"
        )
    sizes = {split: info.num_examples for split, info in builder.info.splits.items()}
    info = DatasetInfo(len(class_names), 1 if image.shape[2] == 1 else 3, sizes)
    # TFDS does not decode the images, because it cannot read CMYK.
    images = [key for key, feature in features.items() if isinstance(feature, tfds.features.Image)]
    decoders = {key: tfds.decode.SkipDecoding() for key in images}
    # array_record keeps one file open per shard; ImageNet has 1,088 shards.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 10_000)), hard))
    open_split = functools.partial(builder.as_data_source, decoders=decoders)
    return Dataset(name, info, class_names, open_split)


@contextlib.contextmanager
def _errors_of_tfds(name: str, data_dir: Folder) -> Iterator[None]:
    """Turns TFDS errors in the context into `InputError`, and limits what TFDS imports.

    The files of a data set may come from a third party, and TFDS imports the module of every class
    that `features.json` names. In the context, it accepts only its own classes and those already
    imported.
    """
    connector = tfds.features.FeatureConnector
    find_class = connector.__dict__["cls_from_name"]

    def find_known_class(cls, class_name):
        if class_name in cls._registered_features or class_name.startswith("tensorflow_datasets."):
            return find_class.__func__(cls, class_name)
        raise ValueError(f"its features.json names {class_name!r}, which is not a class of TFDS")

    connector.cls_from_name = classmethod(find_known_class)
    try:
        yield
    except tfds.core.DatasetNotFoundError as error:
        stock = tfds.list_builders(with_community_datasets=False)
        hint = suggest(name.lower(), {*OPENERS, *stock})
        raise InputError(f"TFDS has no data set {name!r}: {hint}") from error
    except Exception as error:  # a malformed name, a damaged file, unexpected features
        reason, *_ = str(error).splitlines() or [""]
        raise InputError(
            f"TFDS cannot open data set {name!r} in data_dir={str(data_dir or '')!r}"
            f" ({type(error).__name__}: {reason}); a folder of images has the name 'folder'"
        ) from error
    finally:
        connector.cls_from_name = find_class
