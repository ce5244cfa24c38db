"""The test sets of ImageNet: their rules, and through the public command against NumPy."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow_datasets as tfds
from flax import nnx
from PIL import Image
from scipy.special import logsumexp

from structinit_jax import evaluate, train
from structinit_jax.config import validate
from structinit_jax.data.imagenet import open_imagenet_evaluation
from structinit_jax.data.info import CATALOG
from structinit_jax.errors import InputError
from structinit_jax.recipes import imagenet_2025
from structinit_jax.training.checkpoint import Checkpoints

ROOT = Path(__file__).parent.parent
# As many classes as ImageNet-A has, spread over the thousand.
CLASSES = np.arange(200) * 5 + 2
LABEL = tfds.features.ClassLabel(num_classes=1000)
FIELDS = {
    "num_steps": 2,
    "batch_size": 64,
    "model.width": 16,
    "model.depth": 1,
    "model.num_heads": 2,
    "model.patch_size": 2,
    "model.dtype": "float32",
    "model.pool": "mean",
    "attention_init.name": "default",
    "data.image_size": 8,
    "data.crop_fraction": 1.0,
    "data.repeats": 1,
    "augment.crop": "none",
    "augment.rand_augment": "",
}
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


def numbers_of(source):
    """Which of `IMAGES` a source holds, in its order."""
    read = [example["image"].tobytes() for example in source.read(list(range(len(source))))]
    all_images = [image.tobytes() for image in IMAGES]
    return [all_images.index(image) for image in read]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("rules")
    prepare("imagenet_a", "0.1.0", {"test": labelled(CLASSES)}, path)
    prepare("imagenet_r", "0.2.0", {"test": labelled(CLASSES[:150])}, path)
    prepare_real([[3], [], [4, 7], [9]], path)
    return path


def test_sets_of_some_classes_choose_among_these(folder):
    evaluation = open_imagenet_evaluation("imagenet_a", folder)
    np.testing.assert_array_equal(evaluation.classes, CLASSES)
    assert evaluation.answers is None
    with pytest.raises(InputError, match=r"holds 150 classes, 200 are expected"):
        open_imagenet_evaluation("imagenet_r", folder)


def test_real_has_all_right_labels_and_leaves_out_images_without(folder):
    evaluation = open_imagenet_evaluation("imagenet2012_real", folder)
    assert evaluation.name.endswith("images without a label left out: 1")
    numbers = numbers_of(evaluation.source)
    assert sorted(numbers) == [0, 2, 3]
    examples = evaluation.source.read([0, 1, 2])
    answers = {
        number: {int(label) for label in evaluation.answers[example["label"]]} - {-1}
        for number, example in zip(numbers, examples, strict=True)
    }
    assert answers == {0: {3}, 2: {4, 7}, 3: {9}}
    chosen = evaluation.source.select(np.array([False, True, True]))
    assert [example["label"] for example in chosen.read([0, 1])] == [1, 2]
    assert chosen.open(1)[1] == 2
    info = tfds.builder("imagenet2012_real", data_dir=folder).info
    assert info.splits["validation"].num_examples == 4


def make_config(data_dir):
    config = imagenet_2025("vit_tiny_patch16_224")
    config.update_from_flattened_dict(FIELDS)
    del config.attention_init.kernel_size
    config.data.data_dir = str(data_dir)
    return config


@pytest.mark.parametrize(
    ("name", "num_classes", "message"),
    [
        ("imagenet_c", 1000, r"config\.data\.eval_name='imagenet_c' does not fit.*imagenet_v2"),
        ("imagenet_a", 10, r"config\.model\.num_classes=10 does not fit: it needs to be 1000"),
    ],
)
def test_what_does_not_fit_is_refused_without_data(name, num_classes, message):
    config = make_config("")
    config.data.eval_name = name
    config.model.num_classes = num_classes
    with pytest.raises(InputError, match=message):
        validate(config)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A data folder, a workdir with a checkpoint of step 2, and the model's logits of `IMAGES`."""
    path = tmp_path_factory.mktemp("trained")
    rows = labelled(range(64))
    prepare("imagenet2012", "5.1.0", {"train": rows, "validation": rows}, path / "data")
    config = make_config(path / "data")
    setup = train.set_up(config, CATALOG["imagenet2012"], 64)
    state = train.initialize(config, setup)
    for name in ("patch_embedding", "head"):  # so that images differ in what is predicted
        state.params[name]["kernel"] *= 20
    state = state._replace(step=state.step + 2)
    run = {"config": json.loads(config.to_json()), "num_examples": 64, "pending_metrics": []}
    with contextlib.closing(Checkpoints(path / "run" / "checkpoints", 1)) as checkpoints:
        checkpoints.save(2, state, run, None)
    model = nnx.merge(setup.model.graphdef, state.params, state.model_state)
    mean, std = np.array(config.data.mean), np.array(config.data.std)
    logits, _ = model(jnp.asarray((IMAGES / 255 - mean) / std, jnp.float32))
    return path / "data", path / "run", np.asarray(logits, np.float64)


