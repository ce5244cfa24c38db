"""Restores the model of a run and evaluates it on every example of a split."""

import math
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from etils import epy
from ml_collections import ConfigDict

from structinit_jax.errors import InputError
from structinit_jax.files import open_path
from structinit_jax.training import build, checkpoint, sharding
from structinit_jax.training import workdir as workdir_lib
from structinit_jax.training.state import AbstractModel, TrainState
from structinit_jax.training.step import make_evaluator

with epy.lazy_imports():  # imports matplotlib
    from structinit_jax.training import figures


def restore_model(
    config: ConfigDict,
    workdir: str | Path,
    devices: list[jax.Device] | None = None,
    step: str | int = "newest",
    must_stay: Callable[[str], bool] = workdir_lib.decides_weights,
) -> tuple[AbstractModel, TrainState]:
    """Restores the model of a run, without optimizer state, at step 'newest', 'best' or a number.

    With `config.ema_decay`, its weights are the averages that the run has kept.

    The number of devices, by default all, and `config.batch_size` may differ from those in
    training. As there, `config.fsdp` devices share one copy of the weights, or as many as divide
    both it and their number. Raises `InputError` if there is no such checkpoint, or if the config
    does not fit it or differs in a field that `must_stay`; see `training.workdir`.
    """
    directory = open_path(workdir) / "checkpoints"
    number = checkpoint.find_step(directory, step)
    if number is None:
        raise InputError(f"workdir={workdir} has no complete checkpoint for step={step}")
    saved = checkpoint.read_run(directory, number)["config"]
    place = f"step {number} in {workdir}"
    if changed := workdir_lib.check_config(saved, config, must_stay, place):
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
    return model, TrainState(state.step, *state.weights, opt_state=None)


def class_names(workdir: str | Path, state: TrainState) -> list[str]:
    """Returns the names of the classes that a restored state was trained on, by label."""
    run = checkpoint.read_run(open_path(workdir) / "checkpoints", int(state.step))
    return run["class_names"]


def evaluate_checkpoint(
    config: ConfigDict, workdir: str | Path, step: str = "newest", out: Path | None = None
) -> dict[str, float]:
    """Evaluates a checkpoint of a run, possibly on other data, and prints the results.

    `step` is 'newest', 'best' or a number. If `out` is set, the results by class are written to
    this existing folder, see `figures.write_by_class`. Raises `InputError` if there is no such
    checkpoint, if it does not fit the config, or if the data cannot be used or have other classes.
    """
    dataset = build.open_data(config)
    model, state = restore_model(config, workdir, step=step)
    names = dataset.class_names
    pairs = zip(class_names(workdir, state), names, strict=True)
    if renamed := [f"  {old!r} -> {new!r}" for old, new in pairs if old != new]:
        raise InputError("\n".join(["classes must be named as in training:", *renamed]))
    source = build.open_split(config, dataset, "eval_split")
    evaluation = make_evaluator(config, model, source)(state)
    name = f"{dataset.name} {config.data.eval_split}"
    print(f"step {state.step}  {evaluation} on {len(source):,} examples of {name}")
    if out and jax.process_index() == 0:
        path = figures.write_by_class(out, evaluation.labels, evaluation.predicted, names)
        print(f"wrote {path}")
    return evaluation.metrics
