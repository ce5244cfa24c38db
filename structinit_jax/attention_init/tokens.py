"""Impulse initialization as this package does it: solved closely, once per distinct filter."""

import functools
import warnings
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from structinit_jax.attention_init import kernels, token_mixing, windows
from structinit_jax.attention_init.baselines import balanced_vo, mimetic_vo
from structinit_jax.attention_init.convolution import placed_filters
from structinit_jax.attention_init.pseudo_input import layer_norm, sincos_positions
from structinit_jax.attention_init.sites import (
    AttentionInit,
    AttentionWeights,
    ConvSite,
    Site,
    TokenMixingSite,
    Weights,
    WindowSite,
    check_choice,
    check_positive,
    require_positions,
)
from structinit_jax.attention_init.solve import make_optimizer, row_space, solve_bank
from structinit_jax.errors import InputError

FILTERS = ("impulse", "gaussian", "difference_of_gaussians", "box")
REACHED = 0.75  # of the rows must peak on target, or a warning says that the target is out of reach


def impulse(
    kernel_size: int | Sequence[int] = 3,
    *,
    filters: str | np.ndarray = "impulse",
    sigma: float = 0.7,
    dilation: int | Sequence[int] = 1,
    offsets: str = "even",
    same_layers: bool = False,
    norm: float = 3**-0.5,
    target_mass: float | None = None,
    vo_init: str = "balanced",
    keep_positions: bool = True,
    optimizer: str = "lbfgs",
    learning_rate: float = 1e-2,
    max_steps: int = 400,
) -> AttentionInit:
    """Query and key solved so that each head's first map is an impulse convolution.

    The distinct filters are solved once in the row space of the position encoding
    (`attention_init.solve`). Every head of every layer then gets its own copy, turned by a random
    rotation of the head's channels: Q R and K R have the map of Q and K, but independent weights.
    Query and key are zero outside the encoding's row space: they see positions alone at first.

    Where the model's positions are trainable, they start from the sin-cos encoding.

    The filters of a depthwise convolution (`ConvSite`) are set as such, one for each channel, see
    `convolution.placed_filters`: they spread over the model's own kernel, even or odd, and of the
    options only `filters`, `sigma`, `offsets` and `same_layers` have a part. `kernel_size` may be
    at most the model's.

    Attention within windows (`WindowSite`) has no positions to solve against: the filters go into
    its relative position bias, see `windows.place_kernels`. `target_mass` is then the only measure
    of sharpness (0.5 if None); `norm`, `keep_positions` and the options of the solver have no part.

    Token-mixing MLPs carry one filter a layer instead, exactly and without a solve
    (`attention_init.token_mixing`); options from `norm` on are about attention only.

    Args:
      kernel_size: f, odd, at most the grid's shorter side; or one for each layer.
      filters: what the heads look for at the f² offsets of the kernel. 'impulse': one token;
        'gaussian': a bump of deviation `sigma` there; 'difference_of_gaussians': the positive part
        of a bump minus one twice as wide; 'box': the mean over the whole kernel, one filter in all.
        Or an array of kernels [F, f, f] (f odd, rows of the maps scaled to sum 1), or of maps
        [F, N, N].
      sigma: deviation of Gaussians, in tokens.
      dilation: tokens between neighbouring offsets of 'impulse'; or one for each layer.
      offsets: how filters go to heads: 'even' covers all as evenly as the heads of all layers
        allow; 'random' draws each head's independently (2024 paper); 'centre_first' walks outwards
        by head number, alike in every layer (2025 paper).
      same_layers: whether all layers have equal weights.
      norm: root mean square norm of the columns of Q and K, which bounds how sharp the maps
        are. The default is what the start of the 2024 paper's algorithm 1 has.
      target_mass: attention wanted on target, between 0 and 1, in place of a norm.
      vo_init: V and projection. 'mimetic': V Proj near -0.4 I, as in `mimetic` (2025 paper).
        'balanced': the same product without its decomposition, so that heads are equally strong
        where a decomposition sorts them by singular values. 'default': the model's own.
      keep_positions: whether V and projection leave the encoding's row space alone. Else they
        subtract 0.4 of it from the residual stream in every layer, and with it what the maps of
        the layers behind are made of. Without effect on the model's own.
      optimizer: 'lbfgs', or the name of another optax optimizer.
      learning_rate: of an optimizer other than L-BFGS.
      max_steps: an upper bound on solver steps.

    Raises:
      InputError: for an option that is out of range, or does not fit the site.
    """
    for size in np.ravel(kernel_size):
        kernels.check_kernel_size(int(size))
    if isinstance(filters, str):
        check_choice("filters", filters, FILTERS)
    elif np.ndim(filters) != 3:
        raise InputError(
            f"attention_init.filters has shape {np.shape(filters)}: it needs kernels [F, f, f] or "
            "maps [F, N, N]"
        )
    check_choice("offsets", offsets, ("even", "random", "centre_first"))
    check_choice("vo_init", vo_init, ("balanced", "mimetic", "default"))
    for field, value in (("norm", norm), ("sigma", sigma), ("max_steps", max_steps)):
        check_positive(field, value)
    if target_mass is not None and not 0 < target_mass < 1:
        raise InputError(
            f"attention_init.target_mass={target_mass}: a share of attention lies in (0, 1)"
        )
    make_optimizer(optimizer, learning_rate)

    def init(key: PRNGKeyArray, site: Site) -> Weights:
        if isinstance(site, ConvSite):
            return placed_filters(
                key,
                site,
                kernel_size=kernel_size,
                filters=filters,
                sigma=sigma,
                order=offsets,
                same_layers=same_layers,
            )
        if isinstance(site, WindowSite):
            return windows.place_kernels(
                key,
                site,
                *_kernel_banks(filters, kernel_size, dilation, sigma, site),
                target_mass=windows.DEFAULT_SHARE if target_mass is None else target_mass,
                offsets=offsets,
                same_layers=same_layers,
                vo_init=vo_init,
            )
        if isinstance(site, TokenMixingSite):
            maps, ranges = _bank_of_layers(filters, kernel_size, dilation, sigma, site)
            return token_mixing.carry_filters(
                key, site, maps, ranges, order=offsets, same_layers=same_layers
            )
        if site.positions_trainable:
            positions = sincos_positions(site.grid, site.width)
        else:
            positions = require_positions(site, "impulse")
        maps, ranges = _bank_of_layers(filters, kernel_size, dilation, sigma, site)
        z, v = row_space(layer_norm(positions))
        weights = _solve_and_place(
            key,
            z,
            v,
            maps,
            ranges=ranges,
            num_heads=site.num_heads,
            offsets=offsets,
            vo_init=vo_init,
            keep_positions=keep_positions,
            head_dim=site.head_dim,
            qk_scale=site.qk_scale,
            norm=norm,
            target_mass=target_mass,
            optimizer=optimizer,
            learning_rate=learning_rate,
            max_steps=max_steps,
            same_layers=same_layers,
        )
        _warn_if_out_of_reach(weights.report, site, z.shape[1])
        if site.positions_trainable:
            weights = weights._replace(positions=jnp.asarray(positions))
        return weights

    return init


