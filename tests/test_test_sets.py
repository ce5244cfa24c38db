"""The test sets of ImageNet and their rules, compared with NumPy."""

import jax
import numpy as np
import pytest
import tensorflow_datasets as tfds
from flax import nnx
from ml_collections import ConfigDict
from PIL import Image
from scipy.special import logsumexp

from structinit_jax import evaluate, train
from structinit_jax.config import base_config, validate
from structinit_jax.data.loader import make_loader
from structinit_jax.data.test_sets import open_test_set
from structinit_jax.errors import InputError
from structinit_jax.models import create_model
from structinit_jax.training import mesh as mesh_lib
from structinit_jax.training.state import split_model
from structinit_jax.training.step import make_eval_step

pytestmark = pytest.mark.usefixtures("library_promotion")
# As many classes as ImageNet-A has, spread over the thousand.
CLASSES = np.arange(200) * 5 + 2
LABEL = tfds.features.ClassLabel(num_classes=1000)
IMAGES = np.random.default_rng(0).integers(0, 256, (300, 1, 1, 3)) + np.zeros((1, 8, 8, 1))
IMAGES = (IMAGES + np.random.default_rng(1).integers(-60, 60, (300, 8, 8, 3))).clip(0, 255)
IMAGES = IMAGES.astype(np.uint8)


@tfds.core.registered.skip_registration()
def prepare(name, version, splits, data_dir, features=None, variant=None):
    """Writes a small set in the place and with the features of the stock builder `name`.

    `splits` has the rows of each split; image i is `IMAGES[i]`, stored in an order of TFDS's own.
    """

    class SmallSet(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version(version)
        BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=variant)] if variant else []

        def _info(self):
            common = {"image": tfds.features.Image(), "file_name": tfds.features.Text()}
            return tfds.core.DatasetInfo(
                builder=self,
                features=tfds.features.FeaturesDict({**common, **(features or {"label": LABEL})}),
            )

        def _split_generators(self, dl_manager):
            return {split: self._generate_examples(rows) for split, rows in splits.items()}

        def _generate_examples(self, rows):
            for number, row in enumerate(rows):
                image = Image.fromarray(IMAGES[number])
                yield number, {"image": image, "file_name": f"{number}.JPEG", **row}

    SmallSet.name = name
    SmallSet(data_dir=data_dir).download_and_prepare(file_format="array_record")


def prepare_real(answers, data_dir):
    rows = [{"original_label": 0, "real_label": labels} for labels in answers]
    features = {"original_label": LABEL, "real_label": tfds.features.Sequence(LABEL)}
    prepare("imagenet2012_real", "1.0.0", {"validation": rows}, data_dir, features)


def labelled(labels):
    return [{"label": int(label)} for label in labels]


def make_config(data_dir=""):
    config = base_config("vit")
    config.update(num_steps=1, batch_size=64)
    config.attention_init = ConfigDict(dict(name="default"))
    config.model.update(num_classes=1000, width=16, depth=1, num_heads=2, patch_size=2)
    config.data.update(name="imagenet2012", data_dir=str(data_dir), image_size=8)
    return config


@pytest.fixture(scope="module")
def model():
    """A small model whose predictions differ between images."""
    config = make_config()
    make = nnx.jit(
        lambda rng: create_model(
            config.model.to_dict(), image_size=8, channels=3, rngs=nnx.Rngs(params=rng)
        )
    )
    model = make(jax.random.key(0))
    for layer in (model.patch_embedding, model.head):
        layer.kernel[...] *= 20
    return model


@pytest.fixture(scope="module")
def logits(model):
    data = make_config().data
    images = (IMAGES / 255 - np.array(data.mean)) / np.array(data.std)
    graphdef, *state = split_model(model)
    forward = jax.jit(lambda state, images: nnx.merge(graphdef, *state)(images)[0])
    return np.asarray(forward(state, images.astype(np.float32)), np.float64)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("test_sets")


@pytest.fixture(scope="module")
def expected(data_dir, logits):
    """Sets whose labels are in part the model's predictions -> accuracy, loss and size."""
    log_p = logits - logsumexp(logits, axis=1, keepdims=True)
    best = logits.argmax(axis=1)
    assert len(set(best)) > 10
    expected = {}

    labels = np.where(np.arange(70) < 40, best[:70], (best[:70] + 1) % 1000)
    prepare("imagenet_v2", "3.0.0", {"test": labelled(labels)}, data_dir, None, "matched-frequency")
    expected["imagenet_v2"] = (40 / 70, -log_p[np.arange(70), labels].mean(), 70)

    among = logits[:, CLASSES]
    labels = CLASSES[np.concatenate([np.arange(200), among[200:260].argmax(axis=1)])]
    prepare("imagenet_a", "0.1.0", {"test": labelled(labels)}, data_dir)
    right = CLASSES[among[:260].argmax(axis=1)] == labels
    assert right.sum() >= 60 > np.sum(best[:260] == labels)
    loss = logsumexp(among[:260], axis=1) - logits[np.arange(260), labels]
    expected["imagenet_a"] = (right.mean(), loss.mean(), 260)

    others = (best + 1) % 1000
    answers = [
        [[], [best[i]], [others[i], best[i], (best[i] + 7) % 1000], [others[i]]][i % 4]
        for i in range(90)
    ]
    answers = [[int(label) for label in labels] for labels in answers]
    prepare_real(answers, data_dir)
    kept = [i for i in range(90) if answers[i]]
    loss = np.mean([-logsumexp(log_p[i, answers[i]]) for i in kept])
    correct = np.mean([best[i] in answers[i] for i in kept])
    assert len(kept) == 67
    expected["imagenet2012_real"] = (correct, loss, 67)
    return expected


