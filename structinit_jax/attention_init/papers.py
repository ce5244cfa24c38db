"""The impulse initializations of the papers as published, for comparison with our `impulse`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PRNGKeyArray

from structinit_jax.attention_init.kernels import (
    assign,
    check_kernel_size,
    convolution_maps,
    impulse_kernels,
)
from structinit_jax.attention_init.registry import register
from structinit_jax.attention_init.sites import AttentionSite, AttentionWeights
from structinit_jax.attention_init.solve import draw_pseudo_input, layer_norm, report_on_maps
from structinit_jax.attention_init.tokens import mimetic_vo, split_product

RESCALE_EVERY = 100  # steps of algorithm 1 between two rescalings of the columns
# Gradients of equation 8 are so small that Adam's ε decides how far the columns drift outside the
# encoding's row space. The paper does not say how its loss is averaged over heads, which scales ε.
# This value reproduces the authors' program (loss 0.0021, mass 0.28); 1e-8 ends at 0.0024, 0.20.
ADAM_EPSILON_2024 = 1.6e-7
POSITION_SCALE_2025 = 18.0
FROBENIUS_NORM_2025 = 7.0


@register("impulse_2024", AttentionSite)
def impulse_2024(
    rng: PRNGKeyArray,
    site: AttentionSite,
    *,
    kernel_size: int = 3,
    same_layers: bool = True,
    first_input: str = "positions",
    following_input: str = "positions",
    max_steps: int = 10_000,
    learning_rate: float = 1e-4,
) -> AttentionWeights:
    """Algorithm 1 of "Structured Initialization for Attention in Vision Transformers" (2024).

    Adam on Q and K of every head, against the mean squared error of its map (equation 8); every 100
    steps each column is rescaled to the mean column norm at the start. V and projection keep the
    model's initialization. `impulse` gets closer to the same targets, much faster.

    Args:
      rng: Random key.
      site: Layers to initialize.
      kernel_size: Kernel size f, odd. Each head draws one of the f² offsets, with replacement.
      same_layers: Whether all layers share their Q and K, as in the paper's main results.
      first_input: Pseudo input of the first layer (table 6): 'positions', 'uniform', 'gaussian',
        'positions+uniform' or 'positions+gaussian'.
      following_input: Pseudo input of the other layers.
      max_steps: Number of Adam steps.
      learning_rate: Adam's learning rate.
    """
    check_kernel_size(kernel_size, site.grid)
    positions = site.require_positions()
    offset_rng, first_rng, following_rng = jax.random.split(rng, 3)
    targets = jnp.asarray(convolution_maps(impulse_kernels(kernel_size), site.grid))

    def solve_layers(rng, pseudo_input, filter_index):
        input_rng, solve_rng = jax.random.split(rng)
        x = layer_norm(jnp.asarray(draw_pseudo_input(input_rng, pseudo_input, positions)))
        *factors, report = _solve_2024(
            solve_rng,
            x,
            targets[filter_index.reshape(-1)],
            qk_scale=site.qk_scale,
            head_dim=site.head_dim,
            max_steps=max_steps,
            learning_rate=learning_rate,
        )
        shape = (*filter_index.shape, site.width, site.head_dim)
        return *(jnp.moveaxis(f.reshape(shape), 1, 2) for f in factors), report

    # Layers with the same pseudo input are solved together; equal layers are solved once.
    two_inputs = first_input != following_input and site.num_layers > 1
    num_solved = 1 + two_inputs if same_layers else site.num_layers
    shape = (num_solved, site.num_heads)
    filter_index = assign(offset_rng, shape, len(targets), order="random", same_layers=same_layers)
    first = 1 if two_inputs else num_solved
    solved = [solve_layers(first_rng, first_input, filter_index[:first])]
    if two_inputs:
        solved.append(solve_layers(following_rng, following_input, filter_index[first:]))
    queries, keys, reports = zip(*solved, strict=True)
    query, key = jnp.concatenate(queries), jnp.concatenate(keys)
    report = jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *reports)
    # The last solved layer is repeated for all layers that are equal to it.
    layer = np.minimum(np.arange(site.num_layers), len(query) - 1)
    return AttentionWeights(
        query[layer], key[layer], report=report, filter_index=filter_index[layer]
    )


@functools.partial(jax.jit, static_argnames=("qk_scale", "head_dim", "max_steps", "learning_rate"))
def _solve_2024(rng, x, targets, *, qk_scale, head_dim, max_steps, learning_rate):
    """Returns Q and K [H, D, d] and a report for pseudo input x [N, D] and targets [H, N, N]."""
    shape = (len(targets), x.shape[1], head_dim)
    bound = x.shape[1] ** -0.5  # (1 / (d h))^1/2 with D = d h
    uniform = functools.partial(jax.random.uniform, shape=shape, minval=-bound, maxval=bound)
    start = tuple(map(uniform, jax.random.split(rng)))
    adam = optax.adam(learning_rate, eps=ADAM_EPSILON_2024)

    def column_norms(factor):
        return jnp.sqrt(jnp.sum(factor**2, axis=1, keepdims=True))

    start_norms = tuple(column_norms(f).mean(axis=(1, 2), keepdims=True) for f in start)

    def maps(factors):
        queries, keys = (jnp.einsum("nD,HDd->Hnd", x, f) for f in factors)
        return jax.nn.softmax(qk_scale * jnp.einsum("Hnd,Hmd->Hnm", queries, keys), axis=-1)

    def loss(factors):
        return jnp.mean((targets - maps(factors)) ** 2, axis=(1, 2)).sum()

    def body(step, carry):
        factors, state = carry
        updates, state = adam.update(jax.grad(loss)(factors), state)
        factors = optax.apply_updates(factors, updates)
        due = step % RESCALE_EVERY == 0
        factors = tuple(
            jnp.where(due, f * (n / column_norms(f)), f)
            for f, n in zip(factors, start_norms, strict=True)
        )
        return factors, state

    query, key = jax.lax.fori_loop(0, max_steps, body, (start, adam.init(start)))[0]
    norm = jnp.mean(jnp.stack([column_norms(query), column_norms(key)]))
    report = report_on_maps(targets, maps((query, key)), steps=max_steps, norm=norm)
    return query, key, report


@register("impulse_2025", AttentionSite)
def impulse_2025(
    rng: PRNGKeyArray, site: AttentionSite, *, kernel_size: int = 3
) -> AttentionWeights:
    """The closed form of "Structured Initialization for Vision Transformers" (arXiv:2505.19985).

    Learned positions are multiplied by 18; X is their LayerNorm. The target logits W are 1000 where
    the target map is 1, and 3 times truncated normal noise of standard deviation 0.6 elsewhere;
    `factor_logits` gives Q and K. Offsets go to heads in a fixed order, center first. V and
    projection are mimetic.

    Args:
      rng: Random key.
      site: Layers to initialize.
      kernel_size: Kernel size f, odd; 3 in the paper.
    """
    check_kernel_size(kernel_size, site.grid)
    positions = site.require_positions()
    if site.positions_trainable:
        positions = POSITION_SCALE_2025 * jnp.asarray(positions)
    noise_rng, vo_rng, offset_rng = jax.random.split(rng, 3)
    targets = jnp.asarray(convolution_maps(impulse_kernels(kernel_size), site.grid))
    shape = (site.num_layers, site.num_heads)
    filter_index = assign(offset_rng, shape, len(targets), order="center_first")
    x = layer_norm(jnp.asarray(positions))
    query, key, report = _solve_2025(
        noise_rng, x, targets, filter_index, head_dim=site.head_dim, qk_scale=site.qk_scale
    )
    value, out = mimetic_vo(vo_rng, site)
    initial = positions if site.positions_trainable else None
    return AttentionWeights(query, key, value, out, initial, report, filter_index)


@functools.partial(jax.jit, static_argnames=("head_dim", "qk_scale"))
def _solve_2025(rng, x, targets, filter_index, *, head_dim, qk_scale):
    """Returns Q and K [L, D, h, d] and a report; each head's target is targets[filter_index]."""
    std, cut = 0.6, 2 / 0.6  # truncated at ±2 in absolute terms, as timm does
    layers, heads = filter_index.shape

    def solve_head(rng, target):
        noise = std * jax.random.truncated_normal(rng, -cut, cut, target.shape)
        logits = 1000 * target + 3 * jnp.where(target == 0, noise, 0)
        query, key = factor_logits(x, logits, head_dim)
        maps = jax.nn.softmax(qk_scale * (x @ query) @ (x @ key).T, axis=-1)
        norm = FROBENIUS_NORM_2025 / head_dim**0.5
        return query, key, report_on_maps(target[None], maps[None], steps=0, norm=norm)

    # One head at a time: the N × N logits of all heads of a large model do not fit into memory.
    query, key, reports = jax.lax.map(
        lambda head: solve_head(head[0], targets[head[1]]),
        (jax.random.split(rng, filter_index.size), filter_index.ravel()),
    )
    query, key = (jnp.moveaxis(f.reshape(layers, heads, *f.shape[1:]), 1, 2) for f in (query, key))
    return query, key, jax.tree.map(jnp.mean, reports)


def factor_logits(
    x: Float[Array, "N D"], logits: Float[Array, "N N"], head_dim: int
) -> tuple[Float[Array, "D d"], Float[Array, "D d"]]:
    """Returns Q, K of Frobenius norm 7 with Q Kᵀ ∝ X⁺ W X⁺ᵀ, X⁺ over X's top d singular values."""
    u, s, vt = jnp.linalg.svd(x, full_matrices=False)
    rank = min(head_dim, len(s))
    inverse = u[:, :rank] / s[None, :rank]
    # X⁺ W X⁺ᵀ = V (S⁻¹ Uᵀ W U S⁻¹) Vᵀ, so the SVD of the small inner matrix is enough.
    factors = split_product(inverse.T @ logits @ inverse, rank)
    query, key = (vt[:rank].T @ f for f in factors)
    return tuple(
        jnp.pad(FROBENIUS_NORM_2025 / jnp.linalg.norm(f) * f, ((0, 0), (0, head_dim - rank)))
        for f in (query, key)
    )
