import csv
import dataclasses

import jax
import numpy as np
import pytest
from conftest import read_metrics
from flax import nnx
from PIL import Image
from tfds_sets import write_small_set

from structinit_jax.augment import normalize
from structinit_jax.data import datasets
from structinit_jax.data.datasets import open_dataset
from structinit_jax.data.images import BadImageError, CenterCrop, StoredImage
from structinit_jax.errors import InputError
from structinit_jax.training import checkpoint_files, evaluation, sharding
from structinit_jax.training.evaluation import Evaluation, write_by_class

pytestmark = pytest.mark.usefixtures("library_promotion")


def test_a_checkpoint_is_evaluated_on_any_data(tiny_config, finished_run, tmp_path, capsys):
    results = evaluation.evaluate_checkpoint(tiny_config, finished_run.workdir, out=tmp_path)
    assert results == pytest.approx(finished_run.results, rel=1e-6)
    examples = np.bincount(open_dataset("digits").split("test[:90]").labels()).tolist()
    for folder in (tmp_path, finished_run.workdir):
        with (folder / "per_class.csv").open() as file:
            assert [int(row["examples"]) for row in csv.DictReader(file)] == examples
    write_small_set(tmp_path, num_classes=10)
    tiny_config.data.update(name="imagenet_sketch", eval_split="test", data_dir=str(tmp_path))
    evaluation.evaluate_checkpoint(tiny_config, finished_run.workdir)
    output = capsys.readouterr().out
    assert "on 90 examples of digits test[:90]" in output
    assert "on 2 examples of imagenet_sketch test" in output


def test_weights_are_split_over_the_devices_that_there_are(tiny_config, finished_run, monkeypatch):
    monkeypatch.setattr(sharding, "MIN_SIZE_TO_SHARD", 1)
    tiny_config.update(fsdp=4, batch_size=20)  # neither fits six devices
    devices = jax.devices()[:6]
    model, state, _ = evaluation.restore_model(tiny_config, finished_run.workdir, devices)
    assert model.mesh.shape == {"data": 3, "fsdp": 2}
    kernel = state.params["blocks"]["mlp"]["fc1"]["kernel"]
    assert kernel.addressable_shards[0].data.size == kernel.size // 2
    monkeypatch.setattr(jax, "devices", lambda: devices)
    results = evaluation.evaluate_checkpoint(tiny_config, finished_run.workdir)
    assert results == pytest.approx(finished_run.results, rel=1e-5)


def test_a_model_that_is_computed_otherwise_is_refused(tiny_config, finished_run):
    tiny_config.data.mean = (0.5,)
    tiny_config.model.positions = "rope"  # has the same parameters
    message = r"as in step 12 in .*\n  data.mean: .*\n  model.positions: 'sincos' -> "
    with pytest.raises(InputError, match=message):
        evaluation.evaluate_checkpoint(tiny_config, finished_run.workdir)


def test_data_with_other_classes_are_refused(tiny_config, finished_run, monkeypatch):
    dataset = open_dataset("digits")
    names = ["1", "0", *dataset.class_names[2:]]
    other = dataclasses.replace(dataset, class_names=names)
    monkeypatch.setattr(datasets, "open_dataset", lambda *_: other)
    with pytest.raises(InputError, match=r"\n  '0' -> '1'\n  '1' -> '0'$"):
        evaluation.evaluate_checkpoint(tiny_config, finished_run.workdir)


def test_a_bad_image_names_the_field_that_leaves_it_out(tiny_config, finished_run, monkeypatch):
    def fail(*_):
        raise BadImageError("cat.jpg: cannot be decoded")

    monkeypatch.setattr(evaluation, "make_evaluator", fail)
    with pytest.raises(InputError, match=r"^cat\.jpg: .* --config\.data\.on_bad_image=skip"):
        evaluation.evaluate_checkpoint(tiny_config, finished_run.workdir)


