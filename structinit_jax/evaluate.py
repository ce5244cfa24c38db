"""Restores a model from a checkpoint and evaluates it on every example of a split."""

import csv
import io
import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath, epy
from flax import nnx
from jaxtyping import Float, Int
from ml_collections import ConfigDict

from structinit_jax import config as config_lib
from structinit_jax.augment import normalize
from structinit_jax.data.images import BadImageError
from structinit_jax.data.loader import HostLoader, make_loader
from structinit_jax.data.source import Dataset, ImageSource
from structinit_jax.errors import InputError, printable
from structinit_jax.training import build, checkpoint, resume, sharding
from structinit_jax.training.metrics import MAX_IN_FLIGHT
from structinit_jax.training.state import AbstractModel, TrainState
from structinit_jax.training.step import make_eval_step
from structinit_jax.training.workdir import open_path, write_atomically

with epy.lazy_imports():  # imports matplotlib
    from structinit_jax.training import figures

BATCH_SIZE = 64  # of a Classifier
MAX_CONFUSED_CLASSES = 1000  # with more, a confusion matrix would be too large to be of use


class Evaluation(NamedTuple):
    """The results of an evaluation.

    `metrics` has 'eval/loss', the cross-entropy, and 'eval/accuracy'. `labels` and `predicted` are
    the classes of all examples, and of padding, whose label is -1.
    """

    metrics: dict[str, float]
    labels: Int[np.ndarray, " n"]
    predicted: Int[np.ndarray, " n"]


