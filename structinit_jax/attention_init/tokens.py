"""Schemes for attention over a grid of tokens with positions (`AttentionSite`), as in ViT.

`default`, `kaiming_uniform` and `mimetic` use no positions, so they also serve attention within
windows and with rotary positions. The papers' impulse schemes are in `papers`.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from structinit_jax.attention_init.draw import draw_flat, trunc_normal
from structinit_jax.attention_init.kernels import (
    assign,
    growing_dilation,
    random_rotations,
    target_maps,
)
from structinit_jax.attention_init.pseudo_input import layer_norm, sincos_positions
from structinit_jax.attention_init.registry import register
from structinit_jax.attention_init.report import TARGET_MASS
from structinit_jax.attention_init.sites import (
    AttentionSite,
    AttentionWeights,
    RotarySite,
    WindowSite,
    unless_one,
)
from structinit_jax.attention_init.solve import (
    STATIC_OPTIONS,
    loss_rows,
    row_space,
    solve_bank,
    start_factors,
)
from structinit_jax.attention_init.value_out import (
    VO_INITS,
    factors_near_identity,
    remove_inputs,
    remove_outputs,
    require_narrow_heads,
)
from structinit_jax.errors import InputError

# Largest rank of the positions, relative to the width, that leaves room for value and projection.
MAX_RANK = 0.9
# σ d norm² D at the start of a solve for a target mass. Logits are proportional to it, and sharp
# maps need about 200 on 7×7 tokens and 850 on 24×24, at any width and number of heads. From norms
# far above that, a solve takes several times as many steps.
START_SHARPNESS = 128


@register("default", AttentionSite, RotarySite, WindowSite)
def default(
    rng: PRNGKeyArray,
    site: AttentionSite,
    *,
    position_scale: float = 1.0,
    query_key_scale: float = 1.0,
    value_out_scale: float = 1.0,
) -> AttentionWeights:
    """The model's `base_init`: timm's truncated normal of deviation 0.02, or PyTorch's uniform.

    Args:
      rng: Random key.
      site: Layers to initialize.
      position_scale: Factor on learned positions. The factors are those of the 2025 program.
      query_key_scale: Factor on query and key.
      value_out_scale: Factor on value and projection.
    """
    if site.base_init == "pytorch":
        weights = kaiming_uniform(rng, site)
    else:
        weights = _draw_all(rng, site, functools.partial(trunc_normal, std=0.02))
    return _scale(weights, position_scale, query_key_scale, value_out_scale)


@register("kaiming_uniform", AttentionSite, RotarySite, WindowSite)
def kaiming_uniform(rng: PRNGKeyArray, site: AttentionSite) -> AttentionWeights:
    """Uniform between ±(inputs)^-1/2, PyTorch's default for Linear."""
    inner = site.num_heads * site.head_dim
    weights = _draw_all(rng, site, functools.partial(jax.random.uniform, minval=-1.0, maxval=1.0))
    query, key, value = (site.width**-0.5 * w for w in weights[:3])
    return AttentionWeights(query, key, value, inner**-0.5 * weights.out)


@register("mimetic", AttentionSite, RotarySite, WindowSite)
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
    the formula's form, they are sorted by singular values (`value_out.mimetic_vo`).

    Args:
      rng: Random key.
      site: Layers to initialize.
      position_scale: Factor on learned positions. The factors are those of the 2025 program.
      query_key_scale: Factor on query and key.
      value_out_scale: Factor on value and projection.
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


