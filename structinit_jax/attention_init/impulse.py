"""Impulse initialization as this package does it: solved closely, once per distinct filter."""

import functools
import warnings
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from structinit_jax.attention_init import filters as filters_lib
from structinit_jax.attention_init.baselines import mimetic_value_out
from structinit_jax.attention_init.pseudo_input import layer_norm, sincos_positions
from structinit_jax.attention_init.site import (
    AttentionInit,
    AttentionSite,
    AttentionWeights,
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
    share: float | None = None,
    value_out: str = "mimetic",
    keep_positions: bool = True,
    optimizer: str = "lbfgs",
    learning_rate: float = 1e-2,
    max_steps: int = 100,
) -> AttentionInit:
    """Query and key solved so that each head's first map is an impulse convolution.

    The distinct filters are solved once in the row space of the position encoding
    (`attention_init.solve`). Every head of every layer then gets its own copy, turned by a random
    rotation of the head's channels: Q R and K R have the map of Q and K, but independent weights.
    Query and key are zero outside the encoding's row space: they see positions alone at first.

    Where the model's positions are trainable, they start from the sin-cos encoding.

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
      share: attention wanted on target, between 0 and 1, in place of a norm.
      value_out: 'mimetic' for V and projection as in `mimetic` (2025 paper), or 'default'.
      keep_positions: whether mimetic V and projection leave the encoding's row space alone. Plain
        mimetic ones subtract 0.4 of it from the residual stream in every layer, and with it what
        the maps of the layers behind are made of.
      optimizer: 'lbfgs', or the name of another optax optimizer.
      learning_rate: of an optimizer other than L-BFGS.
      max_steps: an upper bound on solver steps.

    Raises:
      InputError: for an option that is out of range, or does not fit the site.
    """
    for size in np.ravel(kernel_size):
        filters_lib.check_kernel_size(int(size))
    if isinstance(filters, str):
        check_choice("filters", filters, FILTERS)
    elif np.ndim(filters) != 3:
        raise InputError(
            f"attention_init.filters has shape {np.shape(filters)}: it needs kernels [F, f, f] or "
            "maps [F, N, N]"
        )
    check_choice("offsets", offsets, ("even", "random", "centre_first"))
    check_choice("value_out", value_out, ("mimetic", "default"))
    for field, value in (("norm", norm), ("sigma", sigma), ("max_steps", max_steps)):
        check_positive(field, value)
    if share is not None and not 0 < share < 1:
        raise InputError(f"attention_init.share={share}: a share of attention lies in (0, 1)")
    make_optimizer(optimizer, learning_rate)

    def init(key: PRNGKeyArray, site: AttentionSite) -> AttentionWeights:
        if site.positions_trainable:
            positions = sincos_positions(site.grid, site.width)
        else:
            positions = require_positions(site, "impulse")
        maps, members = _bank_of_layers(filters, kernel_size, dilation, sigma, site)
        solve_key, order_key, vo_key = jax.random.split(key, 3)
        chosen = _assign(order_key, members, site, offsets, same_layers)
        z, v = row_space(layer_norm(positions))
        weights = _solve_and_place(
            solve_key,
            z,
            v,
            maps,
            chosen,
            head_dim=site.head_dim,
            qk_scale=site.qk_scale,
            norm=norm,
            share=share,
            optimizer=optimizer,
            learning_rate=learning_rate,
            max_steps=max_steps,
            same_layers=same_layers,
        )
        _warn_if_out_of_reach(weights.report, site, z.shape[1])
        if value_out == "mimetic":
            value, out = mimetic_value_out(vo_key, site)
            if keep_positions:
                value = value - jnp.einsum("Dr,Er,LEhd->LDhd", v, v, value)
                out = out - jnp.einsum("LhdE,Er,Dr->LhdD", out, v, v)
            weights = weights._replace(value=value, out=out)
        if site.positions_trainable:
            weights = weights._replace(positions=jnp.asarray(positions))
        return weights

    return init


