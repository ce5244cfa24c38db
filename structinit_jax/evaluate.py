"""Restores the model of a run and evaluates it on every example of a split."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from etils import epy
from jaxtyping import Int
from ml_collections import ConfigDict

from structinit_jax.data.loader import make_loader
from structinit_jax.data.source import ImageSource
from structinit_jax.errors import InputError
from structinit_jax.training import build, checkpoint, resume, sharding
from structinit_jax.training.metrics import MAX_IN_FLIGHT
from structinit_jax.training.state import AbstractModel, TrainState
from structinit_jax.training.step import make_eval_step
from structinit_jax.training.workdir import open_path

with epy.lazy_imports():  # imports matplotlib
    from structinit_jax.training import figures


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
        total = jax.tree.map(lambda *values: np.stack(values), *jax.device_get(parts))
        count = float(total["count"].sum())
        metrics = {
            "eval/loss": float(total["loss"].sum()) / count,
            "eval/accuracy": float(total["correct"].sum()) / count,
        }
        return Evaluation(metrics, total["label"].ravel(), total["predicted"].ravel())

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
        raise InputError(f"workdir={workdir} has no complete checkpoint for step={step}")
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


def class_names(workdir: str | Path, state: TrainState) -> list[str]:
    """Returns the names of the classes that a restored state was trained on, by label."""
    run = checkpoint.read_run(open_path(workdir) / "checkpoints", int(state.step))
    return run["class_names"]


def evaluate_checkpoint(
    config: ConfigDict, workdir: str | Path, step: str = "newest", out: Path | None = None
) -> dict[str, float]:
    """Evaluates a checkpoint of a run, possibly on other data, and prints the results.

    `step` is 'newest', 'best' or a number. If `out` is set, the results by class are written to
    this folder, see `figures.write_by_class`. Raises `InputError` if there is no such checkpoint,
    if it does not fit the config, or if the data cannot be used or have other classes.
    """
    dataset = build.open_data(config)
    model, state = restore_model(config, workdir, step=step)
    names = dataset.class_names
    pairs = zip(class_names(workdir, state), names, strict=True)
    if renamed := [f"  {old!r} -> {new!r}" for old, new in pairs if old != new]:
        raise InputError("\n".join(["classes must be named as in training:", *renamed]))
    source = build.open_split(config, dataset, "eval_split")
    evaluation = make_evaluator(config, model, source)(state)
    results = describe(evaluation.metrics)
    name = f"{dataset.name} {config.data.eval_split}"
    print(f"step {state.step}  {results} on {len(source):,} examples of {name}")
    if out and jax.process_index() == 0:
        files = figures.write_by_class(out, evaluation.labels, evaluation.predicted, names)
        print(f"wrote {', '.join(files)} to {out}")
    return evaluation.metrics


def describe(results: dict[str, float]) -> str:
    """Formats results, for example 'eval loss 0.0613  eval accuracy 0.9833'."""
    return "  ".join(f"{name.replace('/', ' ')} {value:.4f}" for name, value in results.items())
