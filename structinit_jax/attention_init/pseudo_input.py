"""Position encodings, and the pseudo input that stands for a layer's tokens in the solve."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from structinit_jax.errors import InputError


def sincos_positions(
    grid: tuple[int, int], width: int, temperature: float = 10_000.0
) -> Float[np.ndarray, "N D"]:
    """2-D sine-cosine encoding [N, D] in channel order sin x, cos x, sin y, cos y.

    Frequencies are temperature^(-i / (D/4 - 1)), i = 0 … D/4 - 1, as in MoCo v3 and big_vision.

    Raises:
      InputError: if the width is not a multiple of 4, or below 8.
    """
    if width % 4 or width < 8:
        raise InputError(
            f"model.width={width}: sin-cos positions need a width divisible by 4 and at least 8 "
            "(sine and cosine of x and of y); change it or set model.positions='learned'"
        )
    quarter = width // 4
    frequencies = temperature ** -(np.arange(quarter) / (quarter - 1))
    y, x = np.meshgrid(*map(np.arange, grid), indexing="ij")
    x = x.reshape(-1, 1) * frequencies
    y = y.reshape(-1, 1) * frequencies
    encoding = np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1)
    return encoding.astype(np.float32)


def layer_norm(x: Float[Array | np.ndarray, "N D"], epsilon: float = 1e-6):
    """LayerNorm without scale and bias; stays in NumPy float64 for a NumPy array."""
    xp = jnp if not isinstance(x, np.ndarray) else np
    if xp is np:
        x = x.astype(np.float64)
    x = x - x.mean(axis=1, keepdims=True)
    return x / xp.sqrt((x * x).mean(axis=1, keepdims=True) + epsilon)
