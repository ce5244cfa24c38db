"""Learning rate schedules and optimizers."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax


class Schedule(NamedTuple):
    """The number of steps in a run, its evaluation steps and its learning rates."""

    num_steps: int
    steps_per_epoch: float  # fractional if a batch can span two epochs
    eval_steps: frozenset[int]  # after which the model is evaluated; includes the last step
    learning_rate: optax.Schedule  # by step, counted from 0


def cosine(
    *,
    num_steps: int,
    steps_per_epoch: float,
    learning_rate: float,
    warmup_epochs: float,
    warmup_learning_rate: float,
    final_learning_rate: float,
    cooldown_epochs: float,
) -> optax.Schedule:
    """Linear warm-up, then cosine decay over the rest of the run, both per step.

    The learning rate rises from `warmup_learning_rate` to `learning_rate`, falls to
    `final_learning_rate` and stays there for `cooldown_epochs`. The warm-up is shortened if it
    would not end before the cooldown.
    """
    cosine_end = max(1, num_steps - round(cooldown_epochs * steps_per_epoch))
    warmup_steps = min(round(warmup_epochs * steps_per_epoch), cosine_end - 1)
    return optax.warmup_cosine_decay_schedule(
        init_value=warmup_learning_rate,
        peak_value=learning_rate,
        warmup_steps=warmup_steps,
        decay_steps=cosine_end,
        end_value=final_learning_rate,
    )


def timm_cosine(
    *,
    num_epochs: float,
    num_steps: int,
    num_examples: int,
    batch_size: int,
    learning_rate: float,
    warmup_epochs: float,
    warmup_learning_rate: float,
    final_learning_rate: float,
    cooldown_epochs: float,
) -> optax.Schedule:
    """The schedule of timm's train.py, which changes the learning rate once per epoch.

    During the warm-up, the learning rate is linear in the epoch (counted from 0), so the whole
    first epoch runs at `warmup_learning_rate`, which must not be 0. After that, it follows a
    cosine that began at epoch 0, not at the end of the warm-up, and reaches `final_learning_rate`
    when the `cooldown_epochs` begin. A step that straddles two epochs belongs to the epoch of its
    first example.
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
        # A binary search would be a loop of kernels.
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
    decayed: Any,
) -> optax.GradientTransformationExtraArgs:
    """AdamW (Loshchilov & Hutter 2019) as used in ViT recipes.

    Gradients are clipped by their global norm, and weight decay applies to the parameters that the
    tree `decayed` marks with True. A `clip_norm` of 0 disables clipping; the optimizer state has
    the same structure either way, so clipping can be enabled on resume.

    Unlike custom optimizers (`by_layer`), it sees the layers of a stack in one array. The update is
    the same because, apart from clipping by the global norm, it is elementwise.
    """
    return optax.chain(
        optax.clip_by_global_norm(clip_norm) if clip_norm else optax.identity(),
        optax.adamw(
            learning_rate, b2=adam_b2, eps=adam_epsilon, weight_decay=weight_decay, mask=decayed
        ),
    )


def by_layer(
    optimizer: optax.GradientTransformation, stacks: Sequence[str]
) -> optax.GradientTransformationExtraArgs:
    """Passes each of the model's stacks to an optimizer as a list of layers.

    Optimizers such as Muon, LAMB and Adafactor assume that an array holds the weights of a single
    layer. The optimizer is not vmapped over layers because some compute norms over all parameters.
    """
    optimizer = optax.with_extra_args_support(optimizer)

    def split(stack):
        leaves, structure = jax.tree.flatten(stack)
        return [structure.unflatten(layer) for layer in zip(*map(jnp.unstack, leaves), strict=True)]

    def join(layers):
        return jax.tree.map(lambda *arrays: jnp.stack(arrays), *layers)

    def change(function, tree, path=()):
        """Applies a function to the stacks in a tree of parameters."""
        if "/".join(map(str, path)) in stacks:
            return function(tree)
        if not isinstance(tree, Mapping):
            return tree
        return {name: change(function, part, (*path, name)) for name, part in tree.items()}

    def init(params):
        return optimizer.init(change(split, params))

    def update(updates, state, params=None, **extra):
        arguments = change(split, updates), state, change(split, params)
        updates, state = optimizer.update(*arguments, **extra)
        return change(join, updates), state

    return optax.GradientTransformationExtraArgs(init, update)