def test_the_checkpoint_can_be_chosen(tiny_config, finished_run, tmp_path, capsys):
    evaluation.evaluate_checkpoint(tiny_config, finished_run.workdir, "8")
    assert "step 8  eval loss" in capsys.readouterr().out
    run = checkpoint_files.read_run(finished_run.workdir / "checkpoints" / "8")
    assert run["accuracy"] is None  # Step 8 was not evaluated in training.
    metrics = [line for line in read_metrics(finished_run.workdir) if "eval/accuracy" in line]
    best = max(metrics, key=lambda line: (line["eval/accuracy"], line["step"]))
    _, state, _ = evaluation.restore_model(tiny_config, finished_run.workdir, step="best")
    assert state.step == best["step"]
    run = checkpoint_files.read_run(finished_run.workdir / "checkpoints" / str(best["step"]))
    assert run["accuracy"] == best["eval/accuracy"]
    for workdir in (finished_run.workdir, tmp_path / "missing"):
        with pytest.raises(InputError, match=rf"workdir='{workdir}' .*'5'; it has (12, |none)"):
            evaluation.evaluate_checkpoint(tiny_config, workdir, "5")
    with pytest.raises(InputError, match=r"checkpoint that has been evaluated for step='best'"):
        evaluation.evaluate_checkpoint(tiny_config, tmp_path / "missing", "best")


@pytest.fixture(scope="module")
def classify(finished_run):
    return evaluation.Classifier(finished_run.workdir, step=12)


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Images of the eval split (more than a batch), the same images as files, and their labels."""
    source = open_dataset("digits").split("test[:90]")
    images = np.stack(source.map(lambda image, label: image.decode()))
    files = [tmp_path_factory.getbasetemp() / f"digit_{i}.png" for i in range(len(images))]
    for file, image in zip(files, images, strict=True):
        Image.fromarray(image[..., 0]).save(file)
    return images, files, source.labels()


def test_logits_are_those_of_the_checkpoint(classify, digits, tiny_config, finished_run):
    images, files, _ = digits
    model, state, _ = evaluation.restore_model(tiny_config, finished_run.workdir, jax.devices()[:1])
    network = nnx.merge(model.graphdef, state.params, state.model_state)
    mean, std = (tuple(tiny_config.data[x]) for x in ("mean", "std"))
    expected = jax.jit(lambda images: network(normalize(images, mean, std))[0])(images)
    np.testing.assert_allclose(classify(files), expected, atol=1e-5)
    np.testing.assert_allclose(classify(str(f) for f in files[3:4]), expected[3:4], atol=1e-5)
    np.testing.assert_allclose(classify([images[3]]), expected[3:4], atol=1e-5)


def test_images_are_cropped_as_the_config_says(
    classify, digits, tiny_config, finished_run, tmp_path, monkeypatch
):
    images, files, labels = digits
    for number, image in enumerate(images[:3]):
        cropped = CenterCrop(8, 0.5)(StoredImage(image, 1, "digit"))
        Image.fromarray(cropped[..., 0]).save(tmp_path / f"{number}.png")
    expected = classify(tmp_path / f"{number}.png" for number in range(3))
    monkeypatch.setitem(classify.config.data, "crop_fraction", 0.5)
    logits = classify(files)
    np.testing.assert_allclose(logits[:3], expected, atol=1e-5)
    tiny_config.data.crop_fraction = 0.5
    accuracy = evaluation.evaluate_checkpoint(tiny_config, finished_run.workdir)["eval/accuracy"]
    assert accuracy == pytest.approx(np.mean(logits.argmax(axis=1) == labels))
    assert accuracy != finished_run.results["eval/accuracy"]


@pytest.mark.parametrize(
    ("images", "message"),
    [
        *(([], r"^images=.* a list of "), ("a.jpg", r"^images=.* a list of ")),
        *((np.zeros((8, 8, 1), np.uint8), r"^images=.* a list of "), ([__file__], __file__)),
    ],
)
def test_what_is_no_list_of_images_is_refused(classify, images, message):
    with pytest.raises(InputError, match=message) as caught:
        classify(images)
    assert "on_bad_image" not in str(caught.value)


def test_results_by_class_are_counted(tmp_path):
    labels = np.array([0, 0, 1, 2], np.int32)
    predicted = np.array([0, 1, 1, 1], np.int32)
    names = ["a", "$x_{$", 'b, "c"', "none\udcff"]  # the last is a folder name in Latin-1
    with write_by_class(tmp_path, Evaluation({}, labels, predicted), names).open() as file:
        rows = list(csv.DictReader(file))
    assert [row["class"] for row in rows] == [*names[:3], r"none\udcff"]
    assert [row["examples"] for row in rows] == ["2", "1", "1", "0"]
    assert [row["accuracy"] for row in rows] == ["0.5", "1.0", "0.0", ""]
