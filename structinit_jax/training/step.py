"""The training step and the evaluation step, as pure functions to be jitted once each."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Integer
from ml_collections import ConfigDict

from structinit_jax.training import nonfinite
from structinit_jax.training.state import TrainState, split_model

Batch = dict[str, Array]
Metrics = dict[str, Float[Array, ""]]


def normalize(
    images: Integer[Array, "B H W C"], mean: tuple[float, ...], std: tuple[float, ...]
) -> Float[Array, "B H W C"]:
    """Turns uint8 pixels into (pixel / 255 - mean) / std, per channel."""
    mean, std = (jnp.asarray(x, jnp.float32)[None, None, None, :] for x in (mean, std))
    return (images.astype(jnp.float32) / 255 - mean) / std


def cross_entropy(
    logits: Float[Array, "B classes"], labels: Integer[Array, " B"], smoothing: float
) -> Float[Array, " B"]:
    """Softmax cross-entropy against labels mixed with `smoothing` of the uniform distribution."""
    targets = optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1]), smoothing)
    return optax.softmax_cross_entropy(logits, targets)


def make_train_step(
    config: ConfigDict,
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Builds `(state, batch) -> (state, metrics)`; all randomness comes from (seed, step)."""

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.key(config.seed), state.step)

        def loss_fn(params):
            images = normalize(batch["image"], config.data.mean, config.data.std)
            model = nnx.merge(graphdef, params, state.model_state)
            logits, _ = model(images, key=key)
            losses = cross_entropy(logits, batch["label"], config.label_smoothing)
            return losses.mean(), (logits, split_model(model)[2])

        value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, (logits, model_state)), grads = value_and_grad(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {
            "loss": loss,
            "accuracy": jnp.mean(logits.argmax(-1) == batch["label"]),
            "learning_rate": jnp.asarray(schedule(state.step)),
            "gradient_norm": optax.tree.norm(grads),
        }
        finite = jnp.isfinite(loss) & jnp.isfinite(metrics["gradient_norm"])
        metrics["nonfinite"] = 1.0 - finite.astype(jnp.float32)
        new_state = TrainState(state.step + 1, params, model_state, opt_state)
        return nonfinite.apply_if(finite, new_state, state), metrics

    return train_step


def make_eval_step(
    config: ConfigDict, graphdef: nnx.GraphDef
) -> Callable[[dict, dict, Batch], Metrics]:
    """Builds `(params, model_state, batch) -> sums` over the examples whose mask is 1.

    The sums are loss, correct and count.
    """

    def eval_step(params: dict, model_state: dict, batch: Batch) -> Metrics:
        images = normalize(batch["image"], config.data.mean, config.data.std)
        logits, _ = nnx.merge(graphdef, params, model_state)(images)
        losses = cross_entropy(logits, batch["label"], smoothing=0.0)
        correct = logits.argmax(-1) == batch["label"]
        mask = batch["mask"]
        return {
            "loss": jnp.sum(losses * mask),
            "correct": jnp.sum(correct * mask),
            "count": jnp.sum(mask),
        }

    return eval_step
