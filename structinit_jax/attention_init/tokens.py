"""`impulse` for attention over a grid of tokens with positions (`AttentionSite`), as in ViT."""

import dataclasses
import functools
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from structinit_jax.attention_init.kernels import (
    Dilation,
    FilterArray,
    assign_by_layer,
    draw_flat,
    filter_maps,
    growing_dilation,
    layer_norm,
    near_identity,
    permutations,
    random_rotations,
    sincos_positions,
)
from structinit_jax.attention_init.sites import AttentionSite, AttentionWeights
from structinit_jax.attention_init.solve import row_space, solve_bank, warn_if_out_of_reach
from structinit_jax.errors import Check, InputError

OpenFraction = Annotated[int | float, Check("a number between 0 and 1", lambda x: 0 < x < 1)]
# Default target mass: this multiple of the share that uniform attention has, and at most
# LARGEST_MASS. It is 0.2 on 8×8 tokens and 0.05 on 16×16, where 0.2 trains worse.
OVER_UNIFORM, LARGEST_MASS = 12.8, 0.2
# Largest rank of the positions, relative to the width, that leaves room for value and projection.
MAX_RANK = 0.9
# σ d norm² D at the start of a solve for a target mass. Logits are proportional to it, and sharp
# maps need about 200 on 7×7 tokens and 850 on 24×24, at any width and number of heads.
START_SHARPNESS = 128


def impulse(
    rng: PRNGKeyArray,
    site: AttentionSite,
    *,
    kernel_size: int = 3,
    filters: FilterArray | None = None,
    dilation: Dilation | None = None,
    target_mass: float | None = None,
    norm: float | None = None,
    mimetic_layers: float = 0.5,
    keep_positions: bool = False,
    patch_scale: float | None = None,
    mlp_scale: float | None = None,
) -> AttentionWeights:
    """Makes each head start as a convolution with one filter; see `attention_init.impulse`.

    Each of the F distinct filters has a target map H [N, N]. Its Q and K [D, d] minimize

        mean of (H - M)²,   M = softmax(σ X Q Kᵀ Xᵀ),   X = LayerNorm(P) = Z Bᵀ.

    M depends on Q and K only through BᵀQ and BᵀK [r, d], which are solved for once per filter; each
    head has a copy of its own, randomly rotated. In the last layers, a share of `mimetic_layers`,
    heads attend to similar tokens instead.
    """
    # Targets H [F, N, N]; heads of layer l draw from H[start:stop], where start, stop = ranges[l].
    if dilation is None and filters is None:
        dilation = growing_dilation(kernel_size, site.num_layers, site.grid)
    targets, ranges = filter_maps(site, kernel_size, filters, 1 if dilation is None else dilation)

    # Row space: coordinates Z [N, r] and orthonormal basis B [D, r]. Learned positions start as
    # noise, so the sin-cos encoding replaces them.
    trainable = site.positions_trainable
    positions = sincos_positions(site.grid, site.width) if trainable else site.require_positions()
    z, basis = row_space(layer_norm(np.asarray(positions)))
    if keep_positions and basis.shape[1] > MAX_RANK * site.width:
        raise InputError(
            f"AttentionSite.positions have rank {basis.shape[1]}, which leaves too little of the "
            f"width {site.width} for value and projection: pass keep_positions=False"
        )

    # Solve at the given norm of Q and K, or at the norm that gives the maps the target mass.
    if norm is None:
        uniform = float(np.minimum(targets, 1 / len(z)).sum() / (targets.max(axis=-1) > 0).sum())
        if target_mass is None:
            target_mass = min(LARGEST_MASS, OVER_UNIFORM * uniform)
            if target_mass <= uniform:  # of wide filters, or on at most 5 tokens
                target_mass = uniform + 0.3 * (1 - uniform)
        elif target_mass <= uniform:
            raise InputError(
                f"target_mass={target_mass:.3g}, but uniform attention has {uniform:.3g} on these "
                "targets: pass a larger target_mass"
            )
        norm = (START_SHARPNESS / (site.qk_scale * site.head_dim * site.width)) ** 0.5
    sizes = dict(head_dim=site.head_dim, qk_scale=site.qk_scale)
    *bank, report = solve_bank(z, targets, norm=norm, target_mass=target_mass, **sizes)

    num_impulse = site.num_layers - round(mimetic_layers * site.num_layers)
    weights = _draw_weights(
        rng,
        bank,
        basis,
        site=dataclasses.replace(site, positions=None),  # hashable, as static arguments must be
        ranges=ranges[:num_impulse],
        keep_positions=keep_positions,
    )
    warn_if_out_of_reach(report)
    return weights._replace(
        positions=jnp.asarray(positions) if trainable else None,
        report=report,
        targets=targets,
        patch_scale=patch_scale,
        mlp_scale=mlp_scale,
    )


