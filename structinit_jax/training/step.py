"""The training step as a pure function, and the evaluation of a state on a split."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import ArrayLike, Int
from ml_collections import ConfigDict

from structinit_jax.augment import normalize
from structinit_jax.data.images import CenterCrop
from structinit_jax.data.loader import Batch, make_loader
from structinit_jax.data.source import ImageSource
from structinit_jax.errors import find
from structinit_jax.rngs import step_rngs
from structinit_jax.training import build, sharding
from structinit_jax.training.state import AbstractModel, TrainState, split_model

Metrics = dict[str, Any]
# loss(logits [B, C], targets [B, C]) -> [B]; targets are probabilities, mixed and smoothed.
LOSSES: Mapping[str, Callable] = {"softmax_cross_entropy": optax.softmax_cross_entropy}
# Steps dispatched ahead of the devices: enough to keep them busy, with few batches in memory.
MAX_IN_FLIGHT = 2


# -- training --------------------------------------------------------------------------------------


def make_train_step(
    config: ConfigDict,
    model: AbstractModel,
    optimizer: optax.GradientTransformation,
    learning_rate: optax.Schedule,
) -> Callable[[TrainState, Batch, ArrayLike], tuple[TrainState, Metrics]]:
    """Builds the training step, `(state, batch, seed) -> (state, metrics)`.

    The seed is an argument, so that runs that differ only in it share one compiled program.

    The metrics are 'loss', 'accuracy' (unless images are mixed, since these have two classes),
    'learning_rate', 'gradient_norm' and 'finite': whether the new state has no NaN or infinity. The
    schedule `learning_rate` is only for the metrics; the optimizer has its own. Gradients and new
    weights stay sharded over the mesh.
    """
    mesh = model.mesh
    augment = build.make_augmentation(config, mesh)
    mixes = config.augment.mixup > 0 or config.augment.cutmix > 0
    ema_decay = config.ema_decay
    loss = find(config.loss, LOSSES, "config.loss")
    value_and_grad = _make_value_and_grad(model.graphdef, loss)
    if config.accumulate_steps > 1:
        value_and_grad = _in_parts(value_and_grad, config.accumulate_steps)

    def train_step(state: TrainState, batch: Batch, seed: ArrayLike) -> tuple[TrainState, Metrics]:
        augment_rng, rng = step_rngs(seed, state.step)
        batch = augment(augment_rng, batch["image"], batch["label"])
        params = sharding.gather_outside_stacks(state.params, mesh, model.stacks)
        result = value_and_grad(params, state.model_state, batch, rng)
        (loss, (accuracy, model_state)), grads = result
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {
            "loss": loss,
            **({} if mixes else {"accuracy": accuracy}),
            "learning_rate": jnp.asarray(learning_rate(state.step)),
            "gradient_norm": optax.tree.norm(grads),
            "finite": _is_finite((params, model_state, opt_state)),
        }
        new = {"params": params, "model_state": model_state}
        ema = state.ema and jax.tree.map(partial(_move_average, ema_decay), state.ema, new)
        return TrainState(state.step + 1, params, model_state, opt_state, ema), metrics

    return train_step


def _move_average(decay, average, value):
    if not jnp.issubdtype(value.dtype, jnp.inexact):  # It is a counter.
        return value
    return average + (1 - decay) * (value - average)  # Constant weights stay equal to the bit.


def _make_value_and_grad(graphdef, loss):
    """Returns `(params, model_state, batch, rng) -> ((loss, (accuracy, model_state)), grads)`."""

    def loss_fn(params, model_state, batch, rng):
        images, targets = batch
        model = nnx.merge(graphdef, params, model_state)
        logits, _ = model(images, rng=rng)
        accuracy = jnp.mean(logits.argmax(-1) == targets.argmax(-1))
        # The mean is over examples only, so that JAX refuses the gradient of a loss that wrongly
        # keeps the axis of classes.
        mean_loss = jnp.mean(loss(logits, targets), axis=0)
        return mean_loss, (accuracy, split_model(model)[2])

    return jax.value_and_grad(loss_fn, has_aux=True)


def _in_parts(value_and_grad, num_parts):
    """Accumulates `value_and_grad` over equal parts of a batch, one after another."""

    def split(x):
        # The parts are strided, so that every device keeps an equal share of each.
        return jnp.moveaxis(x.reshape(len(x) // num_parts, num_parts, *x.shape[1:]), 1, 0)

    def accumulate(params, model_state, batch, rng):
        def body(carry, part):
            sums, model_state = carry
            batch, number = part
            (loss, (accuracy, model_state)), grads = value_and_grad(
                params, model_state, batch, jax.random.fold_in(rng, number)
            )
            return (jax.tree.map(jnp.add, sums, (loss, accuracy, grads)), model_state), None

        zeros = (jnp.zeros(()), jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        parts = (jax.tree.map(split, batch), jnp.arange(num_parts))
        (sums, model_state), _ = jax.lax.scan(body, (zeros, model_state), parts)
        loss, accuracy, grads = jax.tree.map(lambda x: x / num_parts, sums)
        return (loss, (accuracy, model_state)), grads

    return accumulate


def _is_finite(tree):
    """Whether all floating-point arrays are finite. The others are counters and random keys."""
    # A sum is finite only if its terms are. Adding arrays of one shape first, such as a weight and
    # its moments, leaves a third of the kernels to compile.
    sums = {}
    for x in jax.tree.leaves(tree):
        if jnp.issubdtype(x.dtype, jnp.inexact):
            sums[x.shape] = sums[x.shape] + x if x.shape in sums else x
    return jnp.isfinite(jnp.stack([jnp.sum(x) for x in sums.values()])).all()


# -- evaluation ------------------------------------------------------------------------------------


class Evaluation(NamedTuple):
    """The results of an evaluation.

    `metrics` has 'eval/loss', the cross-entropy, and 'eval/accuracy'. `labels` and `predicted` are
    the classes of all examples.
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

    The model is on the mesh of the states. Batches have the size of those that training computes at
    once, rounded up to a multiple of the number of devices: any gives the same results.
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
        every = jax.tree.map(lambda *values: np.concatenate(values), *jax.device_get(parts))
        every = {name: values[every["mask"] > 0] for name, values in every.items()}
        metrics = {
            "eval/loss": float(np.mean(every["loss"], dtype=np.float64)),
            "eval/accuracy": float(np.mean(every["predicted"] == every["label"])),
        }
        return Evaluation(metrics, every["label"], every["predicted"])

    return evaluate


def make_eval_step(
    model: AbstractModel, mean: Sequence[float], std: Sequence[float]
) -> Callable[[dict, dict, Batch], Metrics]:
    """Builds the evaluation step, `(params, model_state, batch) -> results`.

    The results are by example: the 'loss', the 'label' and the 'predicted' class, and the 'mask',
    which is 0 for padding. `mean` and `std` are per channel, of pixels scaled to [0, 1].
    """

    def eval_step(params: dict, model_state: dict, batch: Batch) -> Metrics:
        images = normalize(batch["image"], tuple(mean), tuple(std))
        params = sharding.gather_outside_stacks(params, model.mesh, model.stacks)
        logits, _ = nnx.merge(model.graphdef, params, model_state)(images)
        return {
            "loss": optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]),
            "label": batch["label"],
            "predicted": logits.argmax(-1),
            "mask": batch["mask"],
        }

    return eval_step
