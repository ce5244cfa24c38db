import pytest
import tensorflow_datasets as tfds

from structinit_jax.data.datasets import CATALOG, open_dataset
from structinit_jax.errors import InputError


def test_a_function_that_returns_no_data_set_is_named():
    with pytest.raises(InputError, match=r"data set 'builtins:str' returned str"):
        open_dataset("builtins:str")


def test_catalog_agrees_with_the_stock_builders(tmp_path):
    def features(name):
        return tfds.builder(name, data_dir=tmp_path).info.features

    for name, info in CATALOG.items():
        if name == "digits":  # which TFDS does not have
            continue
        found = features(name)
        assert found["image"].shape[-1] == info.channels, name
        assert found["label"].num_classes == info.num_classes, name
    # A model trained on the first is evaluated on the others.
    for name in ("imagenet_v2", "imagenet_sketch"):
        assert features(name)["label"].names == features("imagenet2012")["label"].names
