"""Opening TFDS data sets for random access, without TensorFlow."""

import contextlib
import dataclasses
import difflib
import io
import os
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image

from structinit_jax.data.catalog import CATALOG, DatasetFacts, parse_split
from structinit_jax.errors import InputError

tfds.disable_progress_bar()

PIL_MODES = {1: "L", 3: "RGB"}


class ImageSource:
    """Random access to the decoded examples of a split.

    Args:
      records: TFDS data source that yields encoded images.
      channels: 1 or 3; images stored otherwise (grey, CMYK, palette) are converted.
    """

    def __init__(self, records: Any, channels: int):
        self._records = records
        self._mode = PIL_MODES[channels]

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns `{"image": uint8 [H, W, C], "label": int}`; safe to call from many threads."""
        return self._decode(self._records[index])

    def read(self, indices: list[int]) -> list[dict[str, Any]]:
        """Returns several examples; one read of many records is far faster than many reads."""
        return [self._decode(record) for record in self._records.__getitems__(indices)]

    def _decode(self, record: dict[str, Any]) -> dict[str, Any]:
        with Image.open(io.BytesIO(record["image"])) as encoded:
            right = encoded if encoded.mode == self._mode else encoded.convert(self._mode)
            image = np.asarray(right)
        if image.ndim == 2:
            image = image[..., None]
        return {"image": image, "label": int(record["label"])}


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A prepared data set.

    Attributes:
      name: TFDS name.
      facts: Classes, image shape and split sizes as prepared.
      builder: The TFDS builder.
    """

    name: str
    facts: DatasetFacts
    builder: tfds.core.DatasetBuilder

    def split(self, spec: str, field: str = "data.train_split") -> ImageSource:
        """Opens a split in TFDS syntax, such as `train[:2000]`.

        Args:
          spec: The split.
          field: The config field that `spec` comes from, for messages.

        Returns:
          A sequence of `{"image": uint8 [H, W, C], "label": int}`.

        Raises:
          InputError: There is no such split, or it is empty.
        """
        parse_split(self.name, spec, self.facts, field)
        # The images are decoded here rather than by TFDS, which knows no CMYK and picks its
        # decoder by what is installed. Other images of an example are never needed.
        decoders = {
            key: tfds.decode.SkipDecoding()
            for key, feature in self.builder.info.features.items()
            if isinstance(feature, tfds.features.Image)
        }
        records = self.builder.as_data_source(spec, decoders=decoders)
        return ImageSource(records, self.facts.image_shape[-1])


def open_dataset(
    name: str,
    data_dir: str | os.PathLike | None = None,
    manual_dir: str | os.PathLike | None = None,
) -> Dataset:
    """Opens a data set; digits and fashion_mnist are prepared on first use.

    Args:
      name: TFDS name, such as `cifar10`.
      data_dir: Where TFDS data sets lie; None is TFDS's default (`$TFDS_DATA_DIR`, or
        `~/tensorflow_datasets`).
      manual_dir: Folder with the original files of fashion_mnist; None downloads them.

    Returns:
      The data set, ready to read.

    Raises:
      InputError: The name is unknown, the set is not prepared or not readable without
        TensorFlow, or it cannot be prepared.
    """
    if name == "digits":
        from structinit_jax.data.digits import Digits

        builder = _prepared(lambda: Digits(data_dir=data_dir))
    elif name == "fashion_mnist":
        from structinit_jax.data.fashion_mnist import FashionMNIST

        builder = _prepared(lambda: FashionMNIST(data_dir=data_dir, manual_dir=manual_dir))
    else:
        builder = _stock_builder(name, data_dir)
    if tfds.core.FileFormat.ARRAY_RECORD not in builder.info.available_file_formats():
        raise InputError(
            f"data.name={name!r}: {builder.data_path} is prepared as"
            f" {builder.info.file_format.value}, which only TensorFlow can read; array_record is"
            f" needed. Pass another --config.data.data_dir=DIR, or move that folder away."
            f" {_how_to_prepare(name, str(builder.data_dir_root))}"
        )
    return Dataset(name, _facts(name, builder), builder)


def _prepared(make_builder: Any) -> tfds.core.DatasetBuilder:
    """Prepares one of this package's own builders unless that is done already.

    TFDS writes into a folder `incomplete.*` and renames it at the end, so a folder under the final
    name is always whole.
    """
    builder = make_builder()
    if builder.data_path.exists():
        return builder
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
    return make_builder()


def _stock_builder(name: str, data_dir: str | os.PathLike | None) -> tfds.core.DatasetBuilder:
    """Returns the builder of a set that somebody prepared before."""
    try:
        builder = tfds.builder(name, data_dir=data_dir)
    except tfds.core.DatasetNotFoundError as error:
        known = sorted({*CATALOG, *tfds.list_builders(with_community_datasets=False)})
        near = difflib.get_close_matches(name, known, n=3)
        hint = f"Did you mean {' or '.join(map(repr, near))}? " if near else ""
        raise InputError(
            f"data.name={name!r}: TFDS knows no such data set. {hint}The configs use"
            f" {', '.join(CATALOG)}; every other name of"
            " https://www.tensorflow.org/datasets/catalog with an image and a label works too."
        ) from error
    except ImportError as error:
        raise InputError(
            f"data.name={name!r}: TFDS needs a package that is not installed to describe this data"
            f" set: {error}. Install it, or choose one of {', '.join(CATALOG)}."
        ) from error
    if not builder.data_path.exists():
        raise InputError(
            f"data.name={name!r} is not prepared: there is no {builder.data_path}. If you have it"
            f" elsewhere, pass --config.data.data_dir=DIR (the folder that holds {name}/)."
            f" {_how_to_prepare(name, str(builder.data_dir_root))}"
        )
    return builder


def _how_to_prepare(name: str, data_dir: str) -> str:
    """The instructions for making an array_record set, as one or more sentences."""
    if name in ("digits", "fashion_mnist"):
        return "It is then prepared anew, which needs no TensorFlow."
    archives = (
        "\n  Put ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar (by hand, from"
        f" https://image-net.org) into {data_dir}/downloads/manual"
        if name == "imagenet2012"
        else ""
    )
    return (
        f"Preparing it needs TensorFlow once (training does not):{archives}"
        "\n  pip install tensorflow-cpu"
        '\n  python -c "import tensorflow_datasets as tfds;'
        f" tfds.builder('{name}', data_dir='{data_dir}', file_format='array_record')"
        '.download_and_prepare()"'
    )


def _facts(name: str, builder: tfds.core.DatasetBuilder) -> DatasetFacts:
    """Reads the facts from the prepared set."""
    features = dict(builder.info.features)
    image, label = features.get("image"), features.get("label")
    is_classification = isinstance(image, tfds.features.Image) and isinstance(
        label, tfds.features.ClassLabel
    )
    if not is_classification or image.shape[-1] not in PIL_MODES:
        raise InputError(
            f"data.name={name!r}: needs a feature 'image' with 1 or 3 channels and a class 'label',"
            f" got {sorted(features)}. Choose a data set for image classification."
        )
    sizes = {split: info.num_examples for split, info in builder.info.splits.items()}
    return DatasetFacts(label.num_classes, image.shape, sizes)