@register("impulse", AttentionSite)
def impulse(
    rng: PRNGKeyArray,
    site: AttentionSite,
    *,
    kernel_size: int | Sequence[int] = 3,
    filters: str | np.ndarray = "impulse",
    sigma: float = 0.7,
    dilation: int | Sequence[int] | None = None,
    offsets: str = "even",
    same_layers: bool = False,
    target_mass: float | None = None,
    norm: float | None = None,
    vo_init: str = "balanced",
    keep_positions: bool = True,
    patch_scale: float = 0.3,
    mlp_scale: float = 0.0,
    optimizer: str = "lbfgs",
    learning_rate: float = 1e-2,
    max_steps: int = 400,
) -> AttentionWeights:
    """Impulse initialization: layers that start as convolutions with one filter per head.

    The distinct filters are solved once in the row space of the position encoding (`solve`). Every
    head gets a copy multiplied by its own random rotation R of the head's channels: Q R and K R
    have the same map as Q and K, but independent weights. Query and key are zero outside the row
    space, so at first they see positions alone. Trainable positions start from the sin-cos
    encoding.

    The defaults were tuned on Fashion-MNIST. On CIFAR-10 they train worse than 'mimetic', and on
    2,000 images worse than 'default': for photographs, use 'mimetic' (README).

    Args:
      rng: Random key.
      site: Layers to initialize.
      kernel_size: Kernel size f, odd, at most the grid's shorter side; or one per layer. Not for
        convolutions, whose filters fill the model's own kernel. Arrays as filters have their own.
      filters: 'impulse': one token. 'gaussian': a Gaussian of standard deviation `sigma`.
        'difference_of_gaussians': the positive part of a Gaussian minus one twice as wide; not for
        convolutions. 'box': the mean over the whole kernel, a single filter. Or an array of kernels
        [F, f, f] (f odd, rows of the maps scaled to sum 1), or of maps [F, N, N] with such rows,
        which windows and convolutions do not take.
      sigma: Standard deviation of Gaussians in tokens.
      dilation: Tokens between neighboring offsets of 'impulse'; or one per layer. By default it
        grows with depth in attention with positions: after the first third of the layers, kernels
        reach a seventh of the grid's shorter side, so those of size 3 have dilation 2 on 14×14
        tokens, where that trained better (benchmarks/results/search.md). Otherwise it is 1. Not for
        convolutions.
      offsets: How filters are assigned to heads (channels of a convolution, layers of token
        mixing). 'even' uses all equally often, as far as the heads of all layers allow; 'random'
        draws each head's independently (2024 paper); 'center_first' goes outwards by head number,
        the same in every layer (2025 paper).
      same_layers: Whether layers of equal kernel size and dilation get equal query and key weights
        (and biases of windows), or equal convolutions or token mixing. V and projection differ.
      target_mass: Attention mass wanted on target, between 0 and 1; 0.5 by default. Only for
        attention. It fixes how sharp the maps are at any width and number of heads and on any grid.
      norm: Instead of a target mass, the root mean square norm of the columns of Q and K. 3^-1/2,
        that of Q in the 2024 paper's program, gives a target mass of 0.12 to 0.98, depending on the
        model. This, `optimizer`, `learning_rate` and `max_steps` are only for attention with
        positions.
      vo_init: Value and projection. 'mimetic': V Proj near -0.4 I, as in `impulse_2025`.
        'balanced': the same product without the decomposition, so that heads are equally strong
        instead of sorted by singular values. 'default': the model's own. Only for attention.
      keep_positions: Whether value and projection leave the encoding's row space alone, or with
        rotary positions the vector that all tokens share. Otherwise every layer subtracts 0.4 of it
        from the residual stream. No effect with `vo_init='default'`. Not for windows, like the two
        scales.
      patch_scale: Factor on the kernel of the patch embedding. Less content beside the positions
        makes the maps of real images more like the targets, in all layers, and training on 1,000
        images ended higher (benchmarks/results/search.md). 1 leaves the model's own.
      mlp_scale: Factor on the output kernels of the MLPs, for the same reasons; 0 makes them
        contribute nothing at first, and 1 leaves them alone.
      optimizer: 'lbfgs' or the name of another optax optimizer.
      learning_rate: Learning rate of an optimizer other than L-BFGS.
      max_steps: Maximum number of steps of a solve. For a target mass there are three in a row.
    """
    if norm is None:
        sharpness = dict(
            target_mass=TARGET_MASS if target_mass is None else target_mass,
            norm=(START_SHARPNESS / (site.qk_scale * site.head_dim * site.width)) ** 0.5,
        )
    elif target_mass is None:
        sharpness = dict(norm=norm)
    else:
        raise InputError(
            f"norm={norm} and target_mass={target_mass} both say how sharp the maps are: pass one"
        )
    trainable = site.positions_trainable
    positions = sincos_positions(site.grid, site.width) if trainable else site.require_positions()
    if dilation is None:
        grows = isinstance(filters, str) and filters == "impulse"
        dilation = growing_dilation(kernel_size, site.num_layers, site.grid) if grows else 1
    targets, ranges = target_maps(
        site, filters=filters, kernel_size=kernel_size, dilation=dilation, sigma=sigma
    )
    in_loss = targets[:, loss_rows(site.num_tokens)]
    empty = np.flatnonzero(~in_loss.any(axis=(1, 2)))
    if len(empty):
        raise InputError(
            f"filters: filter {empty[0]} has targets for so few tokens that none of them is among "
            f"the {in_loss.shape[1]} of {site.num_tokens} tokens that the solve uses: use filters "
            "with targets for more tokens"
        )
    z, v = row_space(layer_norm(positions))
    keep_positions = keep_positions and vo_init != "default"
    if keep_positions and isinstance(v, np.ndarray) and v.shape[1] > MAX_RANK * site.width:
        raise InputError(
            f"AttentionSite.positions have rank {v.shape[1]}, which leaves too few of the "
            f"{site.width} channels for value and projection beside them: pass "
            "keep_positions=False, so that these may change the positions"
        )
    weights = _solve_and_place(
        rng,
        start_factors(z, targets, site.head_dim),
        z,
        v,
        in_loss,
        # Without positions a site is hashable, as static arguments must be.
        site=dataclasses.replace(site, positions=None, positions_trainable=False),
        ranges=ranges,
        offsets=offsets,
        same_layers=same_layers,
        vo_init=vo_init,
        keep_positions=keep_positions,
        **sharpness,
        optimizer=optimizer,
        learning_rate=learning_rate,
        max_steps=max_steps,
    )
    return weights._replace(
        targets=targets,
        positions=jnp.asarray(positions) if trainable else None,
        patch_scale=unless_one(patch_scale),
        mlp_scale=unless_one(mlp_scale),
    )


