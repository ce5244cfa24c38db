import subprocess
import sys

import pytest

from structinit_jax.data.info import (
    CATALOG,
    EVALUATION_SETS,
    DatasetInfo,
    check_examples,
    parse_split,
    split_size,
)
from structinit_jax.errors import InputError

INFO = DatasetInfo(10, (8, 8, 1), {"train": 50, "test": 9})


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("train", [("train", 0, 50)]),
        ("train[:20]", [("train", 0, 20)]),
        ("train[10%:]", [("train", 5, 50)]),
        ("train[-3:]", [("train", 47, 50)]),
        ("train[:10]+test", [("train", 0, 10), ("test", 0, 9)]),
        ("all", [("train", 0, 50), ("test", 0, 9)]),
    ],
)
def test_split_syntax(spec, parts):
    assert parse_split("toy", spec, INFO, "data.train_split") == parts
    size = sum(stop - start for _, start, stop in parts)
    assert split_size("toy", spec, INFO, "data.train_split") == size


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("trian", "Unknown split 'trian'"),
        ("train[:51]", "incompatible with 50 examples"),
        ("train[", "Unrecognized split format"),
        ("", "Unrecognized split format"),
        ("train[5:5]", "no example"),
        ("train[90%:10%]", "no example"),
        ("train[:1shard]", "shards are not supported"),
    ],
)
def test_bad_split_names_field_and_splits(spec, reason):
    with pytest.raises(InputError) as caught:
        parse_split("toy", spec, INFO, "data.eval_split")
    message = str(caught.value)
    assert message.startswith(f"config.data.eval_split={spec!r}: ")
    assert reason in message
    assert "splits of toy are 'train' (50), 'test' (9)" in message
    assert message.endswith("'train', 'train[:100]', 'train[:90%]', 'train[90%:]', 'train+test'.")


def test_examples_of_splits_exist():
    info = DatasetInfo(2, (None, None, 3), {"val": 9})
    with pytest.raises(InputError, match=r"Examples: 'val', .*, 'val\[90%:\]'\.$"):
        parse_split("folder", "test", info, "data.eval_split")


def test_catalog_agrees_with_the_stock_builders(tmp_path):
    import tensorflow_datasets as tfds

    for name, info in CATALOG.items():
        if name not in ("digits", "tiny_imagenet"):  # which TFDS does not have
            features = tfds.builder(name, data_dir=tmp_path).info.features
            assert features["image"].shape == info.image_shape, name
            label = features["original_label" if name == "imagenet2012_real" else "label"]
            assert label.num_classes == info.num_classes, name


def test_imagenets_test_sets_have_its_classes_in_its_order(tmp_path):
    import tensorflow_datasets as tfds

    classes = tfds.builder("imagenet2012", data_dir=tmp_path).info.features["label"].names
    for name in EVALUATION_SETS:
        features = tfds.builder(name, data_dir=tmp_path).info.features
        for key in {"label", "original_label"} & set(features):
            assert features[key].names == classes
        if name == "imagenet2012_real":
            assert features["real_label"].feature.names == classes


def test_model_and_data_must_agree():
    info = DatasetInfo(10, (None, None, 3), {"train": 23})
    check_examples(info, num_classes=10, channels=3)
    with pytest.raises(InputError, match=r"config\.model\.num_classes=100: .* 10 classes"):
        check_examples(info, num_classes=100, channels=3)
    with pytest.raises(InputError, match=r"config\.data\.channels=1: "):
        check_examples(info, num_classes=10, channels=1)


def test_heavy_libraries_are_imported_only_where_they_are_used():
    code = (
        "import sys, structinit_jax.data.info;"
        "assert not {'jax', 'tensorflow_datasets'} & set(sys.modules);"
        "import structinit_jax.data.loader, structinit_jax.data.test_sets;"
        "sys.exit(bool({'tensorflow_datasets', 'grain', 'sklearn'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
