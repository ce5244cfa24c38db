"""Schemes for attention over a grid of tokens with positions (`AttentionSite`), as in ViT.

`impulse` is the method: targets H, row space X = Z Vᵀ, solve, rotation, value and projection.
`default`, `kaiming_uniform` and `mimetic` use no positions, so they also serve attention within
windows and with rotary positions. The papers' own impulse schemes are in `papers`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from structinit_jax.attention_init.kernels import (
    Filters,
    assign,
    draw_flat,
    filter_maps,
    growing_dilation,
    layer_norm,
    random_rotations,
    sincos_positions,
    trunc_normal,
)
from structinit_jax.attention_init.sites import AttentionSite, AttentionWeights, unless_one
from structinit_jax.attention_init.solve import (
    VO_INITS,
    factors_near_identity,
    loss_rows,
    near_identity,
    remove_inputs,
    remove_outputs,
    require_narrow_heads,
    row_space,
    solve_bank,
    start_factors,
    warn_if_out_of_reach,
)
from structinit_jax.errors import InputError

# Largest rank of the positions, relative to the width, that leaves room for value and projection.
MAX_RANK = 0.9
# σ d norm² D at the start of a solve for a target mass. Logits are proportional to it, and sharp
# maps need about 200 on 7×7 tokens and 850 on 24×24, at any width and number of heads. From norms
# far above that, a solve takes several times as many steps.
START_SHARPNESS = 128


def impulse(
    rng: PRNGKeyArray,
    site: AttentionSite,
    filters: Filters,
    *,
    target_mass: float = 0.2,
    norm: float | None = None,
    mimetic_layers: float = 0.5,
    vo_init: str = "balanced",
    keep_positions: bool = False,
    patch_scale: float = 1.0,
    mlp_scale: float = 1.0,
    max_steps: int = 400,
) -> AttentionWeights:
    """Layers that start as convolutions with one filter per head; options as in the public one.

    Each of the F distinct filters has a target map H [N, N]. Over Q and K [D, d] of a head,

        mean of (H - M)²,   M = softmax(σ X Q Kᵀ Xᵀ),   X = LayerNorm(P) = Z Vᵀ

    is minimized once per filter, in the coordinates VᵀQ and VᵀK [r, d] of the row space of X.
    Every head gets a copy Q R, K R of its filter's solution with a random orthogonal R [d, d] of
    its own: M is the same, the weights are independent. Query and key are zero outside the row
    space, so at first they see positions alone. The last layers take Q and K from
    `similar_query_key` instead.
    """
    # Targets H [F, N, N]; layer l uses the filters from ranges[l][0] to ranges[l][1].
    if filters.dilation is None and filters.is_impulse:
        dilation = growing_dilation(filters.kernel_size, site.num_layers, site.grid)
        filters = dataclasses.replace(filters, dilation=dilation)
    targets, ranges = filter_maps(site, filters)

    # Row space: coordinates Z [N, r] and basis V [D, r].
    trainable = site.positions_trainable
    positions = sincos_positions(site.grid, site.width) if trainable else site.require_positions()
    z, v = row_space(layer_norm(positions))
    keep_positions = keep_positions and vo_init != "default"
    if keep_positions and isinstance(v, np.ndarray) and v.shape[1] > MAX_RANK * site.width:
        raise InputError(
            f"AttentionSite.positions have rank {v.shape[1]}, which leaves too few of the "
            f"{site.width} channels for value and projection: pass keep_positions=False, so that "
            "these may change the positions"
        )

    # Sharpness: a fixed norm of Q and K, or the one at which maps have the target mass.
    if norm is None:
        norm = (START_SHARPNESS / (site.qk_scale * site.head_dim * site.width)) ** 0.5
    else:
        target_mass = None
    weights = _solve_and_place(
        rng,
        start_factors(z, targets, site.head_dim),
        z,
        v,
        targets[:, loss_rows(site.num_tokens)],
        norm,
        target_mass,
        # Without positions a site is hashable, as static arguments must be.
        site=dataclasses.replace(site, positions=None, positions_trainable=False),
        ranges=ranges,
        offsets=filters.offsets,
        same_layers=filters.same_layers,
        num_mimetic=round(mimetic_layers * site.num_layers),
        vo_init=vo_init,
        keep_positions=keep_positions,
        max_steps=max_steps,
    )
    warn_if_out_of_reach(weights.report)
    return weights._replace(
        targets=targets,
        positions=jnp.asarray(positions) if trainable else None,
        patch_scale=unless_one(patch_scale),
        mlp_scale=unless_one(mlp_scale),
    )


STATIC = ["site", "ranges", "offsets", "same_layers", "num_mimetic"]
STATIC += ["vo_init", "keep_positions", "max_steps"]


@functools.partial(jax.jit, static_argnames=STATIC)
def _solve_and_place(
    rng,
    starts,
    z,
    v,
    targets,
    norm,
    target_mass,
    *,
    site,
    ranges,
    offsets,
    same_layers,
    num_mimetic,
    vo_init,
    keep_positions,
    max_steps,
):
    """Runs everything that is not fixed by the site as one compiled program, X = Z Vᵀ."""
    rotation_rng, order_rng, vo_rng = jax.random.split(rng, 3)
    bank = solve_bank(
        starts,
        z,
        targets,
        head_dim=site.head_dim,
        qk_scale=site.qk_scale,
        norm=norm,
        target_mass=target_mass,
        max_steps=max_steps,
    )

    # Rotation: Q = V bank[filter] Rᵀ, and K with the same R.
    shape = (site.num_layers, site.num_heads)
    filter_index = assign(order_rng, shape, ranges, order=offsets, same_layers=same_layers)
    shape = (*shape, site.head_dim, bank.query.shape[-1])
    rotations = random_rotations(rotation_rng, shape, same_layers=same_layers)

    def place(factors):
        rotated = jnp.einsum("Lhrk,Lhdk->Lrhd", factors[filter_index], rotations)
        return jnp.einsum("Dr,Lrhd->LDhd", v, rotated)

    query, key = place(bank.query), place(bank.key)

    # The last layers attend to similar tokens instead: Q Kᵀ near 0.7 I.
    if num_mimetic:
        content = similar_query_key(jax.random.fold_in(vo_rng, 1), site, num_mimetic)
        first = slice(site.num_layers - num_mimetic)
        query, key = (
            jnp.concatenate([positional[first], similar])
            for positional, similar in zip((query, key), content, strict=True)
        )

    # Value and projection: V Proj near -0.4 I, so that every layer removes a part of the positions
    # from the residual stream, unless they are kept.
    value, out = VO_INITS[vo_init](vo_rng, site)
    if keep_positions:
        value, out = remove_inputs(value, v), remove_outputs(out, v)
    return AttentionWeights(query, key, value, out, report=bank.report, filter_index=filter_index)


def similar_query_key(
    rng: PRNGKeyArray, site: AttentionSite, num_layers: int
) -> tuple[Float[Array, "L D h d"], Float[Array, "L D h d"]]:
    """Draws Q and K of heads that attend to similar tokens, as in `mimetic` but without its SVD.

    Q Kᵀ is A = 0.7 U + 0.7 I projected on d dimensions, near those of its largest singular values:
    four subspace iterations keep 93 to 98 % of the energy that the SVD keeps, for widths from 96 to
    768, where 72 SVDs (half of ViT-B) would take half a minute on a CPU.
    """
    noise_rng, start_rng = jax.random.split(rng)
    heads = (num_layers, site.num_heads, site.width)
    a = near_identity(noise_rng, heads, noise=0.7, identity=0.7)

    def iterate(_, query):
        query = a @ (jnp.swapaxes(a, -1, -2) @ query)
        # Cholesky, since a QR decomposition of this shape takes a hundred times as long on CPUs.
        lower = jnp.linalg.cholesky(jnp.swapaxes(query, -1, -2) @ query)
        identity = jnp.broadcast_to(jnp.eye(site.head_dim), lower.shape)
        inverse = jax.lax.linalg.triangular_solve(lower, identity, left_side=True, lower=True)
        return query @ jnp.swapaxes(inverse, -1, -2)

    start = draw_flat(jax.random.normal, start_rng, (*heads, site.head_dim))
    query = jax.lax.fori_loop(0, 4, iterate, start)
    key = jnp.swapaxes(a, -1, -2) @ query
    balance = (jnp.linalg.norm(key, axis=(-2, -1), keepdims=True) / site.head_dim**0.5) ** 0.5
    return jnp.moveaxis(balance * query, 1, 2), jnp.moveaxis(key / balance, 1, 2)


def default(
    rng: PRNGKeyArray,
    site: AttentionSite,
    *,
    position_scale: float = 1.0,
    query_key_scale: float = 1.0,
    value_out_scale: float = 1.0,
) -> AttentionWeights:
    """The model's `base_init`: timm's truncated normal of deviation 0.02, or PyTorch's uniform."""
    if site.base_init == "pytorch":
        weights = kaiming_uniform(rng, site)
    else:
        weights = _draw_all(rng, site, functools.partial(trunc_normal, std=0.02))
    return _scale(weights, position_scale, query_key_scale, value_out_scale)


