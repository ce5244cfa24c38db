"""Restores the model of a run, evaluates states on a split, and classifies image files."""

import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from etils import epath
from flax import nnx
from jaxtyping import Float, Int
from ml_collections import ConfigDict

from structinit_jax import config as config_lib
from structinit_jax.augment import normalize
from structinit_jax.data.images import CenterCrop
from structinit_jax.data.loader import Batch, HostLoader, make_loader
from structinit_jax.data.source import Dataset, ImageSource
from structinit_jax.errors import InputError, printable, require
from structinit_jax.files import csv_text, open_path, write_atomically
from structinit_jax.training import build, checkpoint, sharding
from structinit_jax.training import workdir as workdir_lib
from structinit_jax.training.checkpoint_files import read_run
from structinit_jax.training.state import AbstractModel, TrainState, abstract_state
from structinit_jax.training.step import MAX_IN_FLIGHT

BATCH_SIZE = 64  # of `Classifier`


class Evaluation(NamedTuple):
    """The results of an evaluation.

    `metrics` has 'eval/loss', the cross-entropy, and 'eval/accuracy'. `labels` and `predicted` are
    the true and predicted classes of all examples.
    """

    metrics: dict[str, float]
    labels: Int[np.ndarray, " n"]
    predicted: Int[np.ndarray, " n"]

    def __str__(self) -> str:
        loss = self.metrics["eval/loss"]
        return f"eval loss {loss:.4f}  eval accuracy {self.metrics['eval/accuracy']:.4f}"


def make_evaluator(
    config: ConfigDict, model: AbstractModel, source: ImageSource
) -> Callable[[TrainState], Evaluation]:
    """Returns a function that evaluates states of a model on all examples of a split.

    The states must be on the model's mesh. Batches have the size of the parts into which training
    splits its batches (`config.accumulate_steps`), rounded up to a multiple of the number of
    devices; the results do not depend on the size.
    """
    data = config.data
    mesh = model.mesh
    eval_step = make_eval_step(model, data.mean, data.std)
    eval_step = jax.jit(eval_step, out_shardings=sharding.replicated(mesh))
    loader = make_loader(source, mesh, CenterCrop(data.image_size, data.crop_fraction))
    batch_size = -(-config.batch_size // (config.accumulate_steps * mesh.size)) * mesh.size

    def evaluate(state):
        parts = []
        for batch in loader.eval_batches(batch_size=batch_size):
            parts.append(eval_step(*state.weights, batch))
            jax.block_until_ready(parts[-MAX_IN_FLIGHT - 1 : -MAX_IN_FLIGHT])
        every = jax.tree.map(lambda *values: np.concatenate(values), *jax.device_get(parts))
        every = {name: values[: len(source)] for name, values in every.items()}  # no padding
        metrics = {
            "eval/loss": float(np.mean(every["loss"], dtype=np.float64)),
            "eval/accuracy": float(np.mean(every["predicted"] == every["label"])),
        }
        return Evaluation(metrics, every["label"], every["predicted"])

    return evaluate


def make_eval_step(
    model: AbstractModel, mean: tuple[float, ...], std: tuple[float, ...]
) -> Callable[[dict, dict, Batch], dict[str, Any]]:
    """Builds the evaluation step, `(params, model_state, batch) -> results`.

    The results are per example: 'loss', 'label' and 'predicted' (the class). `mean` and `std` are
    per channel, for pixels scaled to [0, 1].
    """

    def eval_step(params: dict, model_state: dict, batch: Batch) -> dict[str, Any]:
        images = normalize(batch["image"], mean, std)
        params = sharding.gather_outside_stacks(params, model.mesh, model.stacks)
        logits, _ = nnx.merge(model.graphdef, params, model_state)(images)
        return {
            "loss": optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]),
            "label": batch["label"],
            "predicted": logits.argmax(-1),
        }

    return eval_step


def write_by_class(
    folder: epath.PathLike, evaluation: Evaluation, class_names: Sequence[str]
) -> epath.Path:
    """Writes the accuracy of each class to `per_class.csv`, and returns the path."""
    labels = evaluation.labels
    counts = np.bincount(labels, minlength=len(class_names))
    correct = np.bincount(labels[labels == evaluation.predicted], minlength=len(class_names))
    rows = [
        # Class names can be folder names, which are not always valid text.
        [printable(name), n, k, k / n if n else ""]
        for name, n, k in zip(class_names, counts, correct, strict=True)
    ]
    path = epath.Path(folder) / "per_class.csv"
    write_atomically(path, csv_text(["class", "examples", "correct", "accuracy"], rows))
    return path


