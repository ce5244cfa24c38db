"""The sin-cos position encoding, and LayerNorm, which makes the schemes' inputs of positions."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from structinit_jax.attention_init.sites import AttentionSite, AttentionStack
from structinit_jax.errors import InputError


def sincos_positions(
    grid: tuple[int, int], width: int, convention: str = "timm"
) -> Float[np.ndarray, "N D"]:
    """Returns the 2-D sine-cosine encoding of a grid (rows, cols), tokens in row-major order.

    'timm' is timm's `build_sincos2d_pos_embed`, which the 2024 paper uses: channels sin y, sin x,
    cos y, cos x and frequencies 10,000^(-4 i / D), i = 0 … D/4 - 1. 'big_vision' has channels
    sin x, cos x, sin y, cos y and frequencies 10,000^(-i / (D/4 - 1)). Raises `InputError` unless
    the width D is a multiple of 4 and at least 8.
    """
    if width % 4 or width < 8:
        raise InputError(
            f"width={width}: sin-cos positions need a width of at least 8 that is divisible by 4: "
            "change the width, or use learned positions and a scheme that keeps them, such as "
            "'default' or mimetic(replace_positions=False)"
        )
    if convention not in ("timm", "big_vision"):
        raise InputError(f"convention={convention!r}: choose 'timm' or 'big_vision'")
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


def trained_positions(
    site: AttentionStack, *, replace: bool, scale: float
) -> tuple[Float[Array, "N D"] | None, float | None]:
    """Returns what replaces a site's learned positions, or the factor on them, in a pair.

    These are `AttentionWeights.positions` and `position_scale`. Fixed positions stay as they are.
    """
    if not isinstance(site, AttentionSite) or not site.positions_trainable:
        return None, None
    if replace:
        return jnp.asarray(sincos_positions(site.grid, site.width)), None
    return None, scale if scale != 1 else None


def layer_norm(x: Float[Array | np.ndarray, "N D"], epsilon: float = 1e-6):
    """Applies LayerNorm without scale and bias: in float64 for a NumPy array, else in float32."""
    xp, dtype = (np, np.float64) if isinstance(x, np.ndarray) else (jnp, jnp.float32)
    x = x.astype(dtype)
    x = x - x.mean(axis=1, keepdims=True)
    return x / xp.sqrt((x * x).mean(axis=1, keepdims=True) + epsilon)
