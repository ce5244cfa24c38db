"""The method for attention over a grid of tokens with positions (`AttentionSite`), as in ViT.

Both papers look for query and key weights whose attention to positions alone is a convolution, the
2024 paper by gradient descent, the 2025 paper in closed form. Here, with the position encoding
P [N, D] and X = LayerNorm(P), each head's Q and K [D, d] minimize

    mean of (H - M)²,   M = softmax(σ X Q Kᵀ Xᵀ)                        (2024, equation 8)

where the target H [N, N] shifts every token's attention by the head's offset. Three facts make this
cheap. With X = Z Bᵀ, Z [N, r] and orthonormal B [D, r], M depends only on BᵀQ and BᵀK [r, d], and a
sin-cos encoding has a low rank r at any width: 19 on 14×14 tokens, at most 53 on 64×64. There are
only F = f² distinct targets, so each is solved for only once. And a random rotation R of the d
channels, Q R and K R, leaves M unchanged, so every head of every layer gets its own weights.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from structinit_jax.attention_init import draws, solve
from structinit_jax.attention_init.positions import (
    is_sincos,
    layer_norm,
    position_fields,
    start_positions,
)
from structinit_jax.attention_init.sites import AttentionSite, AttentionSizes, AttentionWeights
from structinit_jax.attention_init.targets import FilterArray, assign, filter_maps, place_filters

# Learned positions that are kept are multiplied by this, as in the 2025 paper's program.
POSITION_SCALE = 18.0
# Options of the solve for other encodings than sin-cos, such as the noise that learned positions
# start from. With the defaults, 43 and 68 % of the rows peak on their target (8×8 tokens of noise,
# target masses of 0.1 and 0.3); with small steps to sharp maps, softened afterwards, all do.
NOISE_SOLVE = dict(learning_rate=0.005, sharp_mass=0.9, steps=300)


def impulse(
    rng: PRNGKeyArray,
    site: AttentionSite,
    *,
    kernel_size: int,
    filters: FilterArray | None,
    dilation: int,
    target_mass: float,
    replace_positions: bool = True,
    half: bool = False,
) -> AttentionWeights:
    """See `attention_init.impulse`, or `attention_init.impulse_mimetic` if `half`."""
    placed = place_filters(site.grid, kernel_size, filters, dilation)
    targets = filter_maps(placed, site.grid)
    solve.require_above_uniform(target_mass, targets)
    positions, new_positions = start_positions(
        site, replace=replace_positions, scale=POSITION_SCALE
    )
    is_learned = site.positions_trainable and not replace_positions
    if is_learned:
        z, basis = solve.full_row_space(layer_norm(jnp.asarray(positions)))
    else:
        z, basis = solve.row_space(layer_norm(np.asarray(positions)))
    sizes = site.sizes
    # Static arguments of jit are hashed, and JAX scalars are not hashable.
    options = dict(head_dim=sizes.head_dim, qk_scale=sizes.qk_scale, target_mass=float(target_mass))
    start = solve.start_factors(z, targets, sizes.head_dim)
    norm = solve.start_norm(sizes.head_dim, sizes.qk_scale, sizes.width)
    rows = None
    if is_learned or not is_sincos(positions, site.grid):
        options |= NOISE_SOLVE
    else:
        rows, targets = solve.sample_rows(targets)
    *factors, report = solve.solve(start, z, targets, norm, rows=rows, **options)
    num_impulse = -(-site.num_layers // 2) if half else site.num_layers
    weights = _draw_weights(rng, factors, basis, sizes=sizes, num_impulse=num_impulse)
    return weights._replace(report=report, filters=placed, **new_positions)


@functools.partial(jax.jit, static_argnames=("sizes", "num_impulse"))
def _draw_weights(
    rng: PRNGKeyArray,
    bank: list[Float[Array, "F r k"]],
    basis: Float[Array | np.ndarray, "D r"],
    *,
    sizes: AttentionSizes,
    num_impulse: int,
) -> AttentionWeights:
    """Draws the weights of all heads from `bank` (BᵀQ and BᵀK of each filter) and `basis` (B).

    Heads in layers after the first `num_impulse` attend to similar tokens.
    """
    rotation_rng, filter_rng, vo_rng, similar_rng = jax.random.split(rng, 4)

    # Every head has the factors [r, k] of its filter times its own rotation Rᵀ [k, d], which keeps
    # the map because Rᵀ R = I. Q and K ignore all input outside the row space of X.
    filter_index = assign(filter_rng, (num_impulse, sizes.num_heads), len(bank[0]))
    shape = (*filter_index.shape, sizes.head_dim, bank[0].shape[-1])
    rotations = draws.random_rotations(rotation_rng, shape)

    def place(factors):
        rotated = jnp.einsum("Lhrk,Lhdk->Lrhd", factors[filter_index], rotations)
        # With the basis repeated for each layer, the product needs no transpose afterwards.
        bases = jnp.broadcast_to(basis, (num_impulse, *basis.shape))
        return jnp.einsum("LDr,Lrhd->LDhd", bases, rotated)

    query, key = map(place, bank)
    query, key = draws.append_similar_heads(similar_rng, sizes, query, key)
    value, out = draws.value_and_projection(vo_rng, sizes)
    return AttentionWeights(query, key, value, out, filter_index=filter_index)


def baseline(
    rng: PRNGKeyArray,
    site: AttentionSite,
    *,
    draw: Callable[[PRNGKeyArray, AttentionSizes], AttentionWeights],
    replace_positions: bool,
    position_scale: float,
    query_key_scale: float,
    value_scale: float,
) -> AttentionWeights:
    """Draws weights as `draws.baseline` does, and replaces or scales trainable positions."""
    scales = dict(query_key_scale=query_key_scale, value_scale=value_scale)
    new_positions = position_fields(site, replace=replace_positions, scale=position_scale)
    return draws.baseline(rng, site, draw=draw, **scales)._replace(**new_positions)
