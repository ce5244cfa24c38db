"""Arrays of other projects: NumPy's, JAX's and torch's."""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from structinit_jax.errors import InputError


def is_tensor(leaf: Any) -> bool:
    """Whether a leaf is a torch tensor. Does not import torch."""
    return "torch" in sys.modules and isinstance(leaf, sys.modules["torch"].Tensor)


def as_array(leaf: Any) -> Any:
    """Converts a torch tensor to NumPy, which has no bfloat16: floats of 8 or 16 bits to 32."""
    if not is_tensor(leaf):
        return leaf
    leaf = leaf.detach().cpu()
    return (leaf.float() if leaf.is_floating_point() and leaf.itemsize < 4 else leaf).numpy()


def check_array(argument: str, name: str, leaf: Any) -> None:
    """Raises `InputError` for anything but a NumPy or JAX array of floats."""
    is_array = isinstance(leaf, np.ndarray | jax.Array)
    if not is_array or not jnp.issubdtype(leaf.dtype, jnp.floating):
        kind = f"has dtype {leaf.dtype}" if is_array else f"is of {type(leaf)}"
        raise InputError(
            f"{argument}: {name} {kind}, but needs to be a NumPy or JAX array of floats"
        )


def like(new: Any, old: np.ndarray | jax.Array) -> np.ndarray | jax.Array:
    """Converts new values to the array kind (NumPy or JAX), dtype and sharding of the old ones."""
    if stays_numpy(new, old):
        return np.array(new, old.dtype, order="C")
    new = jnp.asarray(new).astype(old.dtype)
    if isinstance(old, np.ndarray | jax.core.Tracer) or not old.committed:
        return new
    return jax.device_put(new, old.sharding)


def replace_rows(
    table: Shaped[Array | np.ndarray, "R *k"], rows: Float[Array | np.ndarray, "r *k"], start: int
) -> Shaped[Array | np.ndarray, "R *k"]:
    """Returns a table with other rows from `start` on, in the table's dtype."""
    xp = np if stays_numpy(rows, table) else jnp
    # Arrays on a mesh with explicit axes allow neither `.at[...].set` nor empty slices outside
    # `jax.set_mesh`.
    stop = start + len(rows)
    before = [table[:start]] if start else []
    after = [table[stop:]] if stop < len(table) else []
    return xp.concatenate([*before, xp.asarray(rows).astype(table.dtype), *after])


def stays_numpy(new: Any, old: Any) -> bool:
    """Whether new values of a NumPy array can be one too, which traced values cannot."""
    return isinstance(old, np.ndarray) and not isinstance(new, jax.core.Tracer)
