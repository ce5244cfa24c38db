"""Pseudo inputs, which stand for a layer's tokens in the solve, before and after LayerNorm."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from structinit_jax.attention_init.draw import trunc_normal
from structinit_jax.errors import InputError

PSEUDO_INPUTS = ("positions", "uniform", "gaussian", "positions+uniform", "positions+gaussian")


def sincos_positions(
    grid: tuple[int, int], width: int, convention: str = "timm"
) -> Float[np.ndarray, "N D"]:
    """Returns the 2-D sine-cosine encoding with temperature 10,000; N = rows × cols, row-major.

    Args:
      grid: (rows, cols).
      width: Channels D, a multiple of 4 and at least 8.
      convention: 'timm' is timm's `build_sincos2d_pos_embed`, which the 2024 paper uses: channels
        sin y, sin x, cos y, cos x and frequencies 10,000^(-4 i / D), i = 0 … D/4 - 1. 'moco' is
        that of MoCo v3 and big_vision: sin x, cos x, sin y, cos y and 10,000^(-i / (D/4 - 1)).

    Raises:
      InputError: The width cannot be encoded, or the convention is unknown.
    """
    if width % 4 or width < 8:
        raise InputError(
            f"width={width}: sin-cos positions need a width of at least 8 that is divisible by 4; "
            "change the width, or use learned positions and a scheme that keeps them, such as "
            "'mimetic'"
        )
    if convention not in ("timm", "moco"):
        raise InputError(f"convention={convention!r}: choose 'timm' or 'moco'")
    quarter = width // 4
    steps = quarter if convention == "timm" else quarter - 1
    frequencies = 10_000.0 ** -(np.arange(quarter) / steps)
    y, x = np.meshgrid(*map(np.arange, grid), indexing="ij")
    y, x = (axis.reshape(-1, 1) * frequencies for axis in (y, x))
    if convention == "timm":
        channels = [np.sin(y), np.sin(x), np.cos(y), np.cos(x)]
    else:
        channels = [np.sin(x), np.cos(x), np.sin(y), np.cos(y)]
    return np.concatenate(channels, axis=1).astype(np.float32)


def layer_norm(x: Float[Array | np.ndarray, "N D"], epsilon: float = 1e-6):
    """LayerNorm without scale and bias: in float64 for a NumPy array, else in float32."""
    xp, dtype = (np, np.float64) if isinstance(x, np.ndarray) else (jnp, jnp.float32)
    x = x.astype(dtype)
    x = x - x.mean(axis=1, keepdims=True)
    return x / xp.sqrt((x * x).mean(axis=1, keepdims=True) + epsilon)


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
        noise = trunc_normal(rng, positions.shape, std=0.5**0.5)
    return noise + positions if name.startswith("positions+") else noise
