"""AdamW as ViT recipes use it: clipped gradients, decay on matrices only."""

import jax
import optax
from ml_collections import ConfigDict


def decay_mask(params) -> dict:
    """True where weight decay applies: on kernels, not on biases, norms, positions, class token.

    Told by name and not by rank, since stacked layers give biases two axes.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, _: jax.tree_util.keystr(path[-1:], simple=True) == "kernel", params
    )


def make_optimizer(config: ConfigDict, schedule: optax.Schedule) -> optax.GradientTransformation:
    """AdamW (Loshchilov & Hutter 2019) behind clipping by global norm."""
    adamw = optax.adamw(
        schedule,
        b2=config.adam_b2,
        eps=config.adam_epsilon,
        weight_decay=config.weight_decay,
        mask=decay_mask,
    )
    if not config.clip_norm:
        return adamw
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)
