import tensorflow_datasets as tfds

from structinit_jax.data.datasets import CATALOG


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
