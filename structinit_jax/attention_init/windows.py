"""Schemes for attention within windows (`WindowSite`), as in Swin; the impulse is our own.

The logits of windowed attention are content plus a relative position bias. While the content is
near zero, the map in every window is the softmax of the bias alone: no positions and no solve are
needed. `mimetic` and `default` leave the bias to the model.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PRNGKeyArray

from structinit_jax.attention_init import draws
from structinit_jax.attention_init.sites import AttentionWeights, WindowSite
from structinit_jax.attention_init.targets import FilterArray, assign, place_filters
from structinit_jax.errors import require

BISECTIONS = 50  # Enough for the precision of float64.


def impulse(
    rng: PRNGKeyArray,
    site: WindowSite,
    *,
    kernel_size: int,
    filters: FilterArray | None,
    dilation: int,
    target_mass: float,
) -> AttentionWeights:
    """Puts each head's filter into its column of the relative position bias.

    Query and key are drawn as in timm; after a LayerNorm, the content logits then have a standard
    deviation of about 0.02² D. Without content, rows with the whole filter inside the window have
    exactly the target mass; the row of an impulse whose neighbor is outside the window is uniform.
    The mask of a shifted block leaves fewer tokens in a row, so the target gets more of the
    attention. If a window is so small that uniform attention already has the target mass, the bias
    is zero. Filters that are off the window for every token, as in the small windows of late
    stages, are not assigned to any head.
    """
    placed = place_filters(site.grid, kernel_size, filters, dilation)
    placed = placed[placed.any(axis=(1, 2))]
    needs = f"smaller than the window of {site.grid} tokens: all are outside it for every token"
    require("filters", filters, needs, len(placed) > 0)
    table = bias_of_filters(placed, site.grid, target_mass)
    weights = _draw_weights(rng, table, sizes=site.sizes)
    return weights._replace(filters=placed)


@functools.partial(jax.jit, static_argnames="sizes")
def _draw_weights(rng, table, *, sizes):
    """Draws the weights of all layers, given biases [F, R]."""
    order_rng, qk_rng, vo_rng = jax.random.split(rng, 3)
    filter_index = assign(order_rng, (sizes.num_layers, sizes.num_heads), len(table))
    query, key, *_ = draws.base_weights(qk_rng, dataclasses.replace(sizes, base_init="timm"))
    value, out = draws.value_and_projection(vo_rng, sizes)
    bias = jnp.swapaxes(table[filter_index], 1, 2)
    return AttentionWeights(query, key, value, out, filter_index=filter_index, bias=bias)


def bias_of_filters(
    filters: Float[np.ndarray, "F rows cols"], window: tuple[int, int], target_mass: float
) -> Float[np.ndarray, "F R"]:
    """Returns biases whose softmax mixes the filter with a uniform map to give the target mass.

    For n tokens, filter values w that sum to 1, and a mixture of m filter and 1 - m uniform,
    attention at an offset is m w + (1 - m) / n, which is a bias of ln(1 + n w m / (1 - m)). The
    mixture m is chosen so that the overlap with the filter, the sum of min(w, m w + (1 - m) / n),
    is the target mass p; m is 0 if uniform attention already has more. For an impulse, the bias is
    ln((n - 1) p / (1 - p)) at the offset. Filters must be nonnegative.
    """
    offsets = filters.astype(np.float64)
    weights = (offsets / offsets.sum(axis=(1, 2), keepdims=True)).reshape(len(filters), -1)
    n = window[0] * window[1]
    low = np.zeros((len(weights), 1))
    high = np.ones((len(weights), 1))
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        mixed = middle * weights + (1 - middle) / n
        enough = np.minimum(weights, mixed).sum(axis=1, keepdims=True) >= target_mass
        low = np.where(enough, low, middle)
        high = np.where(enough, middle, high)
    bias = np.log1p(n * weights * low / (1 - low))
    return bias[:, ::-1].astype(np.float32)  # the table is indexed by query minus key
