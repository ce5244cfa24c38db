"""The parameters of any model as one dict from names to arrays."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from structinit_jax.errors import InputError

Leaves = dict[str, Any]


def flatten(params: Any) -> tuple[Leaves, Callable[[Leaves], Any]]:
    """Flattens a state dict, Linen tree, NNX module or NNX state.

    Returns:
      The leaves by name, with dots between the levels ('blocks.0.attn.qkv.weight'), and the
      function that rebuilds `params` from such a dict.
    """
    if isinstance(params, nnx.Module):
        graphdef, state = nnx.split(params)
        leaves, rebuild = flatten(state)
        return leaves, lambda new: nnx.merge(graphdef, rebuild(new))
    flat, treedef = jax.tree_util.tree_flatten_with_path(params)
    leaves = {_name(path): leaf for path, leaf in flat}
    return leaves, lambda new: jax.tree_util.tree_unflatten(treedef, new.values())


def check_array(argument: str, name: str, leaf: Any) -> None:
    """Raises `InputError` for anything but a NumPy or JAX array, such as a torch tensor."""
    if not isinstance(leaf, np.ndarray | jax.Array):
        raise InputError(
            f"{argument}: {name} is a {type(leaf).__module__}.{type(leaf).__name__}, not a NumPy "
            "or JAX array: convert torch tensors with {k: v.numpy() for k, v in state_dict.items()}"
        )


def like(new: Any, old: np.ndarray | jax.Array) -> np.ndarray | jax.Array:
    """Converts new values to the array kind (NumPy or JAX), dtype and sharding of the old ones."""
    if isinstance(old, np.ndarray):
        return np.array(new, old.dtype, order="C")
    new = jnp.asarray(new).astype(old.dtype)
    if isinstance(old, jax.core.Tracer) or not old.committed:
        return new
    return jax.device_put(new, old.sharding)


def _name(path) -> str:
    # The box around an array (nnx.Variable, nn.Partitioned) adds a last attribute `value`.
    if path and isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name == "value":
        path = path[:-1]
    return jax.tree_util.keystr(path, simple=True, separator=".").replace("/", ".")