@pytest.mark.parametrize("name", ["imagenet_v2", "imagenet_a", "imagenet2012_real"])
def test_rules_agree_with_numpy(model, data_dir, expected, name):
    config, mesh = make_config(), mesh_lib.make_mesh()
    test_set = open_test_set(name, data_dir)
    assert test_set.name.startswith(name)
    loader = make_loader(test_set.source, mesh, image_size=8)
    graphdef, *state = split_model(model)
    state = jax.device_put(state, mesh_lib.replicated(mesh))
    eval_step = jax.jit(make_eval_step(config, graphdef, mesh, test_set.classes, test_set.answers))
    sums = [eval_step(*state, batch) for batch in loader.eval_batches(batch_size=64)]
    totals = jax.tree.map(lambda *leaves: float(np.sum(leaves)), *jax.device_get(sums))
    accuracy, loss, count = expected[name]
    assert totals["count"] == count == len(test_set.source)
    assert totals["correct"] / count == pytest.approx(accuracy, abs=1e-6)
    assert totals["loss"] / count == pytest.approx(loss, abs=2e-4)


def test_real_has_all_labels_and_leaves_out_images_without(tmp_path):
    prepare_real([[3], [], [4, 7], [9]], tmp_path)
    test_set = open_test_set("imagenet2012_real", tmp_path)
    assert test_set.name.endswith("images without a label left out: 1")
    examples = test_set.source.read(range(3))
    all_images = [image.tobytes() for image in IMAGES]
    numbers = [all_images.index(image.decode().tobytes()) for image, _ in examples]
    assert sorted(numbers) == [0, 2, 3]
    answers = {
        number: {int(answer) for answer in test_set.answers[label]} - {-1}
        for number, (_, label) in zip(numbers, examples, strict=True)
    }
    assert answers == {0: {3}, 2: {4, 7}, 3: {9}}
    chosen = test_set.source.select(np.array([False, True, True]))
    assert [label for _, label in chosen.read([0, 1])] == [1, 2]


def test_sets_of_some_classes_choose_among_these(tmp_path):
    prepare("imagenet_a", "0.1.0", {"test": labelled(CLASSES)}, tmp_path)
    prepare("imagenet_r", "0.2.0", {"test": labelled(CLASSES[:150])}, tmp_path)
    test_set = open_test_set("imagenet_a", tmp_path)
    np.testing.assert_array_equal(test_set.classes, CLASSES)
    assert test_set.answers is None
    with pytest.raises(InputError, match=r"holds 150 classes, 200 are expected"):
        open_test_set("imagenet_r", tmp_path)


@pytest.mark.parametrize(
    ("name", "num_classes", "message"),
    [
        ("imagenet_c", 1000, r"config\.data\.eval_name='imagenet_c'"),
        ("imagenet_a", 10, r"config\.model\.num_classes=10 .*1000"),
    ],
)
def test_what_does_not_fit_is_refused_without_data(name, num_classes, message):
    config = make_config()
    config.data.eval_name = name
    config.model.num_classes = num_classes
    with pytest.raises(InputError, match=message):
        validate(config)


def test_a_run_is_tested_on_the_set_that_it_names(data_dir, expected, tmp_path, capsys):
    rows = labelled(range(64))
    prepare("imagenet2012", "5.1.0", {"train": rows, "validation": rows}, data_dir)
    config = make_config(data_dir)
    config.data.eval_name = "imagenet2012_real"
    results = train.train(config, tmp_path)
    assert evaluate.evaluate_checkpoint(config, tmp_path) == pytest.approx(results, rel=1e-5)
    assert "on 67 examples of imagenet2012_real" in capsys.readouterr().out
    # The predictions are nearly uniform, so the loss shows the rule: of 1,000 classes, one or three
    # are correct; then one of 200.
    assert results["imagenet2012_real/loss"] == pytest.approx(np.log(1000) - np.log(3) / 3, abs=0.1)
    config.data.eval_name = "imagenet_a"
    results = evaluate.evaluate_checkpoint(config, tmp_path)
    assert results["imagenet_a/loss"] == pytest.approx(np.log(200), abs=0.1)
    config.data.eval_name = "imagenet_r"
    with pytest.raises(InputError, match=r"config\.data\.name='imagenet_r' is not prepared"):
        evaluate.evaluate_checkpoint(config, tmp_path)
