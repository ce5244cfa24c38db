"""Schemes for attention within windows (`WindowSite`), as in Swin; the impulse is our own.

The logits of windowed attention are content (σ x Q Kᵀ xᵀ) plus a bias by relative position. If the
content is near zero, the softmax of the bias alone is the map, the same in every window and for
every image. A map that depends only on the offset therefore needs no positions and no solve.

`default`, `kaiming_uniform` and `mimetic` are those of `tokens`; they leave the bias to the model.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from structinit_jax.attention_init import tokens
from structinit_jax.attention_init.kernels import (
    assign,
    convolution_maps,
    crop_kernels,
    normalize_rows,
    target_kernels,
)
from structinit_jax.attention_init.registry import register
from structinit_jax.attention_init.sites import AttentionWeights, WindowSite
from structinit_jax.attention_init.solve import report_on_maps
from structinit_jax.errors import InputError

DEFAULT_TARGET_MASS = 0.5
BISECTIONS = 50  # enough for the precision of float64


@register("impulse", WindowSite)
def impulse(
    rng: PRNGKeyArray,
    site: WindowSite,
    *,
    kernel_size: int | Sequence[int] = 3,
    filters: str | np.ndarray = "impulse",
    sigma: float = 0.7,
    dilation: int | Sequence[int] = 1,
    offsets: str = "even",
    same_layers: bool = False,
    target_mass: float = DEFAULT_TARGET_MASS,
    vo_init: str = "balanced",
) -> AttentionWeights:
    """Puts each head's kernel into its column of the relative position bias.

    This assumes that content logits are near zero at first. Query and key are drawn as in
    `default`; after a LayerNorm the logits' standard deviation is then about 0.02² D. In Swin-T, on
    noise and on smooth images, the target mass of a block averages 0.48 to 0.50 if 0.5 is
    requested; rows deviate by 0.01 in the first stage and by 0.08 in the last.

    - Rows with the whole kernel inside the window have exactly the target mass. The weight of an
      offset that leads out of the window goes to the rest of the row in proportion: an impulse
      without its neighbor leaves the row uniform.
    - The mask of a shifted block leaves a row fewer tokens n'. The target then has
      e^b / (e^b + n' - 1), b its bias, which is more than requested.
    - Tokens that pad the grid to whole windows are attended to like others, as in timm.

    Kernels without any offset inside the window, as in the smallest windows, go to no head. The
    report describes the bias maps of all others; its norm is that of the drawn query and key.
    """
    kernels, ranges = target_kernels(
        site, filters=filters, kernel_size=kernel_size, dilation=dilation, sigma=sigma
    )
    fits = kernels.sum(axis=(1, 2)) > 0
    place = np.cumsum([0, *fits]).tolist()  # index of each kernel among those that fit
    ranges = tuple((place[start], place[stop]) for start, stop in ranges)
    if any(start == stop for start, stop in ranges):
        raise InputError(
            f"filters: no kernel has an offset within the window {site.grid}: pass kernels with "
            "weight near their center"
        )
    return _draw_and_place(
        rng,
        bias_of_kernels(kernels[fits], site.grid, target_mass),
        normalize_rows(convolution_maps(kernels[fits], site.grid)),
        np.flatnonzero(fits).astype(np.int32),
        site=site,
        ranges=ranges,
        offsets=offsets,
        same_layers=same_layers,
        vo_init=vo_init,
    )


@functools.partial(jax.jit, static_argnames=("site", "ranges", "offsets", "same_layers", "vo_init"))
def _draw_and_place(
    rng: PRNGKeyArray,
    table: Float[Array, "F R"],
    targets: Float[Array, "F n n"],
    fitting: Int[Array, " F"],
    *,
    site: WindowSite,
    ranges: tuple[tuple[int, int], ...],
    offsets: str,
    same_layers: bool,
    vo_init: str,
) -> AttentionWeights:
    """Runs everything random as one compiled program."""
    order_rng, qk_rng, vo_rng = jax.random.split(rng, 3)
    layers = site.num_layers
    kernel = assign(
        order_rng, (layers, site.num_heads), ranges, order=offsets, same_layers=same_layers
    )
    drawn_layers = 1 if same_layers else layers
    drawn = tokens.default(qk_rng, dataclasses.replace(site, num_layers=drawn_layers))
    query, key = (jnp.broadcast_to(w, (layers, *w.shape[1:])) for w in (drawn.query, drawn.key))
    maps = bias_maps(table[..., None], site.grid)[:, 0]
    norm = jnp.sqrt(jnp.mean(jnp.stack([query, key]) ** 2) * site.width)
    weights = AttentionWeights(
        query,
        key,
        report=report_on_maps(targets, maps, steps=0, norm=norm),
        filter_index=fitting[kernel],
        bias=jnp.swapaxes(table[kernel], 1, 2),
    )
    if vo_init == "default":
        return weights
    value, out = tokens.VO_INITS[vo_init](vo_rng, site)
    return weights._replace(value=value, out=out)


def relative_index(window: tuple[int, int]) -> Int[np.ndarray, "n n"]:
    """Returns the row of a bias table for query i and key j, tokens in row-major order.

    As in timm, rows run over query minus key: (dy + rows - 1) (2 cols - 1) + dx + cols - 1.
    """
    rows, cols = window
    y, x = np.divmod(np.arange(rows * cols), cols)
    dy, dx = y[:, None] - y[None, :], x[:, None] - x[None, :]
    return (dy + rows - 1) * (2 * cols - 1) + dx + cols - 1


def bias_maps(table: Float[Array, "*L R h"], window: tuple[int, int]) -> Float[Array, "*L h n n"]:
    """Returns the attention maps of a bias table at zero content logits."""
    logits = jnp.moveaxis(table[..., relative_index(window), :], -1, -3)
    return jax.nn.softmax(logits, axis=-1)


def bias_of_kernels(
    kernels: Float[np.ndarray, "F g w"], window: tuple[int, int], target_mass: float
) -> Float[np.ndarray, "F R"]:
    """Returns biases whose softmax mixes the kernel with a uniform map to give the target mass.

    With n tokens in a window, kernel values w of sum 1 and a mixture of m kernel and 1 - m uniform,
    attention at an offset is m w + (1 - m) / n, which is a bias of ln(1 + n w m / (1 - m)) there
    and 0 where w = 0. The mixture m is chosen so that the overlap with the kernel, the sum of
    min(w, m w + (1 - m) / n), is the target mass p. For an impulse the bias is
    ln((n - 1) p / (1 - p)) at the offset. A mass below that of a uniform map gives the uniform map.

    Args:
      kernels: Nonnegative kernels; offsets that no two tokens of the window have are cropped.
      window: (rows, cols).
      target_mass: Attention mass on target, between 0 and 1.
    """
    offsets = crop_kernels(kernels, window).astype(np.float64)
    weights = (offsets / offsets.sum(axis=(1, 2), keepdims=True)).reshape(len(kernels), -1)
    n = window[0] * window[1]
    low, high = np.zeros((len(weights), 1)), np.ones((len(weights), 1))
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        mixed = middle * weights + (1 - middle) / n
        enough = np.minimum(weights, mixed).sum(axis=1, keepdims=True) >= target_mass
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    # A window of one token has only one map, whatever its bias.
    mixture = low if n > 1 else np.zeros_like(low)
    bias = np.log1p(n * weights * mixture / (1 - mixture))
    return bias[:, ::-1].astype(np.float32)  # the table runs over query minus key
