"""Data sets by name, and the test sets of ImageNet, whose rules are compared with NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow_datasets as tfds
from flax import nnx
from scipy.special import log_softmax, logsumexp
from tfds_sets import LABEL, write_set

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

NUM = 256
# As many classes as ImageNet-A has, spread over the thousand.
CLASSES = np.arange(200) * 5 + 2
LOGITS = np.random.default_rng(0).normal(size=(NUM, 1000)).astype(np.float32)


def numbers_and_labels(test_set):
    """Which image each example is, and its label."""
    examples = test_set.source.read(range(len(test_set.source)))
    return [(int(image.decode()[0, 0, 0]), label) for image, label in examples]


def test_sets_of_all_or_some_classes_choose_among_these(tmp_path):
    rows = [{"label": 4}, {"label": 7}]
    write_set("imagenet_sketch", "1.0.0", "test", rows, tmp_path, label=LABEL)
    test_set = open_test_set("imagenet_sketch", tmp_path)
    assert (test_set.classes, test_set.answers) == (None, None)
    assert sorted(numbers_and_labels(test_set)) == [(0, 4), (1, 7)]
    rows = [{"label": label} for label in CLASSES.tolist()]
    write_set("imagenet_a", "0.1.0", "test", rows, tmp_path, label=LABEL)
    test_set = open_test_set("imagenet_a", tmp_path)
    np.testing.assert_array_equal(test_set.classes, CLASSES)
    assert test_set.answers is None


def test_real_has_all_labels_and_leaves_out_images_without(tmp_path):
    rows = [{"original_label": 0, "real_label": labels} for labels in ([3], [], [4, 7], [9])]
    features = {"original_label": LABEL, "real_label": tfds.features.Sequence(LABEL)}
    write_set("imagenet2012_real", "1.0.0", "validation", rows, tmp_path, **features)
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
    """A model whose logits are those of `LOGITS` for the gray level of the image."""

    def __init__(self):
        self.logits = nnx.Param(jnp.asarray(LOGITS))

    def __call__(self, images, **options):
        return self.logits[...][jnp.round(images[:, 0, 0, 0]).astype(jnp.int32)], {}


@pytest.mark.parametrize("rule", ["all", "some", "answers"])
def test_rules_agree_with_numpy(rule, library_promotion):
    rng, best = np.random.default_rng(1), LOGITS.argmax(axis=1)
    labels = np.where(rng.random(NUM) < 0.5, best, (best + 1) % 1000)
    log_p, classes, answers = log_softmax(LOGITS, axis=1), None, None
    if rule == "some":
        classes, best = CLASSES, CLASSES[LOGITS[:, CLASSES].argmax(axis=1)]
        labels = np.where(rng.random(NUM) < 0.5, best, rng.choice(CLASSES, NUM))
        log_p = LOGITS - logsumexp(LOGITS[:, CLASSES], axis=1, keepdims=True)
    right = [{label} for label in labels.tolist()]
    if rule == "answers":
        others = np.where(rng.random(NUM) < 0.5, (best + 7) % 1000, -1)
        answers = np.stack([labels, others], axis=1).astype(np.int32)
        right = [{*row} - {-1} for row in answers.tolist()]
        labels = np.arange(NUM)
    graphdef, *state = split_model(Table())
    mesh = make_mesh(devices=jax.devices()[:1])
    step = jax.jit(make_eval_step(graphdef, mesh, (0.0,), (1 / 255,), classes, answers))
    images = np.arange(NUM, dtype=np.uint8)[:, None, None, None]
    batch = {"image": images, "label": labels.astype(np.int32), "mask": np.ones(NUM, np.float32)}
    sums = jax.tree.map(float, step(*state, batch))
    assert sums["count"] == NUM
    assert sums["correct"] == sum(b in row for b, row in zip(best, right, strict=True))
    loss = -sum(logsumexp(log_p[i, sorted(row)]) for i, row in enumerate(right))
    assert sums["loss"] == pytest.approx(loss, rel=1e-5)
