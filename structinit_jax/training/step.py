"""The training step as a pure function."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import ArrayLike
from ml_collections import ConfigDict

from structinit_jax.data.loader import Batch
from structinit_jax.errors import find, require, require_function
from structinit_jax.rngs import step_rngs
from structinit_jax.training import build, sharding
from structinit_jax.training.state import AbstractModel, TrainState, split_model

Metrics = dict[str, Any]
# loss(logits [B, C], targets [B, C]) -> [B]; targets are probabilities, mixed and smoothed.
LOSSES: Mapping[str, Callable] = {"softmax_cross_entropy": optax.softmax_cross_entropy}
# Steps dispatched ahead of the devices: enough to keep them busy, with few batches in memory.
MAX_IN_FLIGHT = 2


def make_train_step(
    config: ConfigDict,
    model: AbstractModel,
    optimizer: optax.GradientTransformationExtraArgs,
    learning_rate: optax.Schedule,
) -> Callable[[TrainState, Batch, ArrayLike], tuple[TrainState, Metrics]]:
    """Builds the training step, `(state, batch, seed) -> (state, metrics)`.

    The seed is an argument so that runs with different seeds share one compiled program.

    The metrics are 'loss', 'accuracy' (unless images are mixed, because mixed images have two
    classes), 'learning_rate', 'gradient_norm' and 'finite' (whether the new state has no NaN or
    infinity). The schedule `learning_rate` is only for the metrics; the optimizer has its own.
    Gradients and new weights stay sharded over the mesh.
    """
    mesh = model.mesh
    augment = build.make_augment(config, mesh)
    mixes = config.augment.mixup > 0 or config.augment.cutmix > 0
    ema_decay = config.ema_decay
    loss_function = find(config.loss, LOSSES, "config.loss")
    require_function("config.loss", loss_function, ("logits", "targets"))
    value_and_grad = _make_value_and_grad(model.graphdef, loss_function)
    if config.accumulate_steps > 1:
        value_and_grad = _in_parts(value_and_grad, config.accumulate_steps)

    def train_step(state: TrainState, batch: Batch, seed: ArrayLike) -> tuple[TrainState, Metrics]:
        augment_rng, rng = step_rngs(seed, state.step)
        batch = augment(augment_rng, batch["image"], batch["label"])
        params = sharding.gather_outside_stacks(state.params, mesh, model.stacks)
        result = value_and_grad(params, state.model_state, batch, rng)
        (loss, (accuracy, model_state)), grads = result
        # Some optimizers need the loss, such as `optax.contrib.reduce_on_plateau`.
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params, value=loss)
        params = optax.apply_updates(state.params, updates)
        metrics = {
            "loss": loss,
            **({} if mixes else {"accuracy": accuracy}),
            "learning_rate": jnp.asarray(learning_rate(state.step)),
            "gradient_norm": optax.tree.norm(grads),
            "finite": _is_finite((params, model_state, opt_state)),
        }
        new = {"params": params, "model_state": model_state}
        ema = None
        if state.ema is not None:
            ema = jax.tree.map(partial(_move_average, ema_decay), state.ema, new)
        return TrainState(state.step + 1, params, model_state, opt_state, ema), metrics

    return train_step


def _move_average(decay, average, value):
    if not jnp.issubdtype(value.dtype, jnp.inexact):  # Counters are not averaged.
        return value
    return average + (1 - decay) * (value - average)  # Constant weights stay bit-identical.


def _make_value_and_grad(graphdef, loss):
    """Returns `(params, model_state, batch, rng) -> ((loss, (accuracy, model_state)), grads)`."""

    def loss_fn(params, model_state, batch, rng):
        images, targets = batch
        model = nnx.merge(graphdef, params, model_state)
        out = model(images, rng=rng)
        needs = "(logits, intermediates); without intermediates, return logits, {}"
        is_pair = isinstance(out, tuple) and len(out) == 2
        require("config.model: the result of __call__", type(out), needs, is_pair)
        logits, _ = out
        needs = f"{targets.shape}, one logit per class"
        require("config.model: logits.shape", logits.shape, needs, logits.shape == targets.shape)
        accuracy = jnp.mean(logits.argmax(-1) == targets.argmax(-1))
        losses = loss(logits, targets)
        shape = getattr(losses, "shape", None)
        needs = f"{logits.shape[:1]}, one loss per example"
        require("config.loss(logits, targets).shape", shape, needs, shape == logits.shape[:1])
        return jnp.mean(losses), (accuracy, split_model(model)[2])

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
    # A sum is finite only if all its terms are. Adding arrays of the same shape first, such as a
    # weight and its moments, leaves only a third of the kernels to compile.
    sums = {}
    for x in jax.tree.leaves(tree):
        if jnp.issubdtype(x.dtype, jnp.inexact):
            sums[x.shape] = sums[x.shape] + x if x.shape in sums else x
    return jnp.isfinite(jnp.stack([jnp.sum(x) for x in sums.values()])).all()
