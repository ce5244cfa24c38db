"""Finds and opens TFDS data sets without TensorFlow; prepares digits and fashion_mnist.

Training reads prepared sets only. These two are prepared on first use; for others see
`structinit_jax.prepare`.
"""

import contextlib
import functools
import gzip
import hashlib
import io
import urllib.request
from pathlib import Path

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image
from tensorflow_datasets.image_classification import mnist

from structinit_jax.data.source import Dataset, DatasetInfo, Folder
from structinit_jax.errors import InputError, suggest

tfds.disable_progress_bar()

# Data sets whose label is not called "label".
LABEL_KEYS = {"imagenet2012_real": "original_label"}
# Original files of fashion_mnist (with the suffix .gz) -> SHA-256 of the decompressed content. The
# compressed files differ between sources.
CHECKSUMS = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
MANUAL_DOWNLOAD = (
    f"Put the four files {', '.join(f'{name}.gz' for name in CHECKSUMS)} into a folder and pass"
    " --config.data.manual_dir=DIR. On Debian and Ubuntu `apt-get install dataset-fashion-mnist`"
    " installs them in /usr/share/datasets/fashion-mnist."
)


# Unregistered, so that `tfds.builder("fashion_mnist")` stays the stock builder. Both read and write
# the same folder.
with tfds.core.registered.skip_registration():

    class Digits(tfds.core.GeneratorBasedBuilder):
        """The 1,797 8x8 gray images that come with scikit-learn.

        They are the test part of "Optical Recognition of Handwritten Digits" (UCI,
        https://doi.org/10.24432/C50P49). The gray levels 0, ..., 16 are scaled to 0, ..., 255 and
        rounded. Every fifth image (index % 5 == 4) is in `test` (359), the others are in `train`
        (1,438). The same writers appear in both.
        """

        name = "digits"
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = {
                "image": tfds.features.Image(shape=(8, 8, 1)),
                "label": tfds.features.ClassLabel(num_classes=10),
            }
            return tfds.core.DatasetInfo(
                builder=self,
                description=type(self).__doc__,
                features=tfds.features.FeaturesDict(features),
            )

        def _split_generators(self, dl_manager):
            is_test = np.arange(1797) % 5 == 4
            parts = {"train": ~is_test, "test": is_test}
            return {split: self._generate_examples(part) for split, part in parts.items()}

        def _generate_examples(self, chosen):
            from sklearn.datasets import load_digits

            digits = load_digits()
            pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)
            for index in np.flatnonzero(chosen).tolist():
                image = Image.fromarray(pixels[index])
                yield index, {"image": image, "label": int(digits.target[index])}

    class FashionMNIST(mnist.FashionMNIST):
        """The stock builder, prepared without TensorFlow.

        Attributes:
          manual_dir: Folder with the four original files; None downloads them.
        """

        name = "fashion_mnist"
        manual_dir = None

        def _split_generators(self, dl_manager):
            folder = self.manual_dir and f"{Path(self.manual_dir).absolute().as_uri()}/"
            urls = {f"{folder or self.URL}{name}.gz": sha for name, sha in CHECKSUMS.items()}
            arrays = [_read_idx(url, sha256) for url, sha256 in urls.items()]
            return {
                "train": self._generate_examples(*arrays[:2]),
                "test": self._generate_examples(*arrays[2:]),
            }

        def _generate_examples(self, images, labels):
            for index, (image, label) in enumerate(zip(images, labels.tolist(), strict=True)):
                yield index, {"image": Image.fromarray(image), "label": label}


OWN_BUILDERS = {"digits": Digits, "fashion_mnist": FashionMNIST}


