"""Data sets by name, and the test sets of ImageNet, whose rules are compared with NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow_datasets as tfds
from flax import nnx
from PIL import Image
from scipy.special import logsumexp

from structinit_jax.data.datasets import CATALOG, EVALUATION_SETS, open_dataset, open_test_set
from structinit_jax.errors import InputError
from structinit_jax.training.mesh import make_mesh
from structinit_jax.training.state import split_model
from structinit_jax.training.step import make_eval_step


def test_a_function_that_returns_no_data_set_is_named():
    with pytest.raises(InputError, match=r"config\.data\.name='builtins:str' returned str"):
        open_dataset("builtins:str")


def test_catalog_agrees_with_the_stock_builders(tmp_path):
    def features(name):
        return tfds.builder(name, data_dir=tmp_path).info.features

    classes = features("imagenet2012")["label"].names
    for name, info in CATALOG.items():
        if name == "digits":  # which TFDS does not have
            continue
        found = features(name)
        assert found["image"].shape == info.image_shape, name
        assert found["label"].num_classes == info.num_classes, name
        if name in EVALUATION_SETS:
            assert found["label"].names == classes


# -- test sets of ImageNet -------------------------------------------------------------------------

# As many classes as ImageNet-A has, spread over the thousand.
CLASSES = np.arange(200) * 5 + 2
LABEL = tfds.features.ClassLabel(num_classes=1000)
LOGITS = np.random.default_rng(0).normal(size=(250, 1000)).astype(np.float32)


@tfds.core.registered.skip_registration()
def prepare(name, version, labels, data_dir, variant=None):
    """Writes a small set in the place and with the features of the stock builder `name`.

    The red value of image i is i; TFDS stores it in an order of its own.
    """

    class SmallSet(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version(version)
        BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=variant)] if variant else []

        def _info(self):
            features = {"image": tfds.features.Image(), "label": LABEL}
            features["file_name"] = tfds.features.Text()
            features = tfds.features.FeaturesDict(features)
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, dl_manager):
            return {"test": self._generate_examples()}

        def _generate_examples(self):
            for number, label in enumerate(labels):
                image = Image.new("RGB", (2, 2), (number, 0, 0))
                yield number, {"image": image, "file_name": f"{number}.JPEG", "label": int(label)}

    SmallSet.name = name
    SmallSet(data_dir=data_dir).download_and_prepare(file_format="array_record")


def test_sets_of_all_or_some_classes_choose_among_these(tmp_path):
    prepare("imagenet_v2", "3.0.0", [4, 7], tmp_path, "matched-frequency")
    test_set = open_test_set("imagenet_v2", tmp_path)
    assert test_set.classes is None
    examples = test_set.source.read(range(2))
    assert sorted((image.decode()[0, 0, 0], label) for image, label in examples) == [(0, 4), (1, 7)]
    prepare("imagenet_a", "0.1.0", CLASSES, tmp_path)
    prepare("imagenet_r", "0.2.0", CLASSES[:150], tmp_path)
    np.testing.assert_array_equal(open_test_set("imagenet_a", tmp_path).classes, CLASSES)
    with pytest.raises(InputError, match=r"holds 150 classes, 200 are expected"):
        open_test_set("imagenet_r", tmp_path)


class Table(nnx.Module):
    """A model whose logits are those of `LOGITS` for the image's number."""

    def __init__(self):
        self.logits = nnx.Param(jnp.asarray(LOGITS))

    def __call__(self, images, **options):
        return self.logits[...][jnp.round(images[:, 0, 0, 0]).astype(jnp.int32)], {}


@pytest.mark.parametrize("classes", [None, CLASSES], ids=["all", "some"])
def test_rules_agree_with_numpy(classes, library_promotion):
    rng, chosen = np.random.default_rng(1), np.arange(1000) if classes is None else classes
    best = chosen[LOGITS[:, chosen].argmax(axis=1)]
    labels = np.where(rng.random(250) < 0.5, best, rng.choice(chosen, 250))
    mask = (np.arange(250) < 240).astype(np.float32)
    mesh = make_mesh(devices=jax.devices()[:1])
    graphdef, *state = split_model(Table())
    step = jax.jit(make_eval_step(graphdef, mesh, (0.0,) * 3, (1 / 255,) * 3, classes))
    images = np.zeros((250, 1, 1, 3), np.uint8)
    images[:, 0, 0, 0] = np.arange(250)
    batch = {"image": images, "label": labels.astype(np.int32), "mask": mask}
    sums = jax.tree.map(float, step(*state, batch))
    assert sums["count"] == 240
    assert sums["correct"] == np.sum((best == labels)[:240])
    log_p = LOGITS - logsumexp(LOGITS[:, chosen], axis=1, keepdims=True)
    loss = -log_p[np.arange(240), labels[:240]].sum()
    assert sums["loss"] == pytest.approx(loss, rel=1e-5)
