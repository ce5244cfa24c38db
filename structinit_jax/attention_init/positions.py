"""The sin-cos position encoding, and the positions that a scheme starts from."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from structinit_jax.attention_init.sites import GRID, AttentionSite, is_concrete
from structinit_jax.errors import is_count, require

CONVENTIONS = ("timm", "big_vision")  # of sin-cos encodings


def sincos_positions(
    grid: tuple[int, int], width: int, convention: str = "timm"
) -> Float[np.ndarray, "N D"]:
    """Returns the 2-D sine-cosine encoding of a grid (rows, cols), tokens in row-major order.

    'timm' is timm's `build_sincos2d_pos_embed`, which the 2024 paper uses: channels sin y, sin x,
    cos y, cos x and frequencies 10,000^(-4 i / D), i = 0 … D/4 - 1. 'big_vision' has channels
    sin x, cos x, sin y, cos y and frequencies 10,000^(-i / (D/4 - 1)). Raises `InputError` unless
    the width D is a multiple of 4 and at least 8.

    >>> si.sincos_positions(grid=(14, 14), width=192).shape
    (196, 192)
    """
    needs = (
        "a multiple of 4, at least 8, for sin-cos positions: change it, or use learned positions "
        "and a scheme that keeps them, such as 'default' or mimetic(replace_positions=False)"
    )
    require("width", width, needs, _has_sincos(width))
    GRID.require("grid", grid)
    require("convention", convention, f"one of {CONVENTIONS}", convention in CONVENTIONS)
    quarter = width // 4
    steps = quarter if convention == "timm" else quarter - 1
    frequencies = 10_000.0 ** -(np.arange(quarter) / steps)
    y, x = np.divmod(np.arange(grid[0] * grid[1])[:, None], grid[1])
    y = y * frequencies
    x = x * frequencies
    if convention == "timm":
        channels = [np.sin(y), np.sin(x), np.cos(y), np.cos(x)]
    else:
        channels = [np.sin(x), np.cos(x), np.sin(y), np.cos(y)]
    return np.concatenate(channels, axis=1).astype(np.float32)


def _has_sincos(width):
    """Whether there is a sin-cos encoding of this width."""
    return is_count(width, 8) and width % 4 == 0


def is_sincos(positions: Float[Array | np.ndarray, "N D"], grid: tuple[int, int]) -> bool:
    """Whether positions are a sin-cos encoding, of either convention."""
    width = positions.shape[1]
    if not _has_sincos(width):
        return False
    encodings = (sincos_positions(grid, width, convention) for convention in CONVENTIONS)
    return any(np.allclose(positions, encoding, atol=1e-4) for encoding in encodings)


def position_fields(site: AttentionSite, *, replace: bool, scale: float) -> dict[str, Any]:
    """Returns the fields of `AttentionWeights` that set or scale a site's trainable positions.

    These are `positions` or `position_scale`. Fixed positions stay as they are.
    """
    if not site.positions_trainable:
        return {}
    if replace:
        return dict(positions=sincos_positions(site.grid, site.width))
    return dict(position_scale=scale) if scale != 1 else {}


def start_positions(
    site: AttentionSite, *, replace: bool, scale: float
) -> tuple[Float[Array | np.ndarray, "N D"], dict[str, Any]]:
    """Returns the initial positions, and the fields of `AttentionWeights` that set them.

    The positions are a NumPy array if this process can read them.
    """
    new = position_fields(site, replace=replace, scale=scale)
    positions = new.get("positions", site.positions)
    needs = (
        "the model's position encoding, finite and not the same for all tokens; the schemes "
        "'mimetic' and 'default' need none"
    )
    require("AttentionSite.positions", positions, needs, positions is not None)
    if is_concrete(positions):
        positions = np.asarray(positions)
        spread = np.ptp(positions.astype(np.float64), axis=0).max()
        require("AttentionSite.positions", positions, needs, 0 < spread < np.inf)
    return new.get("position_scale", 1) * positions, new


def layer_norm(x: Float[Array | np.ndarray, "N D"], epsilon: float = 1e-6):
    """Applies LayerNorm without scale and bias: in float64 for a NumPy array, else in float32."""
    xp, dtype = (np, np.float64) if isinstance(x, np.ndarray) else (jnp, jnp.float32)
    x = x.astype(dtype)
    x = x - x.mean(axis=1, keepdims=True)
    return x / xp.sqrt((x * x).mean(axis=1, keepdims=True) + epsilon)
