"""Schedule, loss and optimizer.

A new loss or optimizer is a function and an entry in `LOSSES` or `OPTIMIZERS`. `config.loss` and
`config.optimizer` also take your own function as `my_module:my_function`.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from structinit_jax.errors import InputError, is_reference, load_reference


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


def make_schedule(config: ConfigDict, num_examples: int) -> Schedule:
    """Converts the epochs of a config to steps.

    Args:
      config: See `structinit_jax.config.base_config`.
      num_examples: Size of the training split.

    Raises:
      InputError: An epoch has no whole batch.
    """
    if config.data.drop_remainder:
        if num_examples < config.batch_size:
            raise InputError(
                f"config.data.drop_remainder=True leaves no batch of {num_examples:,} training "
                f"examples: set it to False, or lower config.batch_size={config.batch_size}"
            )
        num_examples -= num_examples % config.batch_size
    steps_per_epoch = num_examples / config.batch_size
    num_steps = config.num_steps or max(1, round(config.num_epochs * steps_per_epoch))
    _note_odd_epochs(config, num_steps, steps_per_epoch)
    interval = max(1.0, config.eval_every_epochs * steps_per_epoch)  # one evaluation a step at most
    evaluations = range(1, int(num_steps / interval) + 1)
    eval_steps = frozenset(round(interval * number) for number in evaluations) | {num_steps}
    learning_rate = SCHEDULES[config.schedule](config, num_steps, num_examples)
    return Schedule(num_steps, steps_per_epoch, eval_steps, learning_rate)


def _note_odd_epochs(config, num_steps, steps_per_epoch):
    """Prints a note if a first try of a long recipe is shorter than its warm-up or cool-down."""
    warmup, cooldown = (
        round(epochs * steps_per_epoch) for epochs in (config.warmup_epochs, config.cooldown_epochs)
    )
    if cooldown >= num_steps:
        print(
            f"note: config.cooldown_epochs={config.cooldown_epochs} covers all {num_steps:,} "
            "steps: the run trains at the final learning rate throughout"
        )
    elif warmup >= num_steps - cooldown:
        print(
            f"note: config.warmup_epochs={config.warmup_epochs} covers all {num_steps:,} steps: "
            "the learning rate rises to its peak and does not fall"
        )


def cosine(config: ConfigDict, num_steps: int, num_examples: int) -> optax.Schedule:
    """Linear warm-up, then a cosine over the rest of the run, both by step.

    The learning rate rises from `warmup_learning_rate` to `learning_rate`, falls to
    `final_learning_rate` and stays there for `cooldown_epochs`. A warm-up that is longer than the
    rest of the run is shortened.

    Args:
      config: See `structinit_jax.config.base_config`.
      num_steps: Total number of steps.
      num_examples: Number of examples in an epoch.
    """
    steps_per_epoch = num_examples / config.batch_size
    cosine_end = max(1, num_steps - round(config.cooldown_epochs * steps_per_epoch))
    warmup_steps = min(round(config.warmup_epochs * steps_per_epoch), cosine_end - 1)
    return optax.warmup_cosine_decay_schedule(
        init_value=config.warmup_learning_rate if warmup_steps else config.learning_rate,
        peak_value=config.learning_rate,
        warmup_steps=warmup_steps,
        decay_steps=cosine_end,
        end_value=min(config.final_learning_rate, config.learning_rate),
    )


def timm_cosine(config: ConfigDict, num_steps: int, num_examples: int) -> optax.Schedule:
    """The schedule of timm's train.py, which changes the learning rate once per epoch.

    In epoch e (from 0) it is linear in e during the warm-up, so the whole first epoch runs at
    `warmup_learning_rate`, which should not be 0. Then it continues a cosine that began at epoch 0,
    not at the end of the warm-up, and reaches `final_learning_rate` when the `cooldown_epochs`
    begin. A step that straddles two epochs belongs to the one of its first example. For arguments
    see `cosine`.
    """
    num_epochs = num_steps * config.batch_size / num_examples
    length = (num_epochs if config.num_steps else config.num_epochs) - config.cooldown_epochs
    start, warmup = config.warmup_learning_rate, config.warmup_epochs
    peak, final = config.learning_rate, config.final_learning_rate

    def epoch_rate(epoch):
        if epoch < warmup:
            return start + (peak - start) * epoch / warmup
        if epoch < length:
            return final + (peak - final) * (1 + math.cos(math.pi * epoch / length)) / 2
        return final

    epochs = range(math.ceil(num_epochs))
    rates = np.array([epoch_rate(epoch) for epoch in epochs], np.float32)
    first_steps = np.array([-(-e * num_examples // config.batch_size) for e in epochs], np.int32)

    def learning_rate(step):
        # Not a binary search, which is a loop of kernels.
        epoch = jnp.searchsorted(first_steps, step, side="right", method="compare_all") - 1
        return jnp.asarray(rates)[epoch]

    return learning_rate


def adamw(config: ConfigDict, learning_rate: optax.Schedule) -> optax.GradientTransformation:
    """AdamW (Loshchilov & Hutter 2019) as ViT recipes use it.

    Gradients are clipped by their global norm, weight decay applies to matrices only, and the
    learning rate may decrease from the head to the patch embedding. Disabled features keep their
    place in the optimizer state, so that they can be enabled when a run is resumed.
    """
    clip, decay = config.clip_norm, config.layer_decay

    def scale_layers(updates, params):
        return jax.tree.map(jnp.multiply, updates, layer_rates(params, decay))

    return optax.chain(
        optax.clip_by_global_norm(clip) if clip else optax.identity(),
        optax.adamw(
            learning_rate,
            b2=config.adam_b2,
            eps=config.adam_epsilon,
            weight_decay=config.weight_decay,
            mask=decay_mask,
        ),
        optax.stateless(scale_layers) if decay != 1 else optax.identity(),
    )


# schedule(config, num_steps, num_examples) -> (step, counted from 0) -> learning rate
SCHEDULES: Mapping[str, Callable] = {"cosine": cosine, "timm_cosine": timm_cosine}
# loss(logits [B, C], targets [B, C]) -> [B]; targets are probabilities, mixed and smoothed.
LOSSES: Mapping[str, Callable] = {"softmax_cross_entropy": optax.softmax_cross_entropy}
# optimizer(config, learning_rate_schedule) -> optax.GradientTransformation
OPTIMIZERS: Mapping[str, Callable] = {"adamw": adamw}


def find_loss(name: str) -> Callable:
    """Returns the training loss that `config.loss` names, or raises `InputError`."""
    return _find(LOSSES, name, "loss")


def find_optimizer(name: str) -> Callable:
    """Returns the function that `config.optimizer` names, or raises `InputError`."""
    return _find(OPTIMIZERS, name, "optimizer")


def _find(registry: Mapping[str, Callable], name: str, field: str) -> Callable:
    if is_reference(name):
        return load_reference(name, field)
    if name not in registry:
        raise InputError(
            f"config.{field}={name!r} is unknown: use one of {', '.join(registry)}, or "
            "'module:function' for your own"
        )
    return registry[name]


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
