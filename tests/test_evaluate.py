import csv
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from flax import nnx
from PIL import Image
from tfds_sets import write_small_set

from structinit_jax import evaluate
from structinit_jax.data import datasets
from structinit_jax.data.datasets import open_dataset
from structinit_jax.errors import InputError
from structinit_jax.training import checkpoint, checkpoint_files, sharding

pytestmark = pytest.mark.usefixtures("library_promotion")


def test_a_checkpoint_is_evaluated_as_in_training(run_config, finished_run, capsys):
    results = evaluate.evaluate_checkpoint(run_config, finished_run.workdir)
    assert results == pytest.approx(finished_run.results, rel=1e-6)
    assert "on 90 examples of digits test[:90]" in capsys.readouterr().out


def test_a_checkpoint_is_evaluated_on_another_data_set(run_config, finished_run, tmp_path, capsys):
    write_small_set(tmp_path, num_classes=10)
    run_config.data.update(name="imagenet_sketch", eval_split="test", data_dir=str(tmp_path))
    assert "eval/accuracy" in evaluate.evaluate_checkpoint(run_config, finished_run.workdir)
    assert "on 2 examples of imagenet_sketch test" in capsys.readouterr().out


def test_weights_are_split_over_the_devices_that_there_are(run_config, finished_run, monkeypatch):
    monkeypatch.setattr(sharding, "MIN_SIZE_TO_SHARD", 1)
    run_config.update(fsdp=4, batch_size=20)  # neither fits six devices
    devices = jax.devices()[:6]
    model, state = evaluate.restore_model(run_config, finished_run.workdir, devices)
    assert model.mesh.shape == {"data": 3, "fsdp": 2}
    kernel = state.params["blocks"]["mlp"]["fc1"]["kernel"]
    assert kernel.addressable_shards[0].data.size == kernel.size // 2
    monkeypatch.setattr(jax, "devices", lambda: devices)
    results = evaluate.evaluate_checkpoint(run_config, finished_run.workdir)
    assert results == pytest.approx(finished_run.results, rel=1e-5)


def test_images_are_cropped_as_the_config_says(run_config, finished_run):
    run_config.data.crop_fraction = 0.5
    results = evaluate.evaluate_checkpoint(run_config, finished_run.workdir)
    model, state = evaluate.restore_model(run_config, finished_run.workdir, jax.devices()[:1])
    source = open_dataset("digits").split("test[:90]")
    images, labels = zip(*source.read(range(90)), strict=True)
    pillow = [Image.fromarray(image.decode()[..., 0]) for image in images]
    images = [image.resize((16, 16), Image.Resampling.BICUBIC) for image in pillow]
    images = np.stack([np.asarray(image)[4:12, 4:12, None] for image in images])
    images = (images / 255 - np.asarray(run_config.data.mean)) / np.asarray(run_config.data.std)
    logits, _ = nnx.merge(model.graphdef, state.params, state.model_state)(jnp.float32(images))
    accuracy = np.mean(np.argmax(logits, axis=1) == np.asarray(labels))
    assert results["eval/accuracy"] == pytest.approx(accuracy)
    assert accuracy != finished_run.results["eval/accuracy"]


def test_a_model_that_is_computed_otherwise_is_refused(run_config, finished_run):
    run_config.data.mean = (0.5,)
    run_config.model.positions = "rope"  # has the same parameters
    message = r"as in step 12 in .*\n  data.mean: .*\n  model.positions: 'sincos' -> "
    with pytest.raises(InputError, match=message):
        evaluate.evaluate_checkpoint(run_config, finished_run.workdir)
    run_config.seed = 9
    with pytest.raises(InputError, match=r"\n  seed: 0 -> 9\n"):  # as analyse checks
        evaluate.restore_model(run_config, finished_run.workdir, fixed=("seed",))


def test_data_with_other_classes_are_refused(run_config, finished_run, monkeypatch):
    dataset = open_dataset("digits")
    names = ["1", "0", *dataset.class_names[2:]]
    other = dataclasses.replace(dataset, class_names=names)
    monkeypatch.setattr(datasets, "open_dataset", lambda *_: other)
    with pytest.raises(InputError, match=r"as in training:\n  '0' -> '1'\n  '1' -> '0'$"):
        evaluate.evaluate_checkpoint(run_config, finished_run.workdir)


def test_results_by_class_are_counted(tmp_path):
    labels = np.array([0, 0, 1, 2, -1, 9], np.int32)  # padding, and a label that is no class
    predicted = np.array([0, 1, 1, 0, 0, 0], np.int32)
    evaluation = evaluate.Evaluation({}, labels, predicted)
    names = ["a", "$x_{$", 'b, "c"', "none\udcff"]  # the last one is a folder's in Latin-1
    files = evaluate.write_by_class(epath.Path(tmp_path), evaluation, names)
    assert files == ["per_class.csv", "confusion.csv", "confusion.png"]
    with (tmp_path / "per_class.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["class"] for row in rows] == [*names[:3], r"none\udcff"]
    assert [row["examples"] for row in rows] == ["2", "1", "1", "0"]
    assert [row["accuracy"] for row in rows] == ["0.5", "1.0", "0.0", ""]
    with (tmp_path / "confusion.csv").open() as file:
        confusion = [row[1:] for row in csv.reader(file)][1:]
    assert confusion == [list("1100"), list("0100"), list("1000"), list("0000")]
    assert (tmp_path / "confusion.png").read_bytes().startswith(b"\x89PNG")


def test_many_classes_have_no_confusion_matrix(tmp_path):
    labels = np.arange(1001, dtype=np.int32)
    evaluation = evaluate.Evaluation({}, labels, labels)
    names = [str(label) for label in labels]
    assert evaluate.write_by_class(epath.Path(tmp_path), evaluation, names) == ["per_class.csv"]


def test_a_checkpoint_with_too_few_class_names_is_refused(run_config, workdir):
    folder = epath.Path(workdir / "checkpoints" / "12")
    run = checkpoint.read_run(folder.parent, 12)
    files = checkpoint_files.read_indexes(folder, run)
    run["class_names"] = ["zero"]
    checkpoint_files.write_index(folder, 0, run, files)
    checkpoint_files.write_run(folder, run)
    for read in (
        lambda: evaluate.evaluate_checkpoint(run_config, workdir),
        lambda: evaluate.Classifier(workdir),
    ):
        with pytest.raises(InputError, match="1 class names for 10 classes"):
            read()


def test_the_checkpoint_can_be_chosen(run_config, finished_run, tmp_path, capsys):
    evaluate.evaluate_checkpoint(run_config, finished_run.workdir, "8")
    assert "step 8  eval loss" in capsys.readouterr().out
    lines = (finished_run.workdir / "metrics.jsonl").read_text().splitlines()
    metrics = [line for line in map(json.loads, lines) if "eval/accuracy" in line]
    best = max(metrics, key=lambda line: (line["eval/accuracy"], line["step"]))
    _, state = evaluate.restore_model(run_config, finished_run.workdir, step="best")
    assert state.step == best["step"]
    run = checkpoint.read_run(finished_run.workdir / "checkpoints", best["step"])
    assert run["accuracy"] == best["eval/accuracy"]
    for workdir in (finished_run.workdir, tmp_path / "missing"):
        message = "no complete checkpoint for --step=5"
        with pytest.raises(InputError, match=message):
            evaluate.evaluate_checkpoint(run_config, workdir, "5")
