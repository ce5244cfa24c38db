"""What a training run is at one step, as a pytree of arrays."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Int


class TrainState(NamedTuple):
    """All that changes in training. Randomness and data order are functions of (seed, step).

    Attributes:
      step: optimizer steps taken.
      params: the model's trained parameters as a nested dict of float32 arrays.
      model_state: what the model holds besides, in the same form: BatchNorm's running statistics,
        which the forward pass moves, and fixed weights. Empty for a ViT.
      opt_state: the optimizer's state.
      ema: exponential moving averages under 'params' and 'model_state', BatchNorm's statistics
        among them as in timm's ModelEmaV2 and V3; empty where the config asks for none.
    """

    step: Int[Array, ""]
    params: dict[str, Any]
    model_state: dict[str, Any]
    opt_state: optax.OptState
    ema: dict[str, Any]


def split_model(model: nnx.Module) -> tuple[nnx.GraphDef, dict[str, Any], dict[str, Any]]:
    """A model as its static definition, its parameters and the state that is not trained.

    `nnx.merge(graphdef, params, model_state)` puts them together.
    """
    graphdef, params, model_state = nnx.split(model, nnx.Param, ...)
    return graphdef, nnx.to_pure_dict(params), nnx.to_pure_dict(model_state)


def init_state(
    params: dict[str, Any],
    model_state: dict[str, Any],
    optimizer: optax.GradientTransformation,
    *,
    with_ema: bool = False,
) -> TrainState:
    """The state before the first step."""
    ema = {}
    if with_ema:
        ema = jax.tree.map(jnp.copy, {"params": params, "model_state": model_state})
    return TrainState(jnp.zeros((), jnp.int32), params, model_state, optimizer.init(params), ema)


def count_parameters(params) -> int:
    """Elements of all arrays of a tree."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
