"""Evaluates a training state on a split."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from etils import epath
from flax import nnx
from jaxtyping import Int
from ml_collections import ConfigDict

from structinit_jax.augment import normalize
from structinit_jax.data.images import CenterCrop
from structinit_jax.data.loader import Batch, make_loader
from structinit_jax.data.source import ImageSource
from structinit_jax.errors import printable
from structinit_jax.files import csv_text, write_atomically
from structinit_jax.training import sharding
from structinit_jax.training.state import AbstractModel, TrainState
from structinit_jax.training.step import MAX_IN_FLIGHT


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
    model: AbstractModel, mean: Sequence[float], std: Sequence[float]
) -> Callable[[dict, dict, Batch], dict[str, Any]]:
    """Builds the evaluation step, `(params, model_state, batch) -> results`.

    The results are per example: 'loss', 'label' and 'predicted' (the class). `mean` and `std` are
    per channel, for pixels scaled to [0, 1].
    """

    def eval_step(params: dict, model_state: dict, batch: Batch) -> dict[str, Any]:
        images = normalize(batch["image"], tuple(mean), tuple(std))
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
