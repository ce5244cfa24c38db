"""The impulse initializations of the papers, as published: references for `impulse`, our own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from structinit_jax.attention_init.baselines import mimetic_vo, split_product
from structinit_jax.attention_init.convolution import placed_filters
from structinit_jax.attention_init.kernels import (
    assign_filters,
    check_kernel_size,
    convolution_maps,
    impulse_kernels,
)
from structinit_jax.attention_init.pseudo_input import draw_pseudo_input, layer_norm
from structinit_jax.attention_init.sites import (
    AttentionInit,
    AttentionWeights,
    ConvSite,
    Site,
    SolveReport,
    Weights,
    check_positive,
    require_attention,
    require_positions,
)
from structinit_jax.attention_init.solve import closeness

RESCALE_EVERY = 100  # steps of algorithm 1 between two rescalings of the columns
# Gradients of equation 8 are so small that Adam's ε decides how far the columns drift outside the
# encoding's row space. The paper leaves open how its loss is averaged over heads, and with it ε.
# This one ends at the figures of the authors' program (loss 0.0021, share 0.28, norm 0.67); optax's
# default of 1e-8 ends at 0.0024 and 0.20.
ADAM_EPSILON_2024 = 1.6e-7
POSITION_SCALE_2025 = 18.0
FROBENIUS_NORM_2025 = 7.0


def impulse_2024(
    kernel_size: int = 3,
    *,
    same_layers: bool = True,
    first_input: str = "positions",
    following_input: str = "positions",
    max_steps: int = 10_000,
    learning_rate: float = 1e-4,
) -> AttentionInit:
    """Algorithm 1 of "Structured Initialization for Attention in Vision Transformers" (2024).

    Adam on the full Q and K of every head, against the mean squared error of its map (equation 8);
    every 100 steps each column is rescaled to the mean column norm of the start. V and projection
    keep the model's default. Made for comparison: `impulse` solves the same problem closer, and
    thousands of times faster.

    The filters of a depthwise convolution (`ConvSite`) are those of the paper's table 4: each
    channel's an impulse at a place drawn independently from the model's own kernel. `kernel_size`
    may be at most that, and the other options have no part.

    Args:
      kernel_size: f. Each head draws one of the f² offsets, with replacement.
      same_layers: whether all layers share their Q and K, as in the paper's main results.
      first_input: pseudo input of the first layer (table 6): 'positions', 'uniform', 'gaussian',
        'positions+uniform' or 'positions+gaussian'.
      following_input: the same for the layers behind it.
      max_steps: Adam's steps; there is no other stop.
      learning_rate: Adam's.
    """
    check_kernel_size(kernel_size)
    check_positive("max_steps", max_steps)
    check_positive("learning_rate", learning_rate)

    def init(key: PRNGKeyArray, site: Site) -> Weights:
        if isinstance(site, ConvSite):
            return placed_filters(key, site, kernel_size=kernel_size)
        require_attention(site, "impulse_2024")
        check_kernel_size(kernel_size, site.grid)
        positions = require_positions(site, "impulse_2024")
        offset_key, first_key, rest_key = jax.random.split(key, 3)
        targets = jnp.asarray(convolution_maps(impulse_kernels(kernel_size), site.grid))
        solve = functools.partial(
            _solve_2024,
            qk_scale=site.qk_scale,
            head_dim=site.head_dim,
            max_steps=max_steps,
            learning_rate=learning_rate,
        )

        def solve_layers(key, name, filters):
            input_key, solve_key = jax.random.split(key)
            x = layer_norm(jnp.asarray(draw_pseudo_input(input_key, name, positions)))
            layers, heads = filters.shape
            query, key_, report = solve(solve_key, x, targets[filters.reshape(-1)])
            shape = (layers, heads, site.width, site.head_dim)
            return (
                jnp.moveaxis(query.reshape(shape), 1, 2),
                jnp.moveaxis(key_.reshape(shape), 1, 2),
                report,
            )

        # Layers of one pseudo input are solved together; equal layers are solved once.
        split_inputs = first_input != following_input and site.num_layers > 1
        if same_layers:
            groups = [1, 1] if split_inputs else [1]
        else:
            groups = [1, site.num_layers - 1] if split_inputs else [site.num_layers]
        filters = assign_filters(
            offset_key, (sum(groups), site.num_heads), len(targets), order="random"
        )
        if same_layers:
            filters = jnp.broadcast_to(filters[:1], filters.shape)
        parts = [solve_layers(first_key, first_input, filters[: groups[0]])]
        if split_inputs:
            parts.append(solve_layers(rest_key, following_input, filters[groups[0] :]))
        query, key_ = (jnp.concatenate([part[i] for part in parts]) for i in (0, 1))
        report = jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *[p[2] for p in parts])
        # The last solved layer stands for all that are equal to it.
        layer = np.minimum(np.arange(site.num_layers), len(query) - 1)
        return AttentionWeights(
            query[layer], key_[layer], report=report, filter_index=filters[layer]
        )

    return init


@functools.partial(jax.jit, static_argnames=("qk_scale", "head_dim", "max_steps", "learning_rate"))
def _solve_2024(
    key: PRNGKeyArray,
    x: Float[Array, "N D"],
    targets: Float[Array, "H N N"],
    *,
    qk_scale: float,
    head_dim: int,
    max_steps: int,
    learning_rate: float,
) -> tuple[Float[Array, "H D d"], Float[Array, "H D d"], SolveReport]:
    shape = (len(targets), x.shape[1], head_dim)
    bound = x.shape[1] ** -0.5  # (1 / (d h))^1/2 with D = d h
    start = tuple(
        jax.random.uniform(k, shape, minval=-bound, maxval=bound) for k in jax.random.split(key)
    )
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

    query, key_ = jax.lax.fori_loop(0, max_steps, body, (start, adam.init(start)))[0]
    norm = jnp.mean(jnp.stack([column_norms(query), column_norms(key_)]))
    report = closeness(targets, maps((query, key_)), steps=max_steps, norm=norm)
    return query, key_, report


def impulse_2025(kernel_size: int = 3) -> AttentionInit:
    """The closed form of "Structured Initialization for Vision Transformers" (arXiv:2505.19985).

    Learned positions are multiplied by 18; X is their LayerNorm. The wanted logits are W = 1000
    where the target map is 1, and 3 times truncated normal noise of deviation 0.6 elsewhere. With
    X⁺ the pseudo-inverse over X's top d singular values, X⁺ W X⁺ᵀ is factored by singular value
    decomposition, and Q and K are each scaled to Frobenius norm 7. Offsets go to heads in a fixed
    order, centre first. V and projection are mimetic.

    Args:
      kernel_size: f, 3 in the paper.
    """
    check_kernel_size(kernel_size)

    def init(key: PRNGKeyArray, site: Site) -> AttentionWeights:
        require_attention(site, "impulse_2025")
        check_kernel_size(kernel_size, site.grid)
        positions = require_positions(site, "impulse_2025")
        if site.positions_trainable:
            positions = POSITION_SCALE_2025 * jnp.asarray(positions)
        noise_key, vo_key, order_key = jax.random.split(key, 3)
        targets = jnp.asarray(convolution_maps(impulse_kernels(kernel_size), site.grid))
        shape = (site.num_layers, site.num_heads)
        filters = assign_filters(order_key, shape, len(targets), order="centre_first")
        x = layer_norm(jnp.asarray(positions))
        query, key_, report = _solve_2025(
            noise_key, x, targets, filters, head_dim=site.head_dim, qk_scale=site.qk_scale
        )
        value, out = mimetic_vo(vo_key, site.num_layers, site.width, site.num_heads, site.head_dim)
        return AttentionWeights(
            query,
            key_,
            value,
            out,
            positions if site.positions_trainable else None,
            report,
            filters,
        )

    return init


@functools.partial(jax.jit, static_argnames=("head_dim", "qk_scale"))
def _solve_2025(
    key: PRNGKeyArray,
    x: Float[Array, "N D"],
    targets: Float[Array, "F N N"],
    filters: Int[Array, "L h"],
    *,
    head_dim: int,
    qk_scale: float,
) -> tuple[Float[Array, "L D h d"], Float[Array, "L D h d"], SolveReport]:
    std, cut = 0.6, 2 / 0.6  # truncated at ±2 in absolute terms, as timm does
    layers, heads = filters.shape

    def solve_head(head):
        key, target = head
        noise = std * jax.random.truncated_normal(key, -cut, cut, target.shape)
        logits = 1000 * target + 3 * jnp.where(target == 0, noise, 0)
        query, key_ = factor_logits(x, logits, head_dim)
        maps = jax.nn.softmax(qk_scale * (x @ query) @ (x @ key_).T, axis=-1)
        norm = FROBENIUS_NORM_2025 / head_dim**0.5
        return query, key_, closeness(target[None], maps[None], steps=0, norm=norm)

    # One head after the other: the N × N logits of all heads of a large model do not fit at once.
    keys = jax.random.split(key, filters.size)
    solved = jax.lax.map(
        lambda head: solve_head((head[0], targets[head[1]])), (keys, filters.ravel())
    )
    query, key_, reports = solved
    query, key_ = (
        jnp.moveaxis(f.reshape(layers, heads, *f.shape[1:]), 1, 2) for f in (query, key_)
    )
    return query, key_, jax.tree.map(jnp.mean, reports)


def factor_logits(
    x: Float[Array, "N D"], logits: Float[Array, "N N"], head_dim: int
) -> tuple[Float[Array, "D d"], Float[Array, "D d"]]:
    """Q and K of Frobenius norm 7 with Q Kᵀ ∝ X⁺ W X⁺ᵀ, X⁺ over X's top d singular values."""
    u, s, vt = jnp.linalg.svd(x, full_matrices=False)
    rank = min(head_dim, len(s))
    inverse = u[:, :rank] / s[None, :rank]
    # X⁺ W X⁺ᵀ = V (S⁻¹ Uᵀ W U S⁻¹) Vᵀ: its decomposition is that of the small inner matrix.
    factors = split_product(inverse.T @ logits @ inverse, rank)
    query, key = (vt[:rank].T @ f for f in factors)
    return tuple(
        jnp.pad(FROBENIUS_NORM_2025 / jnp.linalg.norm(f) * f, ((0, 0), (0, head_dim - rank)))
        for f in (query, key)
    )
