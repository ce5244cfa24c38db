"""Schedule, loss and optimizer.

A new loss or optimizer is a function and an entry in `LOSSES` or `OPTIMIZERS`. `config.loss` and
`config.optimizer` also take your own function as `my_module:my_function`. An optimizer is called
with the schedule as `learning_rate`, and with the fields of the config that its parameters name.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from structinit_jax.errors import InputError, find


class Schedule(NamedTuple):
    """Steps of a run.

    Attributes:
      num_steps: Total number of optimizer steps.
      steps_per_epoch: Fractional if batches continue across the end of an epoch.
      eval_steps: Steps after which the model is evaluated. The last step is among them.
      learning_rate: Learning rate at each step, counted from 0.
    """

    num_steps: int
    steps_per_epoch: float
    eval_steps: frozenset[int]
    learning_rate: optax.Schedule


class Length(NamedTuple):
    """Length of a run. `num_epochs` is as in the config, from which `num_steps` is rounded."""

    num_steps: int
    num_epochs: float
    num_examples: int
    batch_size: int


class Rates(NamedTuple):
    """Fields of the config that shape the learning rate."""

    learning_rate: float
    warmup_epochs: float
    warmup_learning_rate: float
    final_learning_rate: float
    cooldown_epochs: float


def make_schedule(
    num_examples: int, fields: Mapping[str, Any], *, drop_remainder: bool
) -> Schedule:
    """Converts the epochs of a config to steps.

    Args:
      num_examples: Size of the training split.
      fields: Fields of the config, among them those of `Rates`.
      drop_remainder: Whether each epoch leaves out its last partial batch.

    Raises:
      InputError: An epoch has no whole batch.
    """
    batch_size, num_epochs = fields["batch_size"], fields["num_epochs"]
    if drop_remainder:
        if num_examples < batch_size:
            raise InputError(
                f"config.data.drop_remainder=True leaves no batch of {num_examples:,} training "
                f"examples: set it to False, or lower config.batch_size={batch_size}"
            )
        num_examples -= num_examples % batch_size
    steps_per_epoch = num_examples / batch_size
    if num_steps := fields["num_steps"]:
        num_epochs = num_steps * batch_size / num_examples
    else:
        num_steps = max(1, round(num_epochs * steps_per_epoch))
    # One evaluation a step at most.
    interval = max(1.0, fields["eval_every_epochs"] * steps_per_epoch)
    evaluations = range(1, int(num_steps / interval) + 1)
    eval_steps = frozenset(round(interval * number) for number in evaluations) | {num_steps}
    length = Length(num_steps, num_epochs, num_examples, batch_size)
    rates = Rates(**{name: fields[name] for name in Rates._fields})
    learning_rate = SCHEDULES[fields["schedule"]](length, rates)
    return Schedule(num_steps, steps_per_epoch, eval_steps, learning_rate)


def cosine(length: Length, rates: Rates) -> optax.Schedule:
    """Linear warm-up, then a cosine over the rest of the run, both by step.

    The learning rate rises from `warmup_learning_rate` to `learning_rate`, falls to
    `final_learning_rate` and stays there for `cooldown_epochs`. A warm-up that is longer than the
    rest of the run is shortened.
    """
    steps_per_epoch = length.num_examples / length.batch_size
    cosine_end = max(1, length.num_steps - round(rates.cooldown_epochs * steps_per_epoch))
    warmup_steps = min(round(rates.warmup_epochs * steps_per_epoch), cosine_end - 1)
    return optax.warmup_cosine_decay_schedule(
        init_value=rates.warmup_learning_rate if warmup_steps else rates.learning_rate,
        peak_value=rates.learning_rate,
        warmup_steps=warmup_steps,
        decay_steps=cosine_end,
        end_value=min(rates.final_learning_rate, rates.learning_rate),
    )


def timm_cosine(length: Length, rates: Rates) -> optax.Schedule:
    """The schedule of timm's train.py, which changes the learning rate once per epoch.

    In epoch e (from 0) it is linear in e during the warm-up, so the whole first epoch runs at
    `warmup_learning_rate`, which should not be 0. Then it continues a cosine that began at epoch 0,
    not at the end of the warm-up, and reaches `final_learning_rate` when the `cooldown_epochs`
    begin. A step that straddles two epochs belongs to the one of its first example.
    """
    peak, warmup, start, final, cooldown = rates
    cosine_epochs = length.num_epochs - cooldown

    def epoch_rate(epoch):
        if epoch < warmup:
            return start + (peak - start) * epoch / warmup
        if epoch < cosine_epochs:
            return final + (peak - final) * (1 + math.cos(math.pi * epoch / cosine_epochs)) / 2
        return final

    num_steps, _, num_examples, batch_size = length
    epochs = range(math.ceil(num_steps * batch_size / num_examples))
    rates = np.array([epoch_rate(epoch) for epoch in epochs], np.float32)
    first_steps = np.array([-(-e * num_examples // batch_size) for e in epochs], np.int32)

    def learning_rate(step):
        # Not a binary search, which is a loop of kernels.
        epoch = jnp.searchsorted(first_steps, step, side="right", method="compare_all") - 1
        return jnp.asarray(rates)[epoch]

    return learning_rate


def adamw(
    learning_rate: optax.Schedule,
    *,
    weight_decay: float,
    adam_b2: float,
    adam_epsilon: float,
    clip_norm: float,
    layer_decay: float,
) -> optax.GradientTransformation:
    """AdamW (Loshchilov & Hutter 2019) as ViT recipes use it.

    Gradients are clipped by their global norm, weight decay applies to matrices only, and the
    learning rate may decrease from the head to the patch embedding. Disabled features keep their
    place in the optimizer state, so that they can be enabled when a run is resumed.
    """

    def scale_layers(updates, params):
        return jax.tree.map(jnp.multiply, updates, layer_rates(params, layer_decay))

    return optax.chain(
        optax.clip_by_global_norm(clip_norm) if clip_norm else optax.identity(),
        optax.adamw(
            learning_rate,
            b2=adam_b2,
            eps=adam_epsilon,
            weight_decay=weight_decay,
            mask=decay_mask,
        ),
        optax.stateless(scale_layers) if layer_decay != 1 else optax.identity(),
    )


# schedule(length, rates) -> (step, counted from 0) -> learning rate
SCHEDULES: Mapping[str, Callable] = {"cosine": cosine, "timm_cosine": timm_cosine}
# loss(logits [B, C], targets [B, C]) -> [B]; targets are probabilities, mixed and smoothed.
LOSSES: Mapping[str, Callable] = {"softmax_cross_entropy": optax.softmax_cross_entropy}
# optimizer(learning_rate schedule, any fields of the config) -> optax.GradientTransformation
OPTIMIZERS: Mapping[str, Callable] = {"adamw": adamw}


def find_loss(name: str) -> Callable:
    """Returns the training loss that `config.loss` names, or raises `InputError`."""
    return find(name, LOSSES, "loss")


def make_optimizer(
    name: str, learning_rate: optax.Schedule, fields: Mapping[str, Any]
) -> optax.GradientTransformation:
    """Returns the optimizer that `config.optimizer` names, or raises `InputError`.

    Args:
      name: The name, or your own as 'module:function'.
      learning_rate: Schedule of the learning rate.
      fields: Fields of the config, of which the optimizer gets those that its parameters name.
    """
    build = find(name, OPTIMIZERS, "optimizer")
    parameters = inspect.signature(build).parameters
    options = {key: fields[key] for key in parameters if key in fields}
    return build(**options | {"learning_rate": learning_rate})


def decay_mask(params: Any) -> Any:
    """Marks the weights that weight decay applies to: kernels, not biases, norms or positions.

    Goes by name rather than rank, since the biases of stacked layers have two axes.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, _: jax.tree_util.keystr(path[-1:], simple=True) == "kernel", params
    )


def layer_rates(params: Any, decay: float) -> Any:
    """Returns the factor on the learning rate of every weight (Clark et al. 2020; Bao et al. 2022).

    With L blocks, block i (from 1) has the factor decay^(L + 1 - i), everything before the blocks
    decay^(L + 1), and everything after them 1. The factors of stacked blocks vary along their
    leading axis.

    Raises:
      InputError: The model does not have a single stack of blocks.
    """
    if "blocks" not in params:
        raise InputError(
            f"config.layer_decay={decay} needs a model with a single stack of blocks: set it to 1"
        )
    depth = len(jax.tree.leaves(params["blocks"])[0])

    def rate(path, leaf):
        part = path[0].key
        if part == "blocks":
            rates = decay ** jnp.arange(depth, 0, -1, dtype=jnp.float32)
            return rates.reshape(depth, *(1,) * (leaf.ndim - 1))
        factor = 1.0 if part in ("norm", "head") else decay ** (depth + 1)
        return jnp.full((1,) * leaf.ndim, factor)

    return jax.tree_util.tree_map_with_path(rate, params)