def kaiming_uniform(rng: PRNGKeyArray, site: AttentionSite) -> AttentionWeights:
    """Uniform between ±(inputs)^-1/2, PyTorch's default for Linear."""
    inner = site.num_heads * site.head_dim
    weights = _draw_all(rng, site, functools.partial(jax.random.uniform, minval=-1.0, maxval=1.0))
    query, key, value = (site.width**-0.5 * w for w in weights[:3])
    return AttentionWeights(query, key, value, inner**-0.5 * weights.out)


def mimetic(
    rng: PRNGKeyArray,
    site: AttentionSite,
    *,
    position_scale: float = 1.0,
    query_key_scale: float = 1.0,
    value_out_scale: float = 1.0,
) -> AttentionWeights:
    """Trockman & Kolter (2023): Q Kᵀ = 0.7 U + 0.7 I per head and V Proj ≈ -0.4 I, by SVD.

    As in the programs of both papers, which store the factors of A Bᵀ = 0.4 U - 0.4 I untransposed
    as PyTorch weights: V = Aᵀ, Proj = B. The heads are then equally strong. With V = A, Proj = Bᵀ,
    the formula's form, they are sorted by singular values (`solve.mimetic_vo`).
    """
    require_narrow_heads(site)
    qk_rng, vo_rng = jax.random.split(rng)
    layers, width, heads = site.num_layers, site.width, (site.num_heads, site.head_dim)
    query, key = factors_near_identity(
        qk_rng, (layers, site.num_heads, width), site.head_dim, noise=0.7, identity=0.7
    )
    a, b = factors_near_identity(vo_rng, (layers, width), width, noise=0.4, identity=-0.4)
    inner = heads[0] * heads[1]
    value = jnp.swapaxes(a, -1, -2)[..., :inner].reshape(layers, width, *heads)
    out = b[:, :inner].reshape(layers, *heads, width)
    weights = AttentionWeights(jnp.moveaxis(query, 1, 2), jnp.moveaxis(key, 1, 2), value, out)
    return _scale(weights, position_scale, query_key_scale, value_out_scale)


def _draw_all(rng, site, draw):
    layers, width, heads, dim = site.num_layers, site.width, site.num_heads, site.head_dim
    rngs = jax.random.split(rng, 4)
    query, key, value = (draw_flat(draw, r, (layers, width, heads, dim)) for r in rngs[:3])
    out = draw_flat(draw, rngs[3], (layers, heads, dim, width))
    return AttentionWeights(query, key, value, out)


def _scale(weights, position_scale, query_key_scale, value_out_scale):
    """Multiplies weights and positions by the options of the 2025 program."""
    return AttentionWeights(
        query_key_scale * weights.query,
        query_key_scale * weights.key,
        value_out_scale * weights.value,
        value_out_scale * weights.out,
        position_scale=unless_one(position_scale),
    )
