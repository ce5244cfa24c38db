"""Schemes for attention with rotary positions only (`RotarySite`); the impulse is our own.

RoPE rotates each pair of channels of query i and key j by angles θ_i and θ_j. Suppose that, before
the rotation, all queries of a head equal one vector q and all keys one vector k. With each pair of
channels written as a complex number, the logits are then

    σ Re Σ_p conj(q_p) k_p exp(i (θ_jp - θ_ip)).

They depend only on the positions, and only on the offset if angles are linear in the position.
`impulse` solves for the coefficients c_p = σ conj(q_p) k_p.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from structinit_jax.attention_init import draws, solve
from structinit_jax.attention_init.sites import GRID, AttentionWeights, RotarySite, SolveReport
from structinit_jax.attention_init.targets import FilterArray, assign, filter_maps, place_filters
from structinit_jax.errors import is_count, require
from structinit_jax.rngs import draw_flat

START_NORM = 3.0  # Square root of the sum of |c| at the start; most grids need about this value.
MAX_ROWS = 64  # More rows of a map would only pose the same problem at other places.


def rotary_angles(
    grid: tuple[int, int], head_dim: int, temperature: float = 100.0
) -> Float[np.ndarray, "1 1 N p"]:
    """Returns the angles of timm's axial RoPE ViTs, for `RotarySite`.

    The first half of the channel pairs rotates with the column of the grid, the second half with
    the row, both at the frequencies temperature^(-4 i / d), i = 0 … d/4 - 1, in radians per token.
    The temperature is 100 in `vit_small_patch16_rope_224` and similar models. Raises `InputError`
    unless the head dimension d = 2 p is a multiple of 4.

    >>> si.rotary_angles(grid=(14, 14), head_dim=64).shape
    (1, 1, 196, 32)
    """
    needs = (
        "a multiple of 4 for rotary positions, which need as many channel pairs for rows as for "
        "columns: change the width or the number of heads"
    )
    require("head_dim", head_dim, needs, is_count(head_dim) and head_dim % 4 == 0)
    GRID.require("grid", grid)
    quarter = head_dim // 4
    frequencies = temperature ** -(np.arange(quarter) / quarter)
    y, x = np.divmod(np.arange(grid[0] * grid[1])[:, None], grid[1])
    angles = np.concatenate([x * frequencies, y * frequencies], axis=1)
    return angles.astype(np.float32)[None, None]


def impulse(
    rng: PRNGKeyArray,
    site: RotarySite,
    *,
    kernel_size: int,
    filters: FilterArray | None,
    dilation: int,
    target_mass: float,
    half: bool = False,
) -> AttentionWeights:
    """Impulse initialization through RoPE: constant queries and keys, rotated by the model.

    The bias of the patch embedding gives all tokens a common vector with as many entries +1 as -1.
    The query and key weights map this vector to each head's q and k; on all other input they act
    like the model's `base_init`. Solving for the coefficients gives maps close to the targets at a
    low norm, which content disturbs least. The phases of k are random and independent for each
    head. In the first layer, tokens without content put the target mass on their target; content
    reduces it. If `half`, heads in the second half of the layers attend to similar tokens.
    """
    placed = place_filters(site.grid, kernel_size, filters, dilation)
    targets = filter_maps(placed, site.grid)
    solve.require_above_uniform(target_mass, targets)
    num_impulse = -(-site.num_layers // 2) if half else site.num_layers
    order_rng, place_rng = jax.random.split(rng)
    filter_index = assign(order_rng, (num_impulse, site.num_heads), len(targets))
    targets = jnp.asarray(targets)
    angles = jnp.asarray(site.angles, jnp.float32)
    if angles.shape[:2] == (1, 1):  # one solve for each filter serves all heads
        solved, report = solve_coefficients(angles[0], targets, target_mass)
        coefficients = solved[filter_index]
    else:
        tables = jnp.broadcast_to(angles, (site.num_layers, site.num_heads, *angles.shape[2:]))
        tables = tables[:num_impulse].reshape(-1, *angles.shape[2:])
        solved, report = solve_coefficients(tables, targets[filter_index.ravel()], target_mass)
        coefficients = solved.reshape(*filter_index.shape, *solved.shape[1:])
    weights = _draw_weights(place_rng, coefficients, sizes=site.sizes, pairs=site.pairs)
    return weights._replace(report=report, filter_index=filter_index, filters=placed)


@functools.partial(jax.jit, static_argnames=("sizes", "pairs"))
def _draw_weights(rng, coefficients, *, sizes, pairs):
    """Draws the weights of all layers; `coefficients` [l, h, 2, p] are those of the first l."""
    sign_rng, phase_rng, qk_rng, vo_rng, similar_rng = jax.random.split(rng, 5)
    drawn = draws.base_weights(qk_rng, sizes)
    num_impulse, heads = coefficients.shape[:2]
    size = jnp.sqrt(jnp.linalg.norm(coefficients, axis=2) / sizes.qk_scale)  # |q|, |k| per pair
    phase = 2 * math.pi * draw_flat(jax.random.uniform, phase_rng, size.shape)
    turn = jnp.arctan2(coefficients[:, :, 1], coefficients[:, :, 0])
    # LayerNorm leaves this vector unchanged.
    common = jax.random.permutation(sign_rng, np.repeat(np.float32([-1, 1]), sizes.width // 2))

    def place(phase, kernel):
        parts = jnp.stack([size * jnp.cos(phase), size * jnp.sin(phase)], axis=-1)
        if pairs == "halves":
            parts = jnp.swapaxes(parts, -1, -2)
        vectors = parts.reshape(num_impulse, heads, sizes.head_dim)
        # Replaces the base initialization's output for the common vector with these vectors.
        change = vectors - jnp.einsum("D,LDhd->Lhd", common, kernel[:num_impulse])
        return kernel[:num_impulse] + jnp.einsum("D,Lhd->LDhd", common / sizes.width, change)

    query = place(phase - turn, drawn.query)
    key = place(phase, drawn.key)
    query, key = draws.append_similar_heads(similar_rng, sizes, query, key)
    value, out = draws.value_and_projection(vo_rng, sizes)
    return AttentionWeights(query, key, value, out, patch_bias=common)


@jax.jit
def solve_coefficients(
    angles: Float[Array, "#B N p"],
    targets: Float[Array, "B N N"],
    target_mass: float | Float[Array, ""],
) -> tuple[Float[Array, "B 2 p"], SolveReport]:
    """Returns coefficients c, as real and imaginary parts, whose maps come closest to the targets.

    Minimizes the cross-entropy of the maps, a convex problem in c, at the sum of |c| that gives the
    target mass. At the start, all |c| are equal and the maps peak at the mean offset of the target.
    """

    def solve_one(problem):
        angles, target = problem
        cos = jnp.cos(angles)
        sin = jnp.sin(angles)
        rows = solve.loss_rows(target.max(axis=-1) > 0, MAX_ROWS)
        some = target[rows]

        def coefficients(factor, norm):
            # c = |f| f for a factor f of length `norm`: |c| sums to norm², with a smooth gradient.
            factor = factor * (norm / jnp.linalg.norm(factor))
            return factor * jnp.linalg.norm(factor, axis=0, keepdims=True)

        def logits(factor, norm, rows=slice(None)):
            real, imaginary = coefficients(factor, norm)[:, None]
            along = real * cos[rows] + imaginary * sin[rows]  # c exp(-i θ_i)
            across = imaginary * cos[rows] - real * sin[rows]
            return along @ cos.T - across @ sin.T

        def loss_and_mass(factor, norm):
            log_maps = jax.nn.log_softmax(logits(factor, norm, rows), axis=-1)
            loss = -jnp.sum(some * log_maps) / len(rows)
            return loss, solve.overlap(some[None], jnp.exp(log_maps)[None])[0]

        # The start is the conjugate of the sum of H_ij exp(i (θ_j - θ_i)), scaled to unit size.
        mean_cos = target @ cos
        mean_sin = target @ sin
        start = jnp.stack([cos * mean_cos + sin * mean_sin, sin * mean_cos - cos * mean_sin])
        start = start.sum(axis=1)
        start = start / jnp.maximum(jnp.linalg.norm(start, axis=0, keepdims=True), 1e-6)
        factor, norm = solve.minimize(loss_and_mass, start, jnp.float32(START_NORM), target_mass)
        maps = jax.nn.softmax(logits(factor, norm), axis=-1)
        return coefficients(factor, norm), solve.report_on_maps(target, maps, target_mass)

    # One filter at a time: solving for all of them at once would take more memory.
    angles = jnp.broadcast_to(angles, (len(targets), *angles.shape[1:]))
    found, reports = jax.lax.map(solve_one, (angles, targets))
    return found, jax.tree.map(jnp.mean, reports)