def _kernel_banks(filters, kernel_size, dilation, sigma, site):
    """The distinct banks of kernels, each [F, g, g], and the index of each layer's bank."""
    if not isinstance(filters, str):
        return [_given_kernels(filters, site)], (0,) * site.num_layers
    sizes = kernels.per_layer("kernel_size", kernel_size, site.num_layers)
    dilations = kernels.per_layer("dilation", dilation, site.num_layers)
    pairs = list(zip(sizes, dilations, strict=True))
    distinct = list(dict.fromkeys(pairs))
    banks = [_kernels(filters, size, step, sigma) for size, step in distinct]
    return banks, tuple(distinct.index(pair) for pair in pairs)


def _kernels(name, size, dilation, sigma):
    if name == "impulse":
        return kernels.impulse_kernels(size, dilation)
    if name == "box":
        return kernels.box_kernels(size)
    surround = 2 * sigma if name == "difference_of_gaussians" else None
    return kernels.smooth_kernels(size, sigma, surround=surround)


def _given_kernels(filters, site):
    filters = np.asarray(filters, np.float32)
    if filters.shape[1] != filters.shape[2] or filters.shape[1] % 2 == 0:
        n = site.num_tokens
        maps = "" if isinstance(site, WindowSite) else f", or maps [F, {n}, {n}] for {n} tokens"
        raise InputError(
            f"attention_init.filters has shape {filters.shape}: it needs kernels [F, f, f] with f "
            f"odd{maps}"
        )
    if filters.min() < 0:
        raise InputError(
            "attention_init.filters has negative values: attention is never negative, so give the "
            "positive part"
        )
    return filters