@functools.partial(jax.jit, static_argnames=("site", "ranges", "keep_positions"))
def _draw_weights(rng, bank, basis, *, site, ranges, keep_positions):
    """Draws the weights of all heads from `bank`, Q' and K' [F, r, k], and `basis`, B [D, r]."""
    rotation_rng, order_rng, vo_rng, similar_rng = jax.random.split(rng, 4)

    # Rotation: every head draws an R [d, k] with orthonormal columns. From Q' and K' [r, k] of its
    # filter it gets Q = B Q' Rᵀ and K = B K' Rᵀ. Since Rᵀ R = I, the map stays the same, but the
    # weights of heads are independent. Q and K ignore all input outside the row space of X.
    filter_index = assign_by_layer(order_rng, site.num_heads, ranges)
    shape = (*filter_index.shape, site.head_dim, bank[0].shape[-1])
    rotations = random_rotations(rotation_rng, shape)

    def place(factors):
        rotated = jnp.einsum("Lhrk,Lhdk->Lrhd", factors[filter_index], rotations)
        return jnp.einsum("Dr,Lrhd->LDhd", basis, rotated)

    # The last layers attend to similar tokens instead: Q Kᵀ near 0.7 I.
    query, key = add_similar_layers(similar_rng, site, *map(place, bank))

    # V Proj near -0.4 I, so that every layer removes a part of the positions from the residual
    # stream, unless they are kept.
    value, out = value_and_projection(vo_rng, site, basis if keep_positions else None)
    return AttentionWeights(query, key, value, out, filter_index=filter_index)


def add_similar_layers(
    rng: PRNGKeyArray,
    site: AttentionSite,
    query: Float[Array, "l D h d"],
    key: Float[Array, "l D h d"],
) -> tuple[Float[Array, "L D h d"], Float[Array, "L D h d"]]:
    """Appends Q and K of the last layers, up to the site's L, whose heads attend to similar tokens.

    As in `mimetic`, but without its SVD: Q Kᵀ = W Wᵀ A projects A = 0.7 U + 0.7 I onto d
    orthonormal columns W close to its leading singular vectors. These columns come from four
    subspace iterations, which keep 93 to 98 % of the energy that the SVD keeps at widths 96 to 768;
    the SVDs of half of ViT-B take half a minute on a CPU.
    """
    num_similar = site.num_layers - len(query)
    if not num_similar:
        return query, key
    noise_rng, start_rng = jax.random.split(rng)
    heads = (num_similar, site.num_heads, site.width)
    a = near_identity(noise_rng, heads, noise=0.7, identity=0.7)

    def iterate(_, w):
        w = a @ (jnp.swapaxes(a, -1, -2) @ w)
        # Cholesky, since a QR decomposition of this shape takes a hundred times as long on CPUs.
        lower = jnp.linalg.cholesky(jnp.swapaxes(w, -1, -2) @ w)
        identity = jnp.broadcast_to(jnp.eye(site.head_dim), lower.shape)
        inverse = jax.lax.linalg.triangular_solve(lower, identity, left_side=True, lower=True)
        return w @ jnp.swapaxes(inverse, -1, -2)

    if site.head_dim < site.width:
        start = draw_flat(jax.random.normal, start_rng, (*heads, site.head_dim))
        w = jax.lax.fori_loop(0, 4, iterate, start)
    else:  # W Wᵀ = I keeps all of A; Wᵀ W would have no Cholesky factor
        w = jnp.swapaxes(random_rotations(start_rng, (*heads[:2], site.head_dim, site.width)), 2, 3)
    projected = jnp.swapaxes(a, -1, -2) @ w
    balance = (jnp.linalg.norm(projected, axis=(-2, -1), keepdims=True) / site.head_dim**0.5) ** 0.5
    query = jnp.concatenate([query, jnp.moveaxis(balance * w, 1, 2)])
    key = jnp.concatenate([key, jnp.moveaxis(projected / balance, 1, 2)])
    return query, key


def value_and_projection(
    rng: PRNGKeyArray,
    site: AttentionSite,
    kept: Float[Array | np.ndarray, "D r"] | None = None,
) -> tuple[Float[Array, "L D h d"], Float[Array, "L h d D"]]:
    """Returns V = c (I - U / 2) Π and Proj = -c Πᵀ (I - U' / 2), so V Proj ≈ -0.4 (I - noise).

    c² = 0.4, U and U' are uniform noise as in `mimetic`, and the permutation Π distributes the
    channels over the heads: some are left out or used twice unless h d = D. With an orthonormal
    basis `kept`, V ignores inputs in its span, and Proj has no outputs there.
    """
    noise_rng, channel_rng = jax.random.split(rng)
    layers, width = site.num_layers, site.width
    inner, bound = site.num_heads * site.head_dim, (3 / width) ** 0.5
    channels = permutations(jax.random.split(channel_rng, layers), width)
    channels = jnp.tile(channels, (1, -(-inner // width)))[:, :inner]
    identity = jax.nn.one_hot(channels, width)  # [L, inner, D], the rows of Πᵀ
    # 16 random bits are plenty for noise, and half the cost of 32.
    draw = functools.partial(jax.random.bits, dtype="uint16")
    bits = draw_flat(draw, noise_rng, (2, *identity.shape))
    half_noise = bound * ((bits.astype(jnp.float32) + 0.5) / 2**16 - 0.5)
    value, out = 0.4**0.5 * (identity[None] - half_noise)
    heads = (layers, site.num_heads, site.head_dim, width)
    value, out = jnp.moveaxis(value.reshape(heads), -1, 1), -out.reshape(heads)
    if kept is not None:
        value = remove_inputs(value, kept)
        out = out - jnp.einsum("Dr,Lhdr->LhdD", kept, jnp.einsum("LhdE,Er->Lhdr", out, kept))
    return value, out


def remove_inputs(
    kernel: Float[Array, "L D h d"], basis: Float[Array | np.ndarray, "D r"]
) -> Float[Array, "L D h d"]:
    """Removes the part of a kernel that acts on inputs in the span of an orthonormal basis."""
    return kernel - jnp.einsum("Dr,Lrhd->LDhd", basis, jnp.einsum("Er,LEhd->Lrhd", basis, kernel))