def _bank_of_layers(filters, kernel_size, dilation, sigma, site):
    """The distinct target maps [F, N, N], and for each layer the indices that it may draw."""
    if not isinstance(filters, str):
        maps = _given_maps(np.asarray(filters, np.float32), site)
        return maps, [np.arange(len(maps))] * site.num_layers
    sizes = filters_lib.per_layer("kernel_size", kernel_size, site.num_layers)
    dilations = filters_lib.per_layer("dilation", dilation, site.num_layers)
    bank, start, total = [], {}, 0
    for size, step in dict.fromkeys(zip(sizes, dilations, strict=True)):
        filters_lib.check_kernel_size(size, site.grid)
        if filters == "impulse":
            kernels = filters_lib.impulse_kernels(size, step)
        elif filters == "box":
            kernels = filters_lib.box_kernels(size)
        else:
            surround = 2 * sigma if filters == "difference_of_gaussians" else None
            kernels = filters_lib.smooth_kernels(size, sigma, surround=surround)
        bank.append(_normalize_rows(filters_lib.convolution_maps(kernels, site.grid)))
        start[size, step] = np.arange(total, total + len(kernels))
        total += len(kernels)
    members = [start[pair] for pair in zip(sizes, dilations, strict=True)]
    return np.concatenate(bank), members


def _given_maps(filters, site):
    tokens = site.num_tokens
    if filters.shape[1:] == (tokens, tokens):
        return filters
    if filters.shape[1] != filters.shape[2] or filters.shape[1] % 2 == 0:
        raise InputError(
            f"attention_init.filters has shape {filters.shape}: it needs kernels [F, f, f] with f "
            f"odd, or maps [F, {tokens}, {tokens}] for this site's {tokens} tokens"
        )
    if filters.min() < 0:
        raise InputError(
            "attention_init.filters has negative values: attention is never negative, so give the "
            "positive part"
        )
    return _normalize_rows(filters_lib.convolution_maps(filters, site.grid))


def _normalize_rows(maps):
    """Rows of sum 1, as softmax has them; the empty rows of impulses stay empty."""
    total = maps.sum(axis=-1, keepdims=True)
    return (maps / np.where(total > 0, total, 1)).astype(np.float32)


def _assign(key, members, site, offsets, same_layers) -> Int[Array, "L h"]:
    """Each head's filter. Layers with the same filters to choose from are dealt with together."""
    chosen = jnp.zeros((site.num_layers, site.num_heads), jnp.int32)
    for first in dict.fromkeys(int(m[0]) for m in members):
        layers = np.array([i for i, m in enumerate(members) if m[0] == first])
        indices = jnp.asarray(members[layers[0]], jnp.int32)
        dealt = filters_lib.assign_filters(
            jax.random.fold_in(key, first),
            (1 if same_layers else len(layers), site.num_heads),
            len(indices),
            order=offsets,
        )
        dealt = jnp.broadcast_to(indices[dealt], (len(layers), site.num_heads))
        chosen = chosen.at[layers].set(dealt)
    return chosen


@functools.partial(
    jax.jit,
    static_argnames=(
        "head_dim",
        "qk_scale",
        "share",
        "optimizer",
        "learning_rate",
        "max_steps",
        "same_layers",
    ),
)
def _solve_and_place(
    key: PRNGKeyArray,
    z: Float[Array, "N r"],
    v: Float[Array, "D r"],
    targets: Float[Array, "F N N"],
    chosen: Int[Array, "L h"],
    *,
    head_dim: int,
    same_layers: bool,
    **options,
) -> AttentionWeights:
    solve_key, turn_key = jax.random.split(key)
    bank = solve_bank(solve_key, z, targets, head_dim=head_dim, **options)
    rank = bank.query.shape[-1]
    layers, heads = chosen.shape
    shape = (1 if same_layers else layers, heads, head_dim, rank)
    turns, _ = jnp.linalg.qr(jax.random.normal(turn_key, shape))
    turns = jnp.broadcast_to(turns, (layers, *shape[1:]))

    def place(factors):
        return jnp.einsum("Dr,Lhrk,Lhdk->LDhd", v, factors[chosen], turns)

    return AttentionWeights(place(bank.query), place(bank.key), report=bank.report, filters=chosen)


def _warn_if_out_of_reach(report, site, rank):
    if isinstance(report.peaks, jax.core.Tracer) or report.peaks >= REACHED:
        return
    warnings.warn(
        f"attention_init: only {100 * float(report.peaks):.0f} % of the attention rows peak on "
        f"their target. head_dim={site.head_dim} and the encoding's rank {rank} bound the rank of "
        "the maps: use fewer heads, a smaller kernel, or sincos positions",
        stacklevel=3,
    )