STATIC = ("site", "ranges", "offsets", "same_layers", "vo_init", "keep_positions")


@functools.partial(jax.jit, static_argnames=(*STATIC, *STATIC_OPTIONS))
def _solve_and_place(
    rng,
    starts,
    z,
    v,
    targets,
    *,
    site,
    ranges,
    offsets,
    same_layers,
    vo_init,
    keep_positions,
    **solver,
):
    """Runs the whole initialization as one compiled program, X = z vᵀ."""
    rotation_rng, order_rng, vo_rng = jax.random.split(rng, 3)
    bank = solve_bank(starts, z, targets, head_dim=site.head_dim, qk_scale=site.qk_scale, **solver)
    shape = (site.num_layers, site.num_heads)
    filter_index = assign(order_rng, shape, ranges, order=offsets, same_layers=same_layers)
    shape = (*shape, site.head_dim, bank.query.shape[-1])
    rotations = random_rotations(rotation_rng, shape, same_layers=same_layers)

    def place(factors):
        rotated = jnp.einsum("Lhrk,Lhdk->Lrhd", factors[filter_index], rotations)
        return jnp.einsum("Dr,Lrhd->LDhd", v, rotated)

    query, key = place(bank.query), place(bank.key)
    value, out = VO_INITS[vo_init](vo_rng, site)
    if keep_positions:
        value, out = remove_inputs(value, v), remove_outputs(out, v)
    return AttentionWeights(query, key, value, out, report=bank.report, filter_index=filter_index)


def _scale(weights, position_scale, query_key_scale, value_out_scale):
    """Multiplies weights and positions by the options of the 2025 program."""
    return AttentionWeights(
        query_key_scale * weights.query,
        query_key_scale * weights.key,
        value_out_scale * weights.value,
        value_out_scale * weights.out,
        position_scale=unless_one(position_scale),
    )


def _draw_all(rng, site, draw):
    layers, width, heads, dim = site.num_layers, site.width, site.num_heads, site.head_dim
    rngs = jax.random.split(rng, 4)
    query, key, value = (draw_flat(draw, r, (layers, width, heads, dim)) for r in rngs[:3])
    out = draw_flat(draw, rngs[3], (layers, heads, dim, width))
    return AttentionWeights(query, key, value, out)