def _bank_of_layers(filters, kernel_size, dilation, sigma, site):
    """The distinct target maps [F, N, N], and each layer's (start, stop) among them."""
    tokens = site.num_tokens
    if not isinstance(filters, str) and filters.shape[1:] == (tokens, tokens):
        maps = np.asarray(filters, np.float32)
        return maps, ((0, len(maps)),) * site.num_layers
    if isinstance(filters, str):
        for size in np.ravel(kernel_size):
            kernels.check_kernel_size(int(size), site.grid)
    banks, bank_of_layer = _kernel_banks(filters, kernel_size, dilation, sigma, site)
    maps = [_normalize_rows(kernels.convolution_maps(bank, site.grid)) for bank in banks]
    return np.concatenate(maps), kernels.bank_ranges(banks, bank_of_layer)


def _normalize_rows(maps):
    """Rows of sum 1, as softmax has them; the empty rows of impulses stay empty."""
    total = maps.sum(axis=-1, keepdims=True)
    return (maps / np.where(total > 0, total, 1)).astype(np.float32)


@functools.partial(
    jax.jit,
    static_argnames=(
        "ranges",
        "num_heads",
        "head_dim",
        "qk_scale",
        "offsets",
        "same_layers",
        "vo_init",
        "keep_positions",
        "target_mass",
        "optimizer",
        "learning_rate",
        "max_steps",
    ),
)
def _solve_and_place(
    key: PRNGKeyArray,
    z: Float[Array, "N r"],
    v: Float[Array, "D r"],
    targets: Float[Array | np.ndarray, "F N N"],
    *,
    ranges: tuple[tuple[int, int], ...],
    num_heads: int,
    head_dim: int,
    offsets: str,
    same_layers: bool,
    vo_init: str,
    keep_positions: bool,
    **options,
) -> AttentionWeights:
    """The whole initialization as one program, so that it compiles and runs as one."""
    solve_key, turn_key, order_key, vo_key = jax.random.split(key, 4)
    bank = solve_bank(solve_key, z, jnp.asarray(targets), head_dim=head_dim, **options)
    chosen = kernels.assign_layers(
        order_key, ranges, num_heads, order=offsets, same_layers=same_layers
    )
    layers, width, rank = len(ranges), len(v), bank.query.shape[-1]
    shape = (1 if same_layers else layers, num_heads, head_dim, rank)
    turns, _ = jnp.linalg.qr(jax.random.normal(turn_key, shape))
    turns = jnp.broadcast_to(turns, (layers, *shape[1:]))

    def place(factors):
        turned = jnp.einsum("Lhrk,Lhdk->Lrhd", factors[chosen], turns)
        return jnp.einsum("Dr,Lrhd->LDhd", v, turned)

    weights = AttentionWeights(
        place(bank.query), place(bank.key), report=bank.report, filter_index=chosen
    )
    if vo_init == "default":
        return weights
    make = balanced_vo if vo_init == "balanced" else mimetic_vo
    value, out = make(vo_key, layers, width, num_heads, head_dim)
    if keep_positions:
        value = value - jnp.einsum("Dr,Lrhd->LDhd", v, jnp.einsum("Er,LEhd->Lrhd", v, value))
        out = out - jnp.einsum("Dr,Lhdr->LhdD", v, jnp.einsum("LhdE,Er->Lhdr", out, v))
    return weights._replace(value=value, out=out)


def _warn_if_out_of_reach(report, site, rank):
    if isinstance(report.hit_rate, jax.core.Tracer) or report.hit_rate >= REACHED:
        return
    warnings.warn(
        f"attention_init: only {100 * float(report.hit_rate):.0f} % of the attention rows peak on "
        f"their target. head_dim={site.head_dim} and the encoding's rank {rank} bound the rank of "
        "the maps: use fewer heads, a smaller kernel, or sincos positions",
        stacklevel=3,
    )
