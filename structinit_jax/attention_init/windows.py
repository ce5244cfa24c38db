"""Convolutions in the relative position bias of attention within windows: exact, without a solve.

The logits of windowed attention are content (σ x Q Kᵀ xᵀ) plus a bias by relative position. Where
the content is near zero, softmax of the bias alone is the map, the same in every window and for
every image, so a map that depends on the offset alone needs no positions at all.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from structinit_jax.attention_init.baselines import (
    balanced_vo,
    default,
    mimetic_vo,
)
from structinit_jax.attention_init.kernels import assign_layers, bank_ranges, convolution_maps
from structinit_jax.attention_init.sites import AttentionWeights, WindowSite
from structinit_jax.attention_init.solve import closeness
from structinit_jax.errors import InputError

DEFAULT_SHARE = 0.5
BISECTIONS = 50  # float64 holds no more of a share


def relative_index(window: tuple[int, int]) -> Int[np.ndarray, "n n"]:
    """The row of a bias table for query i and key j, tokens in row-major order.

    As in timm, rows run over query minus key: (dy + rows - 1) (2 cols - 1) + dx + cols - 1.
    """
    rows, cols = window
    y, x = np.divmod(np.arange(rows * cols), cols)
    dy, dx = y[:, None] - y[None, :], x[:, None] - x[None, :]
    return (dy + rows - 1) * (2 * cols - 1) + dx + cols - 1


def bias_maps(table: Float[Array, "*L R h"], window: tuple[int, int]) -> Float[Array, "*L h n n"]:
    """The attention maps of a bias table where the content says nothing."""
    logits = jnp.moveaxis(table[..., relative_index(window), :], -1, -3)
    return jax.nn.softmax(logits, axis=-1)


def bias_of_kernels(
    kernels: Float[np.ndarray, "F g g"], window: tuple[int, int], target_mass: float
) -> Float[np.ndarray, "F R"]:
    """Biases whose softmax is the kernel, mixed with as much of a uniform map as the share asks.

    With n tokens in a window, kernel values w of sum 1 and a mixture of m kernel and 1 - m uniform,
    attention at an offset is m w + (1 - m) / n, that is, a bias of ln(1 + n w m / (1 - m)) there
    and 0 where w = 0. The mixture m is found so that the overlap with the kernel, the sum of
    min(w, m w + (1 - m) / n), is the share. For an impulse this is ln((n - 1) share / (1 - share))
    at the offset. A share below a uniform map's own overlap gives the uniform map.

    Args:
      kernels: none negative; offsets that no two tokens of the window have are cut off.
      window: (rows, cols).
      target_mass: in (0, 1).
    """
    offsets = _within(kernels, window).astype(np.float64)
    weights = (offsets / offsets.sum(axis=(1, 2), keepdims=True)).reshape(len(kernels), -1)
    n = window[0] * window[1]
    low, high = np.zeros((len(weights), 1)), np.ones((len(weights), 1))
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        mixed = middle * weights + (1 - middle) / n
        enough = np.minimum(weights, mixed).sum(axis=1, keepdims=True) >= target_mass
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    # A window of one token has one map, whatever its bias.
    mixture = low if n > 1 else np.zeros_like(low)
    bias = np.log1p(n * weights * mixture / (1 - mixture))
    return bias[:, ::-1].astype(np.float32)  # the table runs over query minus key


def _within(kernels, window):
    """Kernels on the offsets (key minus query) of a window, [F, 2 rows - 1, 2 cols - 1]."""
    reach = kernels.shape[-1] // 2
    placed = np.zeros((len(kernels), 2 * window[0] - 1, 2 * window[1] - 1), kernels.dtype)
    y, x = (min(reach, side - 1) for side in window)
    inside = (slice(window[0] - 1 - y, window[0] + y), slice(window[1] - 1 - x, window[1] + x))
    placed[:, *inside] = kernels[:, reach - y : reach + y + 1, reach - x : reach + x + 1]
    return placed


def place_kernels(
    key: PRNGKeyArray,
    site: WindowSite,
    banks: Sequence[Float[np.ndarray, "_ _ _"]],
    bank_of_layer: tuple[int, ...],
    *,
    target_mass: float,
    offsets: str,
    same_layers: bool,
    vo_init: str,
) -> AttentionWeights:
    """Each head's kernel in its column of the relative position bias.

    Assumed is that content logits are near zero at first. Query and key are drawn as in `default`,
    truncated normal of deviation 0.02: behind a LayerNorm the logits' deviation is about 0.02² D,
    such as 0.04 for D = 96 and 0.3 for D = 768. In Swin-T on noise and on smooth images the share
    of a block averages 0.48 to 0.50 where 0.5 is asked; its rows deviate by 0.01 in the first stage
    and by 0.08 in the last.

    The maps then have the wanted share in shifted and unshifted blocks alike:

    - Rows whose whole kernel lies in the window have exactly the share. Where an offset leads out
      of the window, its weight goes to the rest of the row in proportion: an impulse whose
      neighbour is missing leaves the row uniform.
    - A shift's mask leaves a row fewer tokens n'. The target then has
      e^b / (e^b + n' - 1), b its bias, which is more than the share.
    - Tokens that pad the map to whole windows are attended to like others, as in timm.

    Args:
      key: draws the assignment and the weights.
      site: the windows.
      banks: the distinct banks of kernels. Kernels of which no offset lies within the window, as
        happens in the smallest maps, are given to no head.
      bank_of_layer: each layer's bank.
      target_mass: attention on target, see `bias_of_kernels`.
      offsets: how filters go to heads, see `kernels.assign_filters`.
      same_layers: whether all layers have equal biases, query and key.
      vo_init: V and projection: 'balanced', 'mimetic' or 'default', see `impulse`.

    Returns:
      Query, key, bias and, but for 'default', value and out. `filters` counts through the
      concatenated banks. The report is of the bias maps of all filters of the banks that are in
      use, with no solver steps; its norm is that of the drawn query and key.
    """
    kept = [np.flatnonzero(_within(bank, site.grid).sum(axis=(1, 2)) > 0) for bank in banks]
    if not all(map(len, kept)):
        raise InputError(
            f"attention_init.filters: no kernel has an offset within the window {site.grid}: give "
            "kernels with weight near their centre"
        )
    used = [bank[index] for bank, index in zip(banks, kept, strict=True)]
    table = np.concatenate([bias_of_kernels(bank, site.grid, target_mass) for bank in used])
    starts = np.cumsum([0] + [len(bank) for bank in banks[:-1]])
    numbers = [start + index for start, index in zip(starts, kept, strict=True)]

    return _draw_and_place(
        key,
        table,
        _targets(used, site.grid),
        np.concatenate(numbers).astype(np.int32),
        site=site,
        ranges=bank_ranges(used, bank_of_layer),
        offsets=offsets,
        same_layers=same_layers,
        vo_init=vo_init,
    )


@functools.partial(jax.jit, static_argnames=("site", "ranges", "offsets", "same_layers", "vo_init"))
def _draw_and_place(
    key: PRNGKeyArray,
    table: Float[Array, "F R"],
    targets: Float[Array, "F n n"],
    numbers: Int[Array, " F"],
    *,
    site: WindowSite,
    ranges: tuple[tuple[int, int], ...],
    offsets: str,
    same_layers: bool,
    vo_init: str,
) -> AttentionWeights:
    """All that is random, as one program, so that it compiles and runs as one."""
    order_key, qk_key, vo_key = jax.random.split(key, 3)
    layers = site.num_layers
    chosen = assign_layers(
        order_key, ranges, site.num_heads, order=offsets, same_layers=same_layers
    )
    drawn = default()(qk_key, dataclasses.replace(site, num_layers=1 if same_layers else layers))
    query, key_ = (jnp.broadcast_to(w, (layers, *w.shape[1:])) for w in (drawn.query, drawn.key))
    maps = bias_maps(table[..., None], site.grid)[:, 0]
    norm = jnp.sqrt(jnp.mean(jnp.stack([query, key_]) ** 2) * site.width)
    weights = AttentionWeights(
        query,
        key_,
        report=closeness(targets, maps, steps=0, norm=norm),
        filter_index=numbers[chosen],
        bias=jnp.swapaxes(table[chosen], 1, 2),
    )
    if vo_init == "default":
        return weights
    make = balanced_vo if vo_init == "balanced" else mimetic_vo
    value, out = make(vo_key, layers, site.width, site.num_heads, site.head_dim)
    return weights._replace(value=value, out=out)


def _targets(banks, window):
    """Target maps [F, n, n] with rows of sum 1, or empty."""
    maps = np.concatenate([convolution_maps(bank, window) for bank in banks])
    total = maps.sum(axis=-1, keepdims=True)
    return (maps / np.where(total > 0, total, 1)).astype(np.float32)