def make_evaluator(
    config: ConfigDict, model: AbstractModel, source: ImageSource
) -> Callable[[TrainState], Evaluation]:
    """Returns a function that evaluates states of a model on all examples of a split.

    The model is on the mesh of the states. Batches have the size of those that training computes at
    once, rounded up to a multiple of the number of devices: any gives the same sums.
    """
    data = config.data
    mesh = model.mesh
    step = make_eval_step(model, data.mean, data.std)
    step = jax.jit(step, out_shardings=sharding.replicated(mesh))
    loader = make_loader(source, mesh, image_size=data.image_size, crop_fraction=data.crop_fraction)
    batch_size = -(-config.batch_size // (config.accumulate_steps * mesh.size)) * mesh.size

    def evaluate(state):
        parts = []
        for batch in loader.eval_batches(batch_size=batch_size):
            parts.append(step(*state.weights, batch))
            jax.block_until_ready(parts[-MAX_IN_FLIGHT - 1 : -MAX_IN_FLIGHT])
        parts = jax.device_get(parts)
        loss, correct, count = (
            float(np.sum([part[name] for part in parts])) for name in ("loss", "correct", "count")
        )
        labels, predicted = (
            np.concatenate([part[name] for part in parts]) for name in ("label", "predicted")
        )
        metrics = {"eval/loss": loss / count, "eval/accuracy": correct / count}
        return Evaluation(metrics, labels, predicted)

    return evaluate


def restore_model(
    config: ConfigDict,
    workdir: str | Path,
    devices: list[jax.Device] | None = None,
    step: str | int = "newest",
    fixed: Sequence[str] = resume.OF_WEIGHTS,
) -> tuple[AbstractModel, TrainState]:
    """Restores the model of a run, without optimizer state, at step 'newest', 'best' or a number.

    With `config.ema_decay`, its weights are the averages that the run has kept.

    The number of devices, by default all, and `config.batch_size` may differ from those in
    training. As there, `config.fsdp` devices share one copy of the weights, or as many as divide
    both it and their number. Raises `InputError` if there is no such checkpoint, or if the config
    does not fit it or differs in the fields or sections that are `fixed`.
    """
    directory = open_path(workdir) / "checkpoints"
    number = checkpoint.find_step(directory, step)
    if number is None:
        raise InputError(f"--workdir={workdir} has no complete checkpoint for --step={step}")
    saved = checkpoint.read_run(directory, number)["config"]
    place = f"step {number} in {workdir}"
    if changed := resume.check_config(saved, config, place, fixed):
        print(f"config changed since {place}:", *changed, sep="\n")
    devices = devices or jax.devices()
    mesh = sharding.make_mesh(math.gcd(config.fsdp, len(devices)), devices)
    model = build.make_model(config, mesh)
    count = jax.ShapeDtypeStruct((), np.int32, sharding=sharding.replicated(mesh))
    abstract_state = TrainState(count, model.params, model.model_state, opt_state={})
    if config.ema_decay:
        averages = {"params": model.params, "model_state": model.model_state}
        abstract_state = TrainState(count, None, None, opt_state={}, ema=averages)
    state = checkpoint.restore(directory, number, abstract_state, weights_only=True)
    return model, TrainState(state.step, *state.weights, opt_state={})


def class_names(config: ConfigDict, workdir: str | Path, state: TrainState) -> list[str]:
    """Returns the names of the classes that a restored state was trained on, by label.

    Raises `InputError` unless the checkpoint has as many names as the model of the config has.
    """
    run = checkpoint.read_run(open_path(workdir) / "checkpoints", int(state.step))
    names = run["class_names"]
    count = config.model.num_classes
    if len(names) != count:
        raise InputError(
            f"step {state.step} in {workdir} has {len(names)} class names for {count} classes"
        )
    return names


def evaluate_checkpoint(
    config: ConfigDict, workdir: str | Path, step: str = "newest", out: Path | None = None
) -> dict[str, float]:
    """Evaluates a checkpoint of a run, possibly on other data, and prints the results.

    `step` is 'newest', 'best' or a number. If `out` is set, the results by class are written to
    this folder, see `write_by_class`. Raises `InputError` if there is no such checkpoint, if it
    does not fit the config, or if the data cannot be used or have other classes.
    """
    dataset = build.open_data(config)
    if out:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--out={out} is no folder to write to: {error}") from error
    model, state = restore_model(config, workdir, step=step)
    pairs = zip(class_names(config, workdir, state), dataset.class_names, strict=True)
    if renamed := [f"  {old!r} -> {new!r}" for old, new in pairs if old != new]:
        raise InputError("\n".join(["classes must be named as in training:", *renamed]))
    source = build.open_split(config, dataset, "eval_split")
    evaluation = make_evaluator(config, model, source)(state)
    name = f"{dataset.name} {config.data.eval_split}"
    results = describe(evaluation.metrics)
    print(f"step {state.step}  {results} on {len(source):,} examples of {name}")
    if out and jax.process_index() == 0:
        names = write_by_class(epath.Path(out), evaluation, dataset.class_names)
        print(f"wrote {', '.join(names)} to {out}")
    return evaluation.metrics


def write_by_class(
    folder: epath.Path, evaluation: Evaluation, class_names: Sequence[str]
) -> list[str]:
    """Writes the accuracy of each class and the confusion matrix, and returns the files' names.

    `per_class.csv` has a row for each class. In `confusion.csv` and `confusion.png` rows are true
    classes and columns predicted ones; more than 1,000 classes get neither.
    """
    class_names = list(map(printable, class_names))  # of folders, whose names need not be text
    num_classes = len(class_names)
    known = (evaluation.labels >= 0) & (evaluation.labels < num_classes)
    labels = evaluation.labels[known]
    predicted = evaluation.predicted[known]
    counts = np.bincount(labels, minlength=num_classes)
    correct = np.bincount(labels[labels == predicted], minlength=num_classes)
    rows = [
        [name, n, k, k / n if n else ""]
        for name, n, k in zip(class_names, counts, correct, strict=True)
    ]
    files = {"per_class.csv": _csv(["class", "examples", "correct", "accuracy"], rows)}
    if num_classes <= MAX_CONFUSED_CLASSES:
        pairs = np.bincount(labels * num_classes + predicted, minlength=num_classes**2)
        confusion = pairs.reshape(num_classes, num_classes)
        rows = [[name, *row] for name, row in zip(class_names, confusion.tolist(), strict=True)]
        files["confusion.csv"] = _csv(["true class", *class_names], rows)
        files["confusion.png"] = figures.png(figures.draw_confusion(confusion, class_names))
    for name, content in files.items():
        write_atomically(folder / name, content)
    return list(files)


def _csv(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([header, *rows])
    return file.getvalue()


def describe(results: dict[str, float]) -> str:
    """Formats results, for example 'eval loss 0.0613  eval accuracy 0.9833'."""
    return "  ".join(f"{name.replace('/', ' ')} {value:.4f}" for name, value in results.items())


class Classifier:
    """The model of a checkpoint, for image files.

    Images are cropped, resized and normalized as in the run's evaluation.

    Args:
      workdir: Output directory of the run.
      step: 'newest', 'best' or a number.
      trust: Whether the run's config may name Python code to import.

    Attributes:
      config: Config of the run.
      class_names: Name of each class.

    Raises:
      InputError: There is no such checkpoint.
    """

    def __init__(self, workdir: str | Path, step: str | int = "newest", trust: bool = False):
        self.config = config = config_lib.load_run_config(workdir, trust)
        model, state = restore_model(config, workdir, jax.local_devices()[:1], step)
        self.class_names = class_names(config, workdir, state)
        self._mesh = model.mesh
        self._weights = state.params, state.model_state

        @jax.jit
        def logits(weights, images):
            images = normalize(images, tuple(config.data.mean), tuple(config.data.std))
            network = nnx.merge(model.graphdef, *weights)
            return network(images)[0]

        self._logits = logits

    def __call__(self, files: Iterable[str | os.PathLike]) -> Float[np.ndarray, "n classes"]:
        """Returns the logits of images.

        Raises:
          InputError: A file is missing or cannot be decoded, or `files` is a single path.
        """
        if isinstance(files, str | os.PathLike):
            raise InputError(f"files={os.fspath(files)!r} must be a list of paths: put it in [ ]")
        files = list(files)
        if not files:
            return np.zeros((0, len(self.class_names)), np.float32)
        records = [{"image": os.fspath(file), "label": 0} for file in files]
        data = self.config.data
        names = self.class_names
        dataset = Dataset.from_records("files", {"files": records}, names, data.channels)
        sizes = data.image_size, data.crop_fraction
        loader = HostLoader(dataset.split("files"), self._mesh, *sizes, random_crop=None)
        size = 2 ** (len(files) - 1).bit_length()  # few sizes, since each has a program of its own
        batches = loader.eval_batches(batch_size=min(size, BATCH_SIZE))
        try:
            logits = [self._logits(self._weights, batch["image"]) for batch in batches]
        except BadImageError as error:  # its advice is for training
            raise InputError(f"{error.problem}.") from error
        return np.concatenate(jax.device_get(logits))[: len(files)]
