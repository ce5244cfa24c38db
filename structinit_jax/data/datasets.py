"""Opening data sets for random access: TFDS ones without TensorFlow, and image folders."""

import contextlib
import dataclasses
import difflib
import functools
import io
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow_datasets as tfds

from structinit_jax.data.decode import PIL_MODES
from structinit_jax.data.folder import ImageFolder
from structinit_jax.data.info import CATALOG, DatasetInfo, parse_split
from structinit_jax.data.source import ImageSource, Records, leave_out_bad_images
from structinit_jax.data.tiny_imagenet import TinyImageNet
from structinit_jax.errors import InputError

tfds.disable_progress_bar()

# As TFDS writes them: 'cifar10', 'imagenet_v2/topimages', 'mnist:3.0.1', 'huggingface:mnist'.
NAME = re.compile(r"(?:\w+:)?[A-Za-z]\w*(?:/\w[\w.+-]*)*(?::[\d.*]+)?")
ON_BAD_IMAGE = ("stop", "skip")
# Prepared by builders of this package, on first use.
OWN_SETS = ("digits", "fashion_mnist")
# Read from their image files, without preparation.
FILE_SETS = {"folder": ImageFolder, "tiny_imagenet": TinyImageNet}
# Data sets whose label is not called "label".
LABEL_KEYS = {"imagenet2012_real": "original_label"}


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A prepared data set.

    Attributes:
      name: TFDS name, 'folder' or 'tiny_imagenet'.
      info: Classes, image shape and split sizes as prepared.
      open_records: From what `parse_split` returns to the encoded examples.
      class_names: The name of each label.
    """

    name: str
    info: DatasetInfo
    open_records: Callable[[list[tuple[str, int, int]]], Records]
    class_names: list[str]

    def split(
        self, spec: str, field: str = "data.train_split", on_bad_image: str = "stop"
    ) -> ImageSource:
        """Opens a split in TFDS syntax, such as `train[:2000]`.

        Args:
          spec: The split.
          field: The config field that `spec` comes from, for messages.
          on_bad_image: 'stop' raises `BadImageError`, by name, when an image that cannot be decoded
            is read; 'skip' looks for such images now and leaves them out (`leave_out_bad_images`).

        Returns:
          A sequence of `{"image": uint8 [H, W, C], "label": int}`.

        Raises:
          InputError: There is no such split or policy, or the split is empty.
        """
        if on_bad_image not in ON_BAD_IMAGE:
            raise InputError(f"data.on_bad_image={on_bad_image!r}: must be 'stop' or 'skip'.")
        parts = parse_split(self.name, spec, self.info, field)
        records = self.open_records(parts)
        source = ImageSource(records, self.info.image_shape[-1], f"{self.name} {spec!r}")
        return leave_out_bad_images(source, field, spec) if on_bad_image == "skip" else source


def open_dataset(
    name: str,
    data_dir: str | os.PathLike | None = None,
    manual_dir: str | os.PathLike | None = None,
) -> Dataset:
    """Opens a data set; digits and fashion_mnist are prepared on first use.

    Args:
      name: TFDS name, such as `cifar10`; 'folder' for an image folder, or 'tiny_imagenet'.
      data_dir: Where TFDS data sets lie; None is TFDS's default (`$TFDS_DATA_DIR`, or
        `~/tensorflow_datasets`). For 'folder' and 'tiny_imagenet', the folder with the images.
      manual_dir: Folder with the original files of fashion_mnist; None downloads them.

    Returns:
      The data set, ready to read.

    Raises:
      InputError: The name is unknown, the set is not prepared or not readable without
        TensorFlow, or it cannot be prepared.
    """
    if name in FILE_SETS:
        files = FILE_SETS[name](data_dir)
        return Dataset(name, files.info, files.open_records, files.classes)
    builder = find_builder(name, data_dir, manual_dir)
    if name in OWN_SETS and not builder.data_path.exists():
        _prepare_own(builder)
        builder = find_builder(name, data_dir, manual_dir)
    if not builder.data_path.exists():
        raise InputError(
            f"data.name={name!r} is not prepared: there is no {builder.data_path}. If you have it"
            f" elsewhere, pass --config.data.data_dir=DIR (the folder that holds {name}/)."
            f" {_how_to_prepare(name, str(builder.data_dir_root))}"
        )
    array_record = tfds.core.FileFormat.ARRAY_RECORD
    if array_record not in builder.info.available_file_formats():
        # Formats that were added later are known to the builder made from the folder alone.
        builder = tfds.builder_from_directory(builder.data_path)
    if array_record not in builder.info.available_file_formats():
        raise InputError(
            f"data.name={name!r}: {builder.data_path} is prepared as"
            f" {builder.info.file_format.value}; array_record is needed. Convert it, which needs no"
            f" TensorFlow, with\n  {_prepare_command(name, str(builder.data_dir_root))}"
        )
    info = _info(name, builder)
    label = builder.info.features[LABEL_KEYS.get(builder.name, "label")]
    return Dataset(name, info, functools.partial(_open_records, builder), label.names)


def find_info(name: str, data_dir: str | os.PathLike | None = None) -> DatasetInfo:
    """Facts of a set that need not be there, if the package knows it; arguments as above."""
    return CATALOG[name] if name in CATALOG else open_dataset(name, data_dir).info


def _open_records(builder: tfds.core.DatasetBuilder, parts: list[tuple[str, int, int]]) -> Records:
    """Returns a TFDS data source of encoded images.

    They are decoded here rather than by TFDS, which knows no CMYK and picks its decoder by what is
    installed. Other images of an example are never needed.
    """
    decoders = {
        key: tfds.decode.SkipDecoding()
        for key, feature in builder.info.features.items()
        if isinstance(feature, tfds.features.Image)
    }
    spec = "+".join(f"{split}[{start}:{stop}]" for split, start, stop in parts if start < stop)
    records = builder.as_data_source(spec, decoders=decoders)
    key = LABEL_KEYS.get(builder.name, "label")
    return records if key == "label" else _Relabelled(records, key)


class _Relabelled:
    """Records with another of their entries as the label."""

    def __init__(self, records: Records, key: str):
        self._records, self._key = records, key

    def __len__(self) -> int:
        return len(self._records)

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        records = self._records.__getitems__(indices)
        return [{**record, "label": record[self._key]} for record in records]


def find_builder(
    name: str, data_dir: str | os.PathLike | None, manual_dir: str | os.PathLike | None = None
) -> tfds.core.DatasetBuilder:
    """Finds the TFDS builder of a set, prepared or not; arguments as in `open_dataset`.

    Raises:
      InputError: The name is none or unknown, or its builder needs a package that is not installed.
    """
    if not NAME.fullmatch(name):
        raise InputError(
            f"data.name={name!r} is no name of a data set: write it as TFDS does, such as 'cifar10'"
            " or 'imagenet_v2/topimages'. For a folder of images pass --config.data.name=folder"
            " --config.data.data_dir=DIR."
        )
    if name == "digits":
        from structinit_jax.data.digits import Digits

        return Digits(data_dir=data_dir)
    if name == "fashion_mnist":
        from structinit_jax.data.fashion_mnist import FashionMNIST

        return FashionMNIST(data_dir=data_dir, manual_dir=manual_dir)
    try:
        return tfds.builder(name, data_dir=data_dir)
    except tfds.core.DatasetNotFoundError as error:
        known = sorted({*CATALOG, *tfds.list_builders(with_community_datasets=False)})
        near = difflib.get_close_matches(name, known, n=3)
        hint = f"Did you mean {' or '.join(map(repr, near))}? " if near else ""
        raise InputError(
            f"data.name={name!r}: TFDS knows no such data set. {hint}The configs use"
            f" {', '.join(CATALOG)}; every other name of"
            " https://www.tensorflow.org/datasets/catalog with an image and a label works too, and"
            " 'folder' reads an image folder."
        ) from error
    except ImportError as error:
        raise InputError(
            f"data.name={name!r}: TFDS needs a package that is not installed to describe this data"
            f" set: {error}. Install it, or choose one of {', '.join(CATALOG)}."
        ) from error


def _prepare_own(builder: tfds.core.DatasetBuilder) -> None:
    """Runs one of this package's own builders.

    TFDS writes into a folder `incomplete.*` and renames it at the end, so a folder under the final
    name is always whole.
    """
    print(f"Preparing {builder.name} in {builder.data_path} (once).", flush=True)
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # the line above says it shorter
            builder.download_and_prepare(file_format="array_record")
    except OSError as error:
        # Another process may have prepared the same set in the meantime; its folder is as good.
        if not builder.data_path.exists():
            raise InputError(
                f"data.data_dir={str(builder.data_dir_root)!r}: cannot prepare {builder.name}"
                f" there: {error}. Pass --config.data.data_dir=DIR with a folder that you can"
                " write to and that has space left."
            ) from error


def _how_to_prepare(name: str, data_dir: str) -> str:
    """The instructions for making an array_record set, as one or more sentences."""
    archives = (
        "\n  Put ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar (by hand, from"
        f" https://image-net.org) into {data_dir}/downloads/manual"
        if name == "imagenet2012"
        else ""
    )
    return (
        f"Preparing it needs TensorFlow once (training does not):{archives}"
        f"\n  pip install '.[prepare]'\n  {_prepare_command(name, data_dir)}"
    )


def _prepare_command(name: str, data_dir: str) -> str:
    return f"python -m structinit_jax.data.prepare --name={name} --data_dir={data_dir}"


def _info(name: str, builder: tfds.core.DatasetBuilder) -> DatasetInfo:
    """Reads the info from the prepared set."""
    features = dict(builder.info.features)
    image, label = features.get("image"), features.get(LABEL_KEYS.get(builder.name, "label"))
    is_classification = isinstance(image, tfds.features.Image) and isinstance(
        label, tfds.features.ClassLabel
    )
    if not is_classification or image.shape[-1] not in PIL_MODES:
        raise InputError(
            f"data.name={name!r}: needs a feature 'image' with 1 or 3 channels and a class 'label',"
            f" got {sorted(features)}. Choose a data set for image classification."
        )
    sizes = {split: info.num_examples for split, info in builder.info.splits.items()}
    return DatasetInfo(label.num_classes, image.shape, sizes)
