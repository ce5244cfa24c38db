"""Restores a model from a checkpoint and evaluates it on every example of a split."""

import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jaxtyping import Float
from ml_collections import ConfigDict

from structinit_jax import config as config_lib
from structinit_jax.augment import normalize
from structinit_jax.data.images import BadImageError
from structinit_jax.data.loader import HostLoader, make_loader
from structinit_jax.data.source import Dataset, ImageSource
from structinit_jax.errors import InputError
from structinit_jax.run import Run, evaluation_name
from structinit_jax.training import checkpoint, resume
from structinit_jax.training import mesh as mesh_lib
from structinit_jax.training.metrics import MAX_IN_FLIGHT
from structinit_jax.training.state import AbstractModel, TrainState, abstract_model
from structinit_jax.training.step import make_eval_step
from structinit_jax.training.workdir import open_path

BATCH_SIZE = 64  # of a Classifier


def make_evaluator(
    config: ConfigDict, model: AbstractModel, source: ImageSource
) -> Callable[[TrainState], dict[str, float]]:
    """Returns a function that evaluates states of a model on all examples of a split.

    The function returns 'NAME/loss' and 'NAME/accuracy', where `run.evaluation_name` gives the
    name. The model is on the mesh of the states. Batches have the size of those that training
    computes at once, rounded up to a multiple of the number of devices: any gives the same sums.
    """
    data, mesh = config.data, model.mesh
    step = make_eval_step(model.graphdef, mesh, data.mean, data.std)
    step = jax.jit(step, out_shardings=mesh_lib.replicated(mesh))
    loader = make_loader(source, mesh, image_size=data.image_size, crop_fraction=data.crop_fraction)
    batch_size = -(-config.batch_size // (config.accumulate_steps * mesh.size)) * mesh.size
    name = evaluation_name(data)

    def evaluate(state):
        sums = []
        for batch in loader.eval_batches(batch_size=batch_size):
            sums.append(step(state.params, state.model_state, batch))
            jax.block_until_ready(sums[-MAX_IN_FLIGHT - 1 : -MAX_IN_FLIGHT])
        totals = jax.tree.map(lambda *leaves: float(np.sum(leaves)), *jax.device_get(sums))
        return {
            f"{name}/loss": totals["loss"] / totals["count"],
            f"{name}/accuracy": totals["correct"] / totals["count"],
        }

    return evaluate


def restore_model(
    config: ConfigDict,
    workdir: str | Path,
    devices: list[jax.Device] | None = None,
    step: str | int = "newest",
    fixed: Sequence[str] = resume.OF_WEIGHTS,
) -> tuple[AbstractModel, TrainState]:
    """Restores the model of a run, without optimizer state, at step 'newest', 'best' or a number.

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
    mesh = mesh_lib.make_mesh(math.gcd(config.fsdp, len(devices)), devices)
    model = abstract_model(config.model, config.data, mesh)
    count = jax.ShapeDtypeStruct((), np.int32, sharding=mesh_lib.replicated(model.mesh))
    abstract_state = TrainState(count, model.params, model.model_state, opt_state={})
    return model, checkpoint.restore(directory, number, abstract_state, weights_only=True)


def class_names(workdir: str | Path, state: TrainState) -> list[str]:
    """Returns the names of the classes that a restored state was trained on, by label."""
    return checkpoint.read_run(open_path(workdir) / "checkpoints", int(state.step))["class_names"]


def evaluate_checkpoint(
    config: ConfigDict, workdir: str | Path, step: str = "newest"
) -> dict[str, float]:
    """Evaluates a checkpoint of a run, possibly on other data, and prints the results.

    `step` is 'newest', 'best' or a number. Raises `InputError` if there is no such checkpoint, if
    it does not fit the config, or if the data cannot be used or have other classes.
    """
    run = Run(config)
    model, state = restore_model(config, workdir, step=step)
    pairs = zip(class_names(workdir, state), run.dataset.class_names, strict=True)
    if renamed := [f"  {old!r} -> {new!r}" for old, new in pairs if old != new]:
        raise InputError("\n".join(["classes must be named as in training:", *renamed]))
    source = run.eval_source
    results = make_evaluator(config, model, source)(state)
    name = f"{run.dataset.name} {config.data.eval_split}"
    print(f"step {state.step}  {describe(results)} on {len(source):,} examples of {name}")
    return results


def describe(results: dict[str, float]) -> str:
    """Formats results, for example 'test loss 0.0613  test accuracy 0.9833'."""
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
        self.class_names = class_names(workdir, state)
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
        data, names = self.config.data, self.class_names
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