def restore_model(
    config: ConfigDict,
    workdir: str | Path,
    devices: list[jax.Device] | None = None,
    step: str | int = "newest",
    level: int = workdir_lib.WEIGHTS,
) -> tuple[AbstractModel, TrainState, list[str]]:
    """Restores the model of a run at step 'newest', 'best' or a number.

    Returns the model, its state without optimizer state, and the names of the classes by label.
    With `config.ema_decay`, the state has only the moving averages of the weights.

    The number of devices (by default all) and `config.batch_size` can differ from training. Each
    copy of the weights is spread over gcd(`config.fsdp`, number of devices) devices. Raises
    `InputError` if there is no such checkpoint, if the config does not fit it, or if a field has
    changed that `workdir.DECIDES` lists at or below `level`.
    """
    directory = open_path(workdir) / "checkpoints"
    number = checkpoint.find_step(directory, step)
    if number is None:
        steps = ", ".join(folder.name for folder in checkpoint.step_folders(directory)) or "none"
        evaluated = " that has been evaluated" if step == "best" else ""
        raise InputError(
            f"workdir={str(workdir)!r} must be a run with an intact checkpoint{evaluated} for "
            f"step={step!r}; it has {steps}"
        )
    run = read_run(directory / str(number))
    place = f"step {number} in {workdir}"
    if changed := workdir_lib.check_config(run["config"], config, level, place):
        print(f"config changed since {place}:\n{changed}")
    devices = devices or jax.devices()
    mesh = sharding.make_mesh(math.gcd(config.fsdp, len(devices)), devices)
    model = build.make_model(config, mesh)
    whole = abstract_state(model, optax.identity(), config.ema_decay > 0)
    wanted = whole._replace(opt_state=None)
    if config.ema_decay:
        wanted = wanted._replace(params=None, model_state=None)
    return model, checkpoint.restore(directory, number, wanted), run["class_names"]


@build.explain_errors()
def evaluate_checkpoint(
    config: ConfigDict, workdir: str | Path, step: str = "newest", out: Path | None = None
) -> dict[str, float]:
    """Evaluates a checkpoint of a run, possibly on other data, and prints the results.

    `step` is 'newest', 'best' or a number. `out`, if set, is an existing folder for per-class
    results; see `write_by_class`. Raises `InputError` if there is no such checkpoint, if it does
    not fit the config, or if the data cannot be used or have different classes.
    """
    config_lib.validate(config)
    dataset = build.open_data(config)
    model, state, trained_names = restore_model(config, workdir, step=step)
    names = dataset.class_names
    pairs = zip(trained_names, names, strict=True)
    if renamed := [f"  {old!r} -> {new!r}" for old, new in pairs if old != new]:
        raise InputError("\n".join(["class names must be the same as in training:", *renamed]))
    source = build.open_split(config, dataset, "eval_split")
    evaluation = make_evaluator(config, model, source)(state)
    name = f"{dataset.name} {config.data.eval_split}"
    print(f"step {state.step}  {evaluation} on {len(source):,} examples of {name}")
    if out and jax.process_index() == 0:
        path = write_by_class(out, evaluation, names)
        print(f"wrote {path}")
    return evaluation.metrics


class Classifier:
    """Classifies images with the model of a checkpoint.

    Images are cropped, resized and normalized as in the run's evaluation.

    Args:
      workdir: Output directory of the run.
      step: 'newest', 'best' or a number.
      trust: Whether the run's config may name Python code to import.

    Attributes:
      config: Config of the run.
      class_names: Name of each class.

    Raises:
      InputError: There is no such checkpoint, or the config names Python code without `trust`.
    """

    def __init__(self, workdir: str | Path, step: str | int = "newest", trust: bool = False):
        self.config = config = config_lib.load_run_config(workdir, trust)
        devices = jax.local_devices()[:1]
        model, state, self.class_names = restore_model(config, workdir, devices, step)
        self._mesh = model.mesh
        self._weights = state.weights

        @jax.jit
        def logits(weights, images):
            images = normalize(images, config.data.mean, config.data.std)
            network = nnx.merge(model.graphdef, *weights)
            return network(images)[0]

        self._logits = logits

    def __call__(
        self, images: Iterable[str | os.PathLike | np.ndarray]
    ) -> Float[np.ndarray, "n classes"]:
        """Returns the logits of images, each a file or pixels, uint8 [h, w, C].

        Raises:
          InputError: An image is missing or cannot be decoded, or `images` is a single image or
            empty.
        """
        kinds = str | os.PathLike | np.ndarray
        stored = [] if isinstance(images, kinds) else list(images)
        fits = stored and all(isinstance(image, kinds) for image in stored)
        require("images", images, "a list of one or more paths or arrays, such as [path]", fits)
        records = [{"image": image, "label": 0} for image in stored]
        data = self.config.data
        names = self.class_names
        dataset = Dataset.from_records("argument", {"files": records}, names, data.channels)
        source = dataset.split("files")
        loader = HostLoader(source, self._mesh, CenterCrop(data.image_size, data.crop_fraction))
        size = 2 ** (len(stored) - 1).bit_length()  # few sizes: each compiles its own program
        batches = loader.eval_batches(batch_size=min(size, BATCH_SIZE))
        logits = [self._logits(self._weights, batch["image"]) for batch in batches]
        return np.concatenate(jax.device_get(logits))[: len(stored)]
