"""The training step and the evaluation step, as pure functions to be jitted once each."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Sharding
from jaxtyping import Array, Bool, Float, PRNGKeyArray
from ml_collections import ConfigDict

from structinit_jax.augment import Augment, normalize
from structinit_jax.training import nonfinite
from structinit_jax.training.state import TrainState, split_model

Batch = dict[str, Array]
Metrics = dict[str, Float[Array, ""]]


def train_step_rngs(seed: int, step: int | Array) -> tuple[PRNGKeyArray, PRNGKeyArray]:
    """Keys of the step that follows `step` others: of the augmentation, and of the model."""
    augment_key, model_key = jax.random.split(jax.random.fold_in(jax.random.key(seed), step))
    return augment_key, model_key


def make_train_step(
    config: ConfigDict,
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    augment: Augment,
    replicated: Sharding,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Builds `(state, batch) -> (state, metrics)`; all randomness comes from (seed, step).

    Args:
      config: see `structinit_jax.config.base_config`.
      graphdef: the model without its arrays.
      optimizer: turns gradients into updates.
      schedule: its learning rate, to be told.
      augment: what happens to a batch before the model sees it.
      replicated: a whole copy on every device. Weights that the state has split are gathered once a
        step; gradients, optimizer and new weights stay split.
    """

    def loss_fn(params, model_state, batch, key):
        images, targets = batch
        model = nnx.merge(graphdef, params, model_state)
        logits, _ = model(images, rng=key)
        correct = jnp.mean(logits.argmax(-1) == targets.argmax(-1))
        loss = optax.softmax_cross_entropy(logits, targets).mean()
        return loss, (correct, split_model(model)[2])

    value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)

    def accumulate(params, model_state, batch, key):
        """Loss, accuracy and gradient of a batch that is worked off in parts, one after another."""
        parts = config.accumulate_steps

        def split(x):
            # Strided, so that every device keeps an equal share of each part.
            return jnp.moveaxis(x.reshape(len(x) // parts, parts, *x.shape[1:]), 1, 0)

        def body(carry, part):
            sums, model_state = carry
            batch, number = part
            (loss, (correct, model_state)), grads = value_and_grad(
                params, model_state, batch, jax.random.fold_in(key, number)
            )
            return (jax.tree.map(jnp.add, sums, (loss, correct, grads)), model_state), None

        zeros = (jnp.zeros(()), jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        inputs = (jax.tree.map(split, batch), jnp.arange(parts))
        (sums, model_state), _ = jax.lax.scan(body, (zeros, model_state), inputs)
        loss, correct, grads = jax.tree.map(lambda x: x / parts, sums)
        return (loss, (correct, model_state)), grads

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        augment_key, key = train_step_rngs(config.seed, state.step)
        batch = augment(augment_key, batch["image"], batch["label"])
        gradient_of = accumulate if config.accumulate_steps > 1 else value_and_grad
        # Without this XLA would split the images' channels as the weights, and exchange images.
        params = jax.lax.with_sharding_constraint(state.params, replicated)
        (loss, (correct, model_state)), grads = gradient_of(params, state.model_state, batch, key)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        ema = state.ema
        if config.ema_decay:
            new = {"params": params, "model_state": model_state}
            ema = optax.incremental_update(new, ema, 1 - config.ema_decay)
        metrics = {
            "loss": loss,
            "accuracy": correct,
            "learning_rate": jnp.asarray(schedule(state.step)),
            "gradient_norm": optax.tree.norm(grads),
        }
        finite = jnp.isfinite(loss) & jnp.isfinite(metrics["gradient_norm"])
        metrics["nonfinite"] = 1.0 - finite.astype(jnp.float32)
        new_state = TrainState(state.step + 1, params, model_state, opt_state, ema)
        return nonfinite.apply_if(finite, new_state, state), metrics

    return train_step


def make_eval_step(
    config: ConfigDict,
    graphdef: nnx.GraphDef,
    replicated: Sharding,
    classes: np.ndarray | None = None,
    answers: np.ndarray | None = None,
) -> Callable[[dict, dict, Batch], Metrics]:
    """Builds `(params, model_state, batch) -> sums` over the examples whose mask is 1.

    The sums are loss, correct and count. A prediction is correct if it is any of the right classes;
    the loss is minus the logarithm of the probability that these have together.

    Args:
      config: the run's.
      graphdef: the model.
      replicated: as for `make_train_step`.
      classes: that predictions are chosen from, and probabilities spread over; None for all.
      answers: the right classes of each label, int32 [labels, most], filled up with -1; None where
        labels are classes.
    """
    every_class = np.arange(config.model.num_classes)

    def right_classes(labels) -> Bool[Array, "B classes"]:
        rows = labels[:, None] if answers is None else jnp.take(answers, labels, axis=0)
        return jnp.any(rows[:, :, None] == every_class[None, None], axis=1)

    def eval_step(params: dict, model_state: dict, batch: Batch) -> Metrics:
        images = normalize(batch["image"], tuple(config.data.mean), tuple(config.data.std))
        params = jax.lax.with_sharding_constraint(params, replicated)
        logits, _ = nnx.merge(graphdef, params, model_state)(images)
        if classes is not None:
            logits = jnp.where(np.isin(every_class, classes)[None], logits, -jnp.inf)
        right = right_classes(batch["label"])
        losses = jax.nn.logsumexp(logits, axis=-1) - jax.nn.logsumexp(
            jnp.where(right, logits, -jnp.inf), axis=-1
        )
        correct = jnp.take_along_axis(right, logits.argmax(-1)[:, None], axis=1)[:, 0]
        mask = batch["mask"]
        return {
            "loss": jnp.sum(losses * mask),
            "correct": jnp.sum(correct * mask),
            "count": jnp.sum(mask),
        }

    return eval_step
