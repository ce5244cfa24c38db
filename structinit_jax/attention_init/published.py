"""`impulse_2024` and `impulse_2025`: the two papers' programs, to reproduce their results."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PRNGKeyArray

from structinit_jax.attention_init.draws import mimetic_vo, split_product, trunc_normal, uniform
from structinit_jax.attention_init.positions import layer_norm, start_positions
from structinit_jax.attention_init.sites import AttentionSite, AttentionWeights, SolveReport
from structinit_jax.attention_init.solve import report_on_maps
from structinit_jax.attention_init.targets import filter_maps, place_filters

PseudoInput = Literal["positions", "uniform", "gaussian", "positions+uniform", "positions+gaussian"]
PSEUDO_INPUT_EPSILON = 1e-5  # PyTorch's default for LayerNorm; the models themselves use 1e-6
# Learning rate of Adam in algorithm 1, and number of steps between rescales of Q and K.
LEARNING_RATE = 1e-4
RESCALE_EVERY = 100
# The program of 2025 assigns offsets to successive heads in this order.
CENTER_FIRST = (4, 1, 5, 3, 7, 0, 2, 6, 8)


def impulse_2024(
    rng: PRNGKeyArray,
    site: AttentionSite,
    *,
    kernel_size: int,
    same_layers: bool,
    first_input: str,
    following_input: str,
    max_steps: int,
    rescale: bool,
) -> AttentionWeights:
    """Algorithm 1 of "Structured Initialization for Attention in Vision Transformers" (2024).

    Adam minimizes the mean squared error of every head's map (equation 8) over its Q and K. The
    details that the paper leaves open follow its program, which also rescales the weights every 100
    steps (`rescale`). V and projection keep the model's initialization, and the sin-cos encoding
    replaces learned positions. At equal norms, `impulse` gets closer to the targets, much faster.
    """
    positions, new_positions = start_positions(site, replace=True, scale=1.0)
    positions = jnp.asarray(positions)
    offset_rng, input_rng, solve_rng = jax.random.split(rng, 3)
    placed = place_filters(site.grid, kernel_size)
    targets = jnp.asarray(filter_maps(placed, site.grid))
    num_solved = site.num_layers
    if same_layers:
        num_distinct = 1 if first_input == following_input else 2
        num_solved = min(num_distinct, site.num_layers)
    heads = (num_solved, site.num_heads)
    filter_index = jax.random.randint(offset_rng, heads, 0, len(targets), jnp.int32)
    names = [first_input] + [following_input] * (num_solved - 1)
    input_rngs = jax.random.split(input_rng, num_solved)
    inputs = [
        draw_pseudo_input(layer_rng, name, positions)
        for layer_rng, name in zip(input_rngs, names, strict=True)
    ]
    solve = functools.partial(_solve_2024, sizes=site.sizes, max_steps=max_steps, rescale=rescale)
    query, key, reports = jax.vmap(solve)(
        jax.random.split(solve_rng, num_solved), jnp.stack(inputs), targets[filter_index]
    )
    # All remaining layers are copies of the last solved layer.
    layer = np.minimum(np.arange(site.num_layers), num_solved - 1)
    return AttentionWeights(
        query[layer],
        key[layer],
        report=jax.tree.map(jnp.mean, reports),
        filter_index=filter_index[layer],
        filters=placed,
        **new_positions,
    )


def draw_pseudo_input(
    rng: PRNGKeyArray, name: str, positions: Float[Array | np.ndarray, "N D"]
) -> Float[Array | np.ndarray, "N D"]:
    """Draws one of the pseudo inputs of the 2024 paper (table 6 and its caption), before LayerNorm.

    'uniform' is noise between -1 and 1; 'gaussian' is truncated normal noise of standard deviation
    (1/2)^1/2, as large as the sin-cos encoding; names with a '+' add the noise to the positions.
    """
    if name == "positions":
        return positions
    if name.endswith("uniform"):
        noise = uniform(rng, positions.shape, bound=1.0)
    else:
        noise = trunc_normal(rng, positions.shape, std=0.5**0.5)
    return noise + positions if name.startswith("positions+") else noise


@functools.partial(jax.jit, static_argnames=("sizes", "max_steps", "rescale"))
def _solve_2024(rng, pseudo_input, targets, *, sizes, **options):
    """Solves one layer: `optimize_2024` from a random start."""
    heads = sizes.num_heads
    bound = (sizes.head_dim * heads) ** -0.5
    start = uniform(rng, (2, heads, sizes.width, sizes.head_dim), bound=bound)
    return optimize_2024(tuple(start), pseudo_input, targets, qk_scale=sizes.qk_scale, **options)


def optimize_2024(
    start: tuple[Float[Array, "h D d"], Float[Array, "h D d"]],
    pseudo_input: Float[Array, "N D"],
    targets: Float[Array, "h N N"],
    *,
    qk_scale: float,
    max_steps: int,
    rescale: bool = True,
) -> tuple[Float[Array, "D h d"], Float[Array, "D h d"], SolveReport]:
    """Returns Q, K and a report for one layer after `max_steps` of Adam from `start` = (Q, K).

    Before steps 0, 100, 200, …, every column of Q (norm over D) and every row of K (norm over d) is
    rescaled to n, the mean column norm of Q at the start. Hence ‖Q‖ = n d^1/2, but ‖K‖ = n D^1/2.
    If `rescale` is false, nothing bounds the norms, as in the printed algorithm.
    """
    x = layer_norm(pseudo_input, PSEUDO_INPUT_EPSILON)
    adam = optax.adam(LEARNING_RATE, eps=1e-8)
    norm = jnp.linalg.norm(start[0], axis=1).mean()

    def bound_norms(factors):
        query, key = factors
        query *= norm / jnp.linalg.norm(query, axis=1, keepdims=True)
        return query, key * (norm / jnp.linalg.norm(key, axis=2, keepdims=True))

    def maps(factors):
        queries, keys = (jnp.einsum("nD,hDd->hnd", x, f) for f in factors)
        return jax.nn.softmax(qk_scale * jnp.einsum("hnd,hmd->hnm", queries, keys), axis=-1)

    def loss(factors):
        # The mean is over heads too, which matters because of Adam's ε.
        return jnp.mean((targets - maps(factors)) ** 2)

    def body(step, carry):
        factors, state = carry
        if rescale:
            due = step % RESCALE_EVERY == 0
            factors = jax.lax.cond(due, bound_norms, lambda same: same, factors)
        updates, state = adam.update(jax.grad(loss)(factors), state)
        return optax.apply_updates(factors, updates), state

    query, key = factors = jax.lax.fori_loop(0, max_steps, body, (start, adam.init(start)))[0]
    report = report_on_maps(targets, maps(factors))
    return jnp.moveaxis(query, 0, 1), jnp.moveaxis(key, 0, 1), report


def impulse_2025(
    rng: PRNGKeyArray,
    site: AttentionSite,
    *,
    position_scale: float,
    query_key_norm: float,
    target_scale: float,
    target_noise: float,
    replace_positions: bool,
) -> AttentionWeights:
    """The closed form of "Structured Initialization for Vision Transformers" (arXiv:2505.19985).

    Learned positions are scaled; X is their LayerNorm. The target logits W are `target_scale` where
    the target map is 1, and `target_noise` times truncated normal noise of standard deviation 0.6
    elsewhere; `factor_logits` turns W into Q and K. Heads get offsets in a fixed order, center
    first. V and projection are mimetic, with heads sorted by singular values, as in the program.
    """
    positions, new_positions = start_positions(
        site, replace=replace_positions, scale=position_scale
    )
    noise_rng, vo_rng = jax.random.split(rng)
    placed = place_filters(site.grid)
    targets = jnp.asarray(filter_maps(placed, site.grid))
    # A single row or column of tokens has three offsets.
    order = np.resize([i for i in CENTER_FIRST if i < len(targets)], site.num_heads)
    filter_index = jnp.asarray(np.tile(order, (site.num_layers, 1)), jnp.int32)
    x = layer_norm(jnp.asarray(positions), PSEUDO_INPUT_EPSILON)
    scales = (target_scale, target_noise, query_key_norm)
    query, key, report = _solve_2025(noise_rng, x, targets, filter_index, scales, sizes=site.sizes)
    return AttentionWeights(
        query,
        key,
        *mimetic_vo(vo_rng, site, sort_heads=True),
        report=report,
        filter_index=filter_index,
        filters=placed,
        **new_positions,
    )


@functools.partial(jax.jit, static_argnames="sizes")
def _solve_2025(rng, x, targets, filter_index, scales, *, sizes):
    """Returns Q and K [L, D, h, d] and a report; each head's target is targets[filter_index]."""
    target_scale, target_noise, norm = scales

    def solve_head(rng, target):
        noise = trunc_normal(rng, target.shape, std=0.6)
        logits = target_scale * target + target_noise * jnp.where(target == 0, noise, 0)
        query, key = (norm * factor for factor in factor_logits(x, logits, sizes.head_dim))
        maps = jax.nn.softmax(sizes.qk_scale * (x @ query) @ (x @ key).T, axis=-1)
        return query, key, report_on_maps(target, maps)

    # One head at a time: the N × N logits of all heads of a large model would not fit into memory.
    query, key, reports = jax.lax.map(
        lambda head: solve_head(head[0], targets[head[1]]),
        (jax.random.split(rng, filter_index.size), filter_index.ravel()),
    )
    heads = filter_index.shape
    query, key = (jnp.moveaxis(f.reshape(*heads, *f.shape[1:]), 1, 2) for f in (query, key))
    return query, key, jax.tree.map(jnp.mean, reports)


def factor_logits(
    x: Float[Array, "N D"], logits: Float[Array, "N N"], head_dim: int
) -> tuple[Float[Array, "D d"], Float[Array, "D d"]]:
    """Returns Q and K of Frobenius norm 1 with Q Kᵀ ∝ X⁺ W X⁺ᵀ.

    X⁺ is the pseudo-inverse of X over its top d singular values.
    """
    u, s, vt = jnp.linalg.svd(x, full_matrices=False)
    rank = min(head_dim, len(s))
    inverse = u[:, :rank] / s[None, :rank]
    # X⁺ W X⁺ᵀ = V (S⁻¹ Uᵀ W U S⁻¹) Vᵀ, so the SVD of the small inner matrix is enough.
    factors = split_product(inverse.T @ logits @ inverse, rank)
    query, key = (vt[:rank].T @ f for f in factors)
    return tuple(
        jnp.pad(f / jnp.linalg.norm(f), ((0, 0), (0, head_dim - rank))) for f in (query, key)
    )