def open_tfds(name: str, data_dir: Folder, manual_dir: Folder) -> Dataset:
    """Opens a TFDS data set; for arguments and errors see `datasets.open_dataset`."""
    builder = find_builder(name, data_dir)
    path = builder.data_path
    if name in OWN_BUILDERS and not path.exists():
        _prepare_own(builder, manual_dir)
    if not path.exists():
        raise InputError(
            f"config.data.name={name!r} is not prepared: looked in {path}. Pass"
            f" --config.data.data_dir=DIR, the folder that holds {name}/, or download it with\n"
            f"  python -m structinit_jax.prepare --name={name} --data_dir={builder.data_dir_root}"
        )
    builder = tfds.builder_from_directory(path)  # knows formats that were added later
    if tfds.core.FileFormat.ARRAY_RECORD not in builder.info.available_file_formats():
        raise InputError(
            f"config.data.name={name!r} is not prepared as array_record. Convert it, once, where"
            " TensorFlow is installed (pip install '.[prepare]'):\n"
            f"  tfds convert_format --dataset_version_dir={path} --out_file_format=array_record"
        )
    features = builder.info.features
    label_key = LABEL_KEYS.get(builder.name, "label")
    image, label = (dict(features).get(key) for key in ("image", label_key))
    kinds = (tfds.features.Image, tfds.features.ClassLabel)
    if not all(map(isinstance, (image, label), kinds)):
        raise InputError(
            f"config.data.name={name!r} has the features {sorted(features)}, expected an 'image'"
            " and a class 'label'. Choose a data set for image classification."
        )
    sizes = {split: info.num_examples for split, info in builder.info.splits.items()}
    # Images are not decoded by TFDS, which cannot read CMYK.
    decoders = {
        key: tfds.decode.SkipDecoding()
        for key, feature in features.items()
        if isinstance(feature, tfds.features.Image)
    }
    shape = (*image.shape[:2], 1 if image.shape[2] == 1 else 3)
    info = DatasetInfo(label.num_classes, shape, sizes)
    open_split = functools.partial(builder.as_data_source, decoders=decoders)
    return Dataset(name, info, label.names, open_split, label_key)


def find_builder(name: str, data_dir: Folder) -> tfds.core.DatasetBuilder:
    """Finds the TFDS builder of a data set, prepared or not.

    Raises:
      InputError: TFDS has no such data set, or its builder needs a missing package.
    """
    try:
        if name in OWN_BUILDERS:
            return OWN_BUILDERS[name](data_dir=data_dir)
        return tfds.builder(name, data_dir=data_dir)
    except tfds.core.DatasetNotFoundError as error:
        stock = tfds.list_builders(with_community_datasets=False)
        hint = suggest(name.lower(), ["folder", *OWN_BUILDERS, *stock])
        raise InputError(f"config.data.name={name!r}: TFDS has no such data set: {hint}") from error
    except Exception as error:  # a malformed name or variant, a damaged file, a missing package
        raise InputError(
            f"config.data.name={name!r}: TFDS cannot open it in config.data.data_dir="
            f"{str(data_dir or '')!r}: {type(error).__name__}: {error}"
        ) from error


def _prepare_own(builder, manual_dir):
    """Prepares digits or fashion_mnist; TFDS renames the folder into place when it is complete."""
    print(f"Preparing {builder.name} in {builder.data_path} (once).", flush=True)
    builder.manual_dir = manual_dir
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            builder.download_and_prepare(file_format="array_record")
    except OSError as error:
        # Another process may have prepared the same set in the meantime.
        if not builder.data_path.exists():
            raise InputError(
                f"config.data.data_dir={str(builder.data_dir_root)!r}: cannot prepare"
                f" {builder.name}: {error}. Pass a writable folder with space left."
            ) from error


def _read_idx(url, sha256):
    """Reads the idx format: two zeros, type 8 (uint8), rank, big-endian sizes, values.

    Not by TFDS's download manager, which would retry for minutes without a network.
    """
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            content = gzip.decompress(response.read())
    except OSError as error:  # of the network, the file system or gzip
        raise InputError(f"fashion_mnist: {url}: {error}. {MANUAL_DOWNLOAD}") from error
    if hashlib.sha256(content).hexdigest() != sha256:
        raise InputError(f"fashion_mnist: {url} is not the original file. {MANUAL_DOWNLOAD}")
    rank = content[3]
    shape = np.frombuffer(content, ">i4", count=rank, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * rank).reshape(shape)
