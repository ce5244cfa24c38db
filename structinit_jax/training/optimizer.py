"""AdamW as ViT recipes use it: clipped gradients, decay on matrices only, layer-wise rates."""

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from structinit_jax.errors import InputError

HEAD = ("norm", "head")  # behind the blocks


def decay_mask(params) -> dict:
    """True where weight decay applies: on kernels, not on biases, norms, positions, class token.

    Told by name and not by rank, since stacked layers give biases two axes.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, _: jax.tree_util.keystr(path[-1:], simple=True) == "kernel", params
    )


def layer_rates(params, decay: float) -> dict:
    """Each weight's factor on the learning rate: 1 behind the blocks, `decay` less for each before.

    With L blocks, block i (from 1) has decay^(L + 1 - i) and what comes before them decay^(L + 1)
    (Clark et al. 2020; Bao et al. 2022). Factors of stacked blocks vary along their leading axis.

    Raises:
      InputError: if the model's blocks are no one stack.
    """
    if "blocks" not in params:
        raise InputError(
            f"layer_decay={decay}: the model has no stack 'blocks' whose layers could be counted; "
            "set layer_decay=1"
        )
    depth = len(jax.tree.leaves(params["blocks"])[0])

    def rate(path, leaf):
        part = path[0].key
        if part == "blocks":
            rates = decay ** jnp.arange(depth, 0, -1, dtype=jnp.float32)
            return rates.reshape(depth, *(1,) * (leaf.ndim - 1))
        return jnp.full((1,) * leaf.ndim, 1.0 if part in HEAD else decay ** (depth + 1))

    return jax.tree_util.tree_map_with_path(rate, params)


def make_optimizer(config: ConfigDict, schedule: optax.Schedule) -> optax.GradientTransformation:
    """AdamW (Loshchilov & Hutter 2019) behind clipping by global norm.

    What is off keeps its place, so that a run can go on with it on: the state's form stays.
    """
    clip, by_layer = config.clip_norm, config.layer_decay
    return optax.chain(
        optax.clip_by_global_norm(clip) if clip else optax.identity(),
        optax.adamw(
            schedule,
            b2=config.adam_b2,
            eps=config.adam_epsilon,
            weight_decay=config.weight_decay,
            mask=decay_mask,
        ),
        _scale_by_layer(by_layer) if by_layer != 1 else optax.identity(),
    )


def _scale_by_layer(decay: float) -> optax.GradientTransformation:
    def scale(updates, params):
        return jax.tree.map(lambda u, r: u * r, updates, layer_rates(params, decay))

    return optax.stateless(scale)
