"""Data sets by name, and the test sets of ImageNet, whose rules are compared with NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow_datasets as tfds
from flax import nnx
from PIL import Image
from scipy.special import log_softmax, logsumexp

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
        label = found["original_label" if name == "imagenet2012_real" else "label"]
        assert found["image"].shape == info.image_shape, name
        assert label.num_classes == info.num_classes, name
        if name in EVALUATION_SETS:
            assert label.names == classes
    assert features("imagenet2012_real")["real_label"].feature.names == classes


# -- test sets of ImageNet -------------------------------------------------------------------------

# As many classes as ImageNet-A has, spread over the thousand.
CLASSES = np.arange(200) * 5 + 2
LABEL = tfds.features.ClassLabel(num_classes=1000)
LOGITS = np.random.default_rng(0).normal(size=(300, 1000)).astype(np.float32)


@tfds.core.registered.skip_registration()
def prepare(name, version, split, rows, data_dir, features=None):
    """Writes a small set in the place and with the features of the stock builder `name`.

    The pixels of image i are i // 256 and i % 256; TFDS stores it in an order of its own.
    """

    class SmallSet(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version(version)

        def _info(self):
            common = {"image": tfds.features.Image(), "file_name": tfds.features.Text()}
            return tfds.core.DatasetInfo(
                builder=self,
                features=tfds.features.FeaturesDict({**common, **(features or {"label": LABEL})}),
            )

        def _split_generators(self, dl_manager):
            return {split: self._generate_examples()}

        def _generate_examples(self):
            for number, row in enumerate(rows):
                image = Image.new("RGB", (2, 2), (number // 256, number % 256, 0))
                yield number, {"image": image, "file_name": f"{number}.JPEG", **row}

    SmallSet.name = name
    SmallSet(data_dir=data_dir).download_and_prepare(file_format="array_record")


def labelled(labels):
    return [{"label": int(label)} for label in labels]


def numbers_and_labels(test_set):
    """Which image each example is, and its label."""
    examples = test_set.source.read(range(len(test_set.source)))
    pixels = [(image.decode()[0, 0], label) for image, label in examples]
    return [(256 * int(high) + int(low), label) for (high, low, _), label in pixels]


def test_sets_of_all_or_some_classes_choose_among_these(tmp_path):
    prepare("imagenet_sketch", "1.0.0", "test", labelled([4, 7]), tmp_path)
    test_set = open_test_set("imagenet_sketch", tmp_path)
    assert (test_set.classes, test_set.answers) == (None, None)
    assert sorted(numbers_and_labels(test_set)) == [(0, 4), (1, 7)]
    prepare("imagenet_a", "0.1.0", "test", labelled(CLASSES), tmp_path)
    test_set = open_test_set("imagenet_a", tmp_path)
    np.testing.assert_array_equal(test_set.classes, CLASSES)
    assert test_set.answers is None


def test_real_has_all_labels_and_leaves_out_images_without(tmp_path):
    rows = [{"original_label": 0, "real_label": labels} for labels in ([3], [], [4, 7], [9])]
    features = {"original_label": LABEL, "real_label": tfds.features.Sequence(LABEL)}
    prepare("imagenet2012_real", "1.0.0", "validation", rows, tmp_path, features)
    test_set = open_test_set("imagenet2012_real", tmp_path)
    assert test_set.name.endswith("images without a label left out: 1")
    found = {
        number: {int(answer) for answer in test_set.answers[label]} - {-1}
        for number, label in numbers_and_labels(test_set)
    }
    assert found == {0: {3}, 2: {4, 7}, 3: {9}}
    chosen = test_set.source.select(np.array([False, True, True]))
    assert [label for _, label in chosen.read([0, 1])] == [1, 2]


class Table(nnx.Module):
    """A model whose logits are those of `LOGITS` for the image's number."""

    def __init__(self):
        self.logits = nnx.Param(jnp.asarray(LOGITS))

    def __call__(self, images, **options):
        number = jnp.round(256 * images[:, 0, 0, 0] + images[:, 0, 0, 1]).astype(jnp.int32)
        return self.logits[...][number], {}


def eval_sums(labels, classes, answers):
    """The sums of an evaluation step on 300 images."""
    mesh = make_mesh(devices=jax.devices()[:1])
    graphdef, *state = split_model(Table())
    step = jax.jit(make_eval_step(graphdef, mesh, (0.0,) * 3, (1 / 255,) * 3, classes, answers))
    numbers = np.arange(300)
    images = np.stack([numbers // 256, numbers % 256, 0 * numbers], axis=-1).astype(np.uint8)
    batch = {"image": images[:, None, None], "label": labels, "mask": np.ones(300, np.float32)}
    return jax.tree.map(float, step(*state, batch))


@pytest.mark.parametrize("rule", ["all", "some", "answers"])
def test_rules_agree_with_numpy(rule, library_promotion):
    rng, best = np.random.default_rng(1), LOGITS.argmax(axis=1)
    labels = np.where(rng.random(300) < 0.5, best, (best + 1) % 1000)
    log_p, classes, answers = log_softmax(LOGITS, axis=1), None, None
    right = [[label] for label in labels]
    if rule == "some":
        classes, best = CLASSES, CLASSES[LOGITS[:, CLASSES].argmax(axis=1)]
        labels = np.where(rng.random(300) < 0.5, best, rng.choice(CLASSES, 300))
        log_p = LOGITS - logsumexp(LOGITS[:, CLASSES], axis=1, keepdims=True)
        right = [[label] for label in labels]
    if rule == "answers":
        others = np.where(rng.random(300) < 0.5, (best + 7) % 1000, -1)
        answers = np.stack([labels, others], axis=1).astype(np.int32)
        right = [sorted({*row} - {-1}) for row in answers.tolist()]
        labels = np.arange(300)
    sums = eval_sums(labels.astype(np.int32), classes, answers)
    assert sums["count"] == 300
    assert sums["correct"] == sum(b in row for b, row in zip(best, right, strict=True))
    loss = -sum(logsumexp(log_p[i, row]) for i, row in enumerate(right))
    assert sums["loss"] == pytest.approx(loss, rel=1e-5)
