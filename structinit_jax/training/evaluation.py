"""Evaluates states of a model on every example of a split."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Int
from ml_collections import ConfigDict

from structinit_jax.data.images import CenterCrop
from structinit_jax.data.loader import make_loader
from structinit_jax.data.source import ImageSource
from structinit_jax.training import sharding
from structinit_jax.training.metrics import MAX_IN_FLIGHT
from structinit_jax.training.state import AbstractModel, TrainState
from structinit_jax.training.step import make_eval_step


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
    loader = make_loader(source, mesh, CenterCrop(data.image_size, data.crop_fraction))
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


def describe(results: dict[str, float]) -> str:
    """Formats results, for example 'eval loss 0.0613  eval accuracy 0.9833'."""
    return "  ".join(f"{name.replace('/', ' ')} {value:.4f}" for name, value in results.items())
