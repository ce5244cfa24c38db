"""Schedule, loss and optimizer.

A new loss or optimizer is a function and an entry in `LOSSES` or `OPTIMIZERS`. `config.loss` and
`config.optimizer` also take your own function as `my_module:my_function`. An optimizer is called
with the schedule as `learning_rate`, and with the fields of the config that its parameters name.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from structinit_jax.errors import InputError, find


class Schedule(NamedTuple):
    """Steps of a run."""

    num_steps: int
    steps_per_epoch: float  # fractional if batches continue across the end of an epoch
    eval_steps: frozenset[int]  # after which the model is evaluated; includes the last step
    learning_rate: optax.Schedule  # of a step, counted from 0


def make_schedule(
    num_examples: int, fields: Mapping[str, Any], *, drop_remainder: bool
) -> Schedule:
    """Converts the epochs of a config to steps, for a training split of `num_examples`.

    `fields` are the fields of the config, of which the schedule gets those that its parameters
    name. With `drop_remainder`, each epoch leaves out its last partial batch. Raises `InputError`
    if this leaves no batch.
    """
    batch_size = fields["batch_size"]
    num_epochs = fields["num_epochs"]
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
    length = {"num_steps": num_steps, "num_epochs": num_epochs, "num_examples": num_examples}
    learning_rate = _call(SCHEDULES[fields["schedule"]], {**fields, **length})
    return Schedule(num_steps, steps_per_epoch, eval_steps, learning_rate)


def cosine(
    *,
    num_steps: int,
    num_examples: int,
    batch_size: int,
    learning_rate: float,
    warmup_epochs: float,
    warmup_learning_rate: float,
    final_learning_rate: float,
    cooldown_epochs: float,
) -> optax.Schedule:
    """Linear warm-up, then a cosine over the rest of the run, both by step.

    The learning rate rises from `warmup_learning_rate` to `learning_rate`, falls to
    `final_learning_rate` and stays there for `cooldown_epochs`. A warm-up that is longer than the
    rest of the run is shortened.
    """
    steps_per_epoch = num_examples / batch_size
    cosine_end = max(1, num_steps - round(cooldown_epochs * steps_per_epoch))
    warmup_steps = min(round(warmup_epochs * steps_per_epoch), cosine_end - 1)
    return optax.warmup_cosine_decay_schedule(
        init_value=warmup_learning_rate if warmup_steps else learning_rate,
        peak_value=learning_rate,
        warmup_steps=warmup_steps,
        decay_steps=cosine_end,
        end_value=min(final_learning_rate, learning_rate),
    )


def timm_cosine(
    *,
    num_steps: int,
    num_epochs: float,
    num_examples: int,
    batch_size: int,
    learning_rate: float,
    warmup_epochs: float,
    warmup_learning_rate: float,
    final_learning_rate: float,
    cooldown_epochs: float,
) -> optax.Schedule:
    """The schedule of timm's train.py, which changes the learning rate once per epoch.

    In epoch e (from 0) it is linear in e during the warm-up, so the whole first epoch runs at
    `warmup_learning_rate`, which should not be 0. Then it continues a cosine that began at epoch 0,
    not at the end of the warm-up, and reaches `final_learning_rate` when the `cooldown_epochs`
    begin. A step that straddles two epochs belongs to the one of its first example.
    """
    cosine_epochs = num_epochs - cooldown_epochs

    def epoch_rate(epoch):
        if epoch < warmup_epochs:
            rise = (learning_rate - warmup_learning_rate) * epoch / warmup_epochs
            return warmup_learning_rate + rise
        if epoch < cosine_epochs:
            share = (1 + math.cos(math.pi * epoch / cosine_epochs)) / 2
            return final_learning_rate + (learning_rate - final_learning_rate) * share
        return final_learning_rate

    epochs = range(math.ceil(num_steps * batch_size / num_examples))
    rates = np.array([epoch_rate(epoch) for epoch in epochs], np.float32)
    first_steps = np.array([-(-e * num_examples // batch_size) for e in epochs], np.int32)

    def rate(step):
        # Not a binary search, which is a loop of kernels.
        epoch = jnp.searchsorted(first_steps, step, side="right", method="compare_all") - 1
        return jnp.asarray(rates)[epoch]

    return rate


def adamw(
    learning_rate: optax.Schedule,
    *,
    weight_decay: float,
    adam_b2: float,
    adam_epsilon: float,
    clip_norm: float,
) -> optax.GradientTransformation:
    """AdamW (Loshchilov & Hutter 2019) as ViT recipes use it.

    Gradients are clipped by their global norm, and weight decay applies to matrices only. A
    `clip_norm` of 0 disables clipping, but keeps its place in the optimizer state, so that it can
    be enabled on resume.
    """
    return optax.chain(
        optax.clip_by_global_norm(clip_norm) if clip_norm else optax.identity(),
        optax.adamw(
            learning_rate,
            b2=adam_b2,
            eps=adam_epsilon,
            weight_decay=weight_decay,
            mask=decay_mask,
        ),
    )


# schedule(any fields of the config and num_examples) -> (step, counted from 0) -> learning rate
SCHEDULES: Mapping[str, Callable] = {"cosine": cosine, "timm_cosine": timm_cosine}
# loss(logits [B, C], targets [B, C]) -> [B]; targets are probabilities, mixed and smoothed.
LOSSES: Mapping[str, Callable] = {"softmax_cross_entropy": optax.softmax_cross_entropy}
# optimizer(learning_rate schedule, any fields of the config) -> optax.GradientTransformation
# These see stacked blocks as they are, so that updates must not depend on the shapes of arrays.
OPTIMIZERS: Mapping[str, Callable] = {"adamw": adamw}


def make_optimizer(
    name: str, learning_rate: optax.Schedule, fields: Mapping[str, Any], stacks: Sequence[str]
) -> optax.GradientTransformation:
    """Returns the optimizer that `config.optimizer` names, or raises `InputError`.

    The optimizer gets the fields of the config that its parameters name. One that is not in
    `OPTIMIZERS` sees the model's `stacks` as lists of layers.
    """
    build = find(name, OPTIMIZERS, "config.optimizer")
    optimizer = _call(build, fields, learning_rate=learning_rate)
    return optimizer if name in OPTIMIZERS else by_layer(optimizer, stacks)


def by_layer(
    optimizer: optax.GradientTransformation, stacks: Sequence[str]
) -> optax.GradientTransformation:
    """Shows an optimizer each of the model's stacks as a list of layers.

    Optimizers such as Muon, LAMB and Adafactor take an array for the weights of a single layer.
    They are not mapped over the layer axis, since others compute norms over all parameters.
    """

    def split(stack):
        leaves, structure = jax.tree.flatten(stack)
        return [structure.unflatten(layer) for layer in zip(*map(jnp.unstack, leaves), strict=True)]

    def join(layers):
        return jax.tree.map(lambda *arrays: jnp.stack(arrays), *layers)

    def change(function, tree, path=()):
        """Applies a function to the stacks in a tree of parameters."""
        if "/".join(path) in stacks:
            return function(tree)
        if not isinstance(tree, Mapping):
            return tree
        return {name: change(function, part, (*path, name)) for name, part in tree.items()}

    def init(params):
        return optimizer.init(change(split, params))

    def update(updates, state, params=None):
        arguments = change(split, updates), state, change(split, params)
        updates, state = optimizer.update(*arguments)
        return change(join, updates), state

    return optax.GradientTransformation(init, update)


def _call(build: Callable, fields: Mapping[str, Any], **arguments) -> Any:
    """Calls a function with the fields that its parameters name, and with further arguments."""
    names = inspect.signature(build).parameters.keys() & fields.keys()
    return build(**{name: fields[name] for name in names} | arguments)


def decay_mask(params: Any) -> Any:
    """Marks the weights that weight decay applies to: kernels, not biases, norms or positions.

    It goes by name rather than rank, since the biases of stacked layers have two axes.
    """

    def is_kernel(path, _):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return name.removesuffix("/value").split("/")[-1] == "kernel"  # `value` is of an nnx.State

    return jax.tree_util.tree_map_with_path(is_kernel, params)