@pytest.fixture(scope="module")
def sets(trained):
    """Sets whose labels are in part what the model predicts, and what evaluation must find."""
    data_dir, _, logits = trained
    log_p = logits - logsumexp(logits, axis=1, keepdims=True)
    best = logits.argmax(axis=1)
    expected = {}

    labels = np.where(np.arange(70) < 40, best[:70], (best[:70] + 1) % 1000)
    prepare("imagenet_v2", "3.0.0", {"test": labelled(labels)}, data_dir, None, "matched-frequency")
    expected["imagenet_v2"] = (40 / 70, -log_p[np.arange(70), labels].mean(), 70)

    among = logits[:, CLASSES]
    labels = CLASSES[np.concatenate([np.arange(200), among[200:260].argmax(axis=1)])]
    prepare("imagenet_a", "0.1.0", {"test": labelled(labels)}, data_dir)
    right = CLASSES[among[:260].argmax(axis=1)] == labels
    assert right.sum() >= 60 > np.sum(best[:260] == labels)
    assert len(set(best)) > 10
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


def test_the_command_agrees_with_numpy(trained, sets, tmp_path):
    data_dir, workdir, _ = trained
    common = [
        "--config=configs/vit_2025_imagenet.py:vit_tiny_patch16_224",
        *(f"--config.{field}={value}" for field, value in FIELDS.items()),
        f"--config.data.data_dir={data_dir}",
        f"--workdir={workdir}",
        "--mode=eval",
    ]
    commands = [[*common, f"--config.data.eval_name={name}"] for name in sets]
    commands.append([*common, "--config.data.eval_name=imagenet_r"])
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {
        "JAX_PLATFORMS": "cpu",
        "XDG_CACHE_HOME": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "tests/fork_main.py"],
        input=json.dumps(commands),
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    *results, missing = json.loads(done.stdout)
    for (name, (accuracy, loss, count)), (code, stdout, stderr) in zip(
        sets.items(), results, strict=True
    ):
        assert code == 0, stderr
        found = re.search(r"test loss ([\d.]+)  test accuracy ([\d.]+) on (\d+) examples", stdout)
        assert float(found[1]) == pytest.approx(loss, abs=2e-4)
        assert float(found[2]) == pytest.approx(accuracy, abs=1e-4)
        assert int(found[3]) == count
        assert f"examples of {name}" in stdout
    assert missing[0] == 1
    assert "error: data.name='imagenet_r' is not prepared" in missing[2]


@pytest.mark.usefixtures("library_promotion")
def test_a_run_is_tested_on_the_set_that_it_names(trained, sets, tmp_path):
    data_dir, workdir, _ = trained
    shutil.copytree(workdir, tmp_path / "run")
    config = make_config(data_dir)
    config.num_steps = 3
    config.data.eval_name = "imagenet2012_real"
    results = train.train(config, tmp_path / "run")
    assert 0.4 < results["test/accuracy"] < 0.8
    assert evaluate.evaluate_checkpoint(config, tmp_path / "run") == pytest.approx(
        results, rel=1e-5
    )
