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
from structinit_jax.attention_init.conv_filters import placed_filters
from structinit_jax.attention_init.pseudo_input import layer_norm, sincos_positions
from structinit_jax.attention_init.site import (
    AttentionInit,
    AttentionWeights,
    ConvSite,
    Site,
    Weights,
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
    value_out: str = "balanced",
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
    `conv_filters.placed_filters`: they spread over the model's own kernel, even or odd, and of the
    options only `filters`, `sigma`, `offsets` and `same_layers` have a part. `kernel_size` may be
    at most the model's.

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
      value_out: V and projection. 'mimetic': V Proj near -0.4 I, as in `mimetic` (2025 paper).
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
        filters_lib.check_kernel_size(int(size))
    if isinstance(filters, str):
        check_choice("filters", filters, FILTERS)
    elif np.ndim(filters) != 3:
        raise InputError(
            f"attention_init.filters has shape {np.shape(filters)}: it needs kernels [F, f, f] or "
            "maps [F, N, N]"
        )
    check_choice("offsets", offsets, ("even", "random", "centre_first"))
    check_choice("value_out", value_out, ("balanced", "mimetic", "default"))
    for field, value in (("norm", norm), ("sigma", sigma), ("max_steps", max_steps)):
        check_positive(field, value)
    if share is not None and not 0 < share < 1:
        raise InputError(f"attention_init.share={share}: a share of attention lies in (0, 1)")
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
            value_out=value_out,
            keep_positions=keep_positions,
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
        if site.positions_trainable:
            weights = weights._replace(positions=jnp.asarray(positions))
        return weights

    return init


def _bank_of_layers(filters, kernel_size, dilation, sigma, site):
    """The distinct target maps [F, N, N], and each layer's (start, stop) among them."""
    if not isinstance(filters, str):
        maps = _given_maps(np.asarray(filters, np.float32), site)
        return maps, ((0, len(maps)),) * site.num_layers
    sizes = filters_lib.per_layer("kernel_size", kernel_size, site.num_layers)
    dilations = filters_lib.per_layer("dilation", dilation, site.num_layers)
    bank, ranges, total = [], {}, 0
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
        ranges[size, step] = (total, total + len(kernels))
        total += len(kernels)
    pairs = zip(sizes, dilations, strict=True)
    return np.concatenate(bank), tuple(ranges[pair] for pair in pairs)


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


@functools.partial(
    jax.jit,
    static_argnames=(
        "ranges",
        "num_heads",
        "head_dim",
        "qk_scale",
        "offsets",
        "same_layers",
        "value_out",
        "keep_positions",
        "share",
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
    value_out: str,
    keep_positions: bool,
    **options,
) -> AttentionWeights:
    """The whole initialization as one program, so that it compiles and runs as one."""
    solve_key, turn_key, order_key, vo_key = jax.random.split(key, 4)
    bank = solve_bank(solve_key, z, jnp.asarray(targets), head_dim=head_dim, **options)
    chosen = _assign(order_key, ranges, num_heads, offsets, same_layers)
    layers, width, rank = len(ranges), len(v), bank.query.shape[-1]
    shape = (1 if same_layers else layers, num_heads, head_dim, rank)
    turns, _ = jnp.linalg.qr(jax.random.normal(turn_key, shape))
    turns = jnp.broadcast_to(turns, (layers, *shape[1:]))

    def place(factors):
        turned = jnp.einsum("Lhrk,Lhdk->Lrhd", factors[chosen], turns)
        return jnp.einsum("Dr,Lrhd->LDhd", v, turned)

    weights = AttentionWeights(
        place(bank.query), place(bank.key), report=bank.report, filters=chosen
    )
    if value_out == "default":
        return weights
    make = _balanced_value_out if value_out == "balanced" else mimetic_value_out
    value, out = make(vo_key, layers, width, num_heads, head_dim)
    if keep_positions:
        value = value - jnp.einsum("Dr,Lrhd->LDhd", v, jnp.einsum("Er,LEhd->Lrhd", v, value))
        out = out - jnp.einsum("Dr,Lhdr->LhdD", v, jnp.einsum("LhdE,Er->Lhdr", out, v))
    return weights._replace(value=value, out=out)


def _assign(key, ranges, num_heads, offsets, same_layers) -> Int[Array, "L h"]:
    """Each head's filter. Layers with the same filters to choose from are dealt with together."""
    chosen = jnp.zeros((len(ranges), num_heads), jnp.int32)
    for start, stop in dict.fromkeys(ranges):
        layers = np.array([i for i, pair in enumerate(ranges) if pair == (start, stop)])
        dealt = filters_lib.assign_filters(
            jax.random.fold_in(key, start),
            (1 if same_layers else len(layers), num_heads),
            stop - start,
            order=offsets,
        )
        dealt = jnp.broadcast_to(start + dealt, (len(layers), num_heads))
        chosen = chosen.at[layers].set(dealt.astype(jnp.int32))
    return chosen


def _balanced_value_out(key, layers, width, num_heads, head_dim):
    """V = c (I - U / 2) Π and Proj = -c Πᵀ (I - U' / 2), c² = 0.4, so V Proj ≈ -0.4 (I - noise).

    U and U' are uniform noise as in `mimetic`; the permutation Π deals the channels to the heads.
    Heads that are together narrower than the model leave channels out, wider ones take some twice.
    """
    noise_key, deal_key = jax.random.split(key)
    inner, bound = num_heads * head_dim, (3 / width) ** 0.5
    dealt = jax.vmap(lambda k: jax.random.permutation(k, width))(jax.random.split(deal_key, layers))
    dealt = jnp.tile(dealt, (1, -(-inner // width)))[:, :inner]
    identity = jax.nn.one_hot(dealt, width)  # [L, inner, D], the rows of Πᵀ
    # Sixteen random bits are plenty for noise, and cost half of what thirty-two do.
    bits = jax.random.bits(noise_key, (2, *identity.shape), "uint16")
    half_noise = bound * ((bits.astype(jnp.float32) + 0.5) / 2**16 - 0.5)
    value, out = 0.4**0.5 * (identity[None] - half_noise)
    heads = (layers, num_heads, head_dim, width)
    return jnp.moveaxis(value.reshape(heads), -1, 1), -out.reshape(heads)


def _warn_if_out_of_reach(report, site, rank):
    if isinstance(report.peaks, jax.core.Tracer) or report.peaks >= REACHED:
        return
    warnings.warn(
        f"attention_init: only {100 * float(report.peaks):.0f} % of the attention rows peak on "
        f"their target. head_dim={site.head_dim} and the encoding's rank {rank} bound the rank of "
        "the maps: use fewer heads, a smaller kernel, or sincos positions",
        stacklevel=3,
    )
