"""Position encodings, and the pseudo inputs that stand for a layer's tokens in the solve."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from structinit_jax.errors import InputError

PSEUDO_INPUTS = ("positions", "uniform", "gaussian", "positions+uniform", "positions+gaussian")


def sincos_positions(grid: tuple[int, int], width: int) -> Float[np.ndarray, "N D"]:
    """Returns the 2-D sine-cosine encoding, channels in the order sin x, cos x, sin y, cos y.

    Tokens are in row-major order. Frequencies are 10,000^(-i / (D/4 - 1)), i = 0 … D/4 - 1, as in
    MoCo v3 and big_vision.

    Raises:
      InputError: The width is not a multiple of 4, or is less than 8.
    """
    if width % 4 or width < 8:
        raise InputError(
            f"width={width}: sin-cos positions need a width of at least 8 that is divisible by 4 "
            "(sine and cosine of x and y); change the width or use learned positions"
        )
    quarter = width // 4
    frequencies = 10_000.0 ** -(np.arange(quarter) / (quarter - 1))
    y, x = np.meshgrid(*map(np.arange, grid), indexing="ij")
    x = x.reshape(-1, 1) * frequencies
    y = y.reshape(-1, 1) * frequencies
    encoding = np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1)
    return encoding.astype(np.float32)


def layer_norm(x: Float[Array | np.ndarray, "N D"]):
    """LayerNorm without scale and bias; computed in float64 by NumPy for a NumPy array."""
    xp = jnp if not isinstance(x, np.ndarray) else np
    if xp is np:
        x = x.astype(np.float64)
    x = x - x.mean(axis=1, keepdims=True)
    return x / xp.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-6)


def draw_pseudo_input(
    rng: PRNGKeyArray, name: str, positions: Float[Array | np.ndarray, "N D"]
) -> Float[Array | np.ndarray, "N D"]:
    """Draws one of the pseudo inputs in table 6 of the 2024 paper, before LayerNorm.

    'uniform' is noise between -1 and 1; 'gaussian' is truncated normal noise of standard deviation
    (1/2)^1/2, that of the sin-cos encoding; a sum adds the noise to the positions.
    """
    if name == "positions":
        return positions
    if name.endswith("uniform"):
        noise = jax.random.uniform(rng, positions.shape, minval=-1.0, maxval=1.0)
    else:
        std = 0.5**0.5
        noise = std * jax.random.truncated_normal(rng, -2 / std, 2 / std, positions.shape)
    return noise + positions if name.startswith("positions+") else noise
