"""Finds and opens TFDS data sets without TensorFlow.

Training reads prepared sets only; for their preparation see `structinit_jax.prepare`.
"""

import contextlib
import functools
import resource

import tensorflow_datasets as tfds

from structinit_jax.data.source import Dataset, DatasetInfo, Folder
from structinit_jax.errors import InputError, suggest


def open_tfds(name: str, data_dir: Folder) -> Dataset:
    """Opens a TFDS data set; for arguments and errors see `datasets.open_dataset`."""
    builder = find_builder(name, data_dir)
    path = builder.data_path
    if not path.exists():
        folder, _, _ = name.partition(":")
        raise InputError(
            f"data set {name!r} is not prepared: looked in {path}. Pass data_dir=DIR, the folder"
            f" that holds {folder}/, or download it with\n"
            f"  python -m structinit_jax.prepare --name={name} --data_dir={builder.data_dir_root}"
        )
    with _reading(name, data_dir):
        builder = tfds.builder_from_directory(path)  # knows formats that were added later
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
    # Images are not decoded by TFDS, which cannot read CMYK.
    decoders = {
        key: tfds.decode.SkipDecoding()
        for key, feature in features.items()
        if isinstance(feature, tfds.features.Image)
    }
    channels = 1 if image.shape[2] == 1 else 3
    info = DatasetInfo(len(class_names), channels, sizes)
    # array_record keeps a file open for each shard, of which ImageNet has 1,088.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 10_000)), hard))
    open_split = functools.partial(builder.as_data_source, decoders=decoders)
    return Dataset(name, info, class_names, open_split)


def find_builder(name: str, data_dir: Folder) -> tfds.core.DatasetBuilder:
    """Finds the TFDS builder of a data set, prepared or not, or raises `InputError`."""
    with _reading(name, data_dir):
        return tfds.builder(name, data_dir=data_dir)


@contextlib.contextmanager
def _reading(name, data_dir):
    """Raises `InputError` for errors of TFDS, which reads the files of a data set in the context.

    The files may come from somebody else. TFDS imports the modules of the classes that their
    `features.json` names; in the context it takes only its own, and those that are imported.
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
        hint = suggest(name.lower(), {"folder", "digits", *stock})
        raise InputError(f"TFDS has no data set {name!r}: {hint}") from error
    except Exception as error:  # a malformed name or variant, a damaged file, a missing package
        raise InputError(
            f"TFDS cannot open data set {name!r} in data_dir={str(data_dir or '')!r}:"
            f" {type(error).__name__}: {error}"
        ) from error
    finally:
        connector.cls_from_name = find_class
