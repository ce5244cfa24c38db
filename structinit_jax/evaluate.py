"""Restores the model of a run, evaluates it on a split, and classifies image files with it."""

import math
import os
from collections.abc import Iterable
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jaxtyping import Float
from ml_collections import ConfigDict

from structinit_jax import config as config_lib
from structinit_jax.augment import normalize
from structinit_jax.data.images import CenterCrop
from structinit_jax.data.loader import HostLoader
from structinit_jax.data.source import Dataset
from structinit_jax.errors import InputError, require
from structinit_jax.files import open_path
from structinit_jax.training import build, checkpoint, sharding
from structinit_jax.training import workdir as workdir_lib
from structinit_jax.training.evaluation import make_evaluator, write_by_class
from structinit_jax.training.state import AbstractModel, TrainState

BATCH_SIZE = 64  # of `Classifier`


def restore_model(
    config: ConfigDict,
    workdir: str | Path,
    devices: list[jax.Device] | None = None,
    step: str | int = "newest",
    level: int = workdir_lib.WEIGHTS,
) -> tuple[AbstractModel, TrainState, list[str]]:
    """Restores the model of a run at step 'newest', 'best' or a number.

    Returns the model, its state without optimizer state, and the names of the classes by label.

    With `config.ema_decay`, the weights are the moving averages that the run has kept.

    The number of devices (by default all) and `config.batch_size` can differ from training. Each
    copy of the weights is spread over gcd(`config.fsdp`, number of devices) devices. Raises
    `InputError` if there is no such checkpoint, if the config does not fit it, or if a field that
    decides the `level` has changed; see `training.workdir`.
    """
    directory = open_path(workdir) / "checkpoints"
    number = checkpoint.find_step(directory, step)
    if number is None:
        steps = ", ".join(folder.name for folder in checkpoint.step_folders(directory)) or "none"
        raise InputError(
            f"workdir={str(workdir)!r} must be a run with an intact checkpoint for step={step!r}; "
            f"it has {steps}"
        )
    run = checkpoint.read_run(directory, number)
    place = f"step {number} in {workdir}"
    if changed := workdir_lib.check_config(run["config"], config, level, place):
        print(f"config changed since {place}:\n{changed}")
    devices = devices or jax.devices()
    mesh = sharding.make_mesh(math.gcd(config.fsdp, len(devices)), devices)
    model = build.make_model(config, mesh)
    count = jax.ShapeDtypeStruct((), np.int32, sharding=sharding.replicated(mesh))
    abstract_state = TrainState(count, model.params, model.model_state, opt_state=None)
    if config.ema_decay:
        averages = {"params": model.params, "model_state": model.model_state}
        abstract_state = TrainState(count, None, None, opt_state=None, ema=averages)
    state = checkpoint.restore(directory, number, abstract_state)
    return model, TrainState(state.step, *state.weights, opt_state=None), run["class_names"]


def evaluate_checkpoint(
    config: ConfigDict, workdir: str | Path, step: str = "newest", out: Path | None = None
) -> dict[str, float]:
    """Evaluates a checkpoint of a run, possibly on other data, and prints the results.

    `step` is 'newest', 'best' or a number. `out`, if set, is an existing folder for per-class
    results; see `write_by_class`. Raises `InputError` if there is no such checkpoint, if it does
    not fit the config, or if the data cannot be used or have different classes.
    """
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
    """Classifies image files with the model of a checkpoint.

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
        devices = jax.local_devices()[:1]
        model, state, self.class_names = restore_model(config, workdir, devices, step)
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
          InputError: A file is missing or cannot be decoded, or `files` is a single path or empty.
        """
        paths = [] if isinstance(files, str | os.PathLike) else list(files)
        fits = paths and all(isinstance(path, str | os.PathLike) for path in paths)
        require("files", files, "a list of one or more paths, such as [path]", fits)
        records = [{"image": path, "label": 0} for path in paths]
        data = self.config.data
        names = self.class_names
        dataset = Dataset.from_records("argument", {"files": records}, names, data.channels)
        source = dataset.split("files")
        loader = HostLoader(source, self._mesh, CenterCrop(data.image_size, data.crop_fraction))
        size = 2 ** (len(paths) - 1).bit_length()  # few sizes: each compiles its own program
        batches = loader.eval_batches(batch_size=min(size, BATCH_SIZE))
        logits = [self._logits(self._weights, batch["image"]) for batch in batches]
        return np.concatenate(jax.device_get(logits))[: len(paths)]
