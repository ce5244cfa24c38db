"""A model's parameters as one dict of paths, whatever tree, state or module they come in."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from structinit_jax.errors import InputError

Leaves = dict[str, Any]


def flatten(params: Any) -> tuple[Leaves, Callable[[Leaves], Any]]:
    """Splits parameters into leaves by path, and the function that puts them together again.

    Paths have slashes, for dots in a state dict's names too: 'blocks/0/attn/qkv/weight'.
    """
    if isinstance(params, nnx.Module):
        graphdef, state = nnx.split(params)
        leaves, rebuild = flatten(state)
        return leaves, lambda new: nnx.merge(graphdef, rebuild(new))
    flat, treedef = jax.tree_util.tree_flatten_with_path(params)
    leaves = {_path(keys): leaf for keys, leaf in flat}
    return leaves, lambda new: jax.tree_util.tree_unflatten(treedef, new.values())


def check_array(path: str, leaf: Any) -> None:
    """Refuses what is neither a NumPy nor a JAX array, such as a torch tensor."""
    if not isinstance(leaf, np.ndarray | jax.Array):
        raise InputError(
            f"params: {path} is a {type(leaf).__module__}.{type(leaf).__name__}, not a NumPy or "
            "JAX array: for tensors of torch pass {k: v.numpy() for k, v in state_dict.items()}"
        )


def like(new: Any, old: np.ndarray | jax.Array) -> np.ndarray | jax.Array:
    """The new values as the kind of array that the old ones are, with their type and sharding."""
    if isinstance(old, np.ndarray):
        return np.ascontiguousarray(np.asarray(new).astype(old.dtype))
    new = jnp.asarray(new).astype(old.dtype)
    if isinstance(old, jax.core.Tracer) or not old.committed:
        return new
    return jax.device_put(new, old.sharding)


def _path(keys) -> str:
    # A box around an array (nnx.Variable, nn.Partitioned) shows up as a last attribute `value`.
    if keys and isinstance(keys[-1], jax.tree_util.GetAttrKey) and keys[-1].name == "value":
        keys = keys[:-1]
    return "/".join(_name(key) for key in keys).replace(".", "/")


def _name(key) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
