"""Structured initialization of attention for any model; needs only JAX, optax and jaxtyping.

A scheme is a function of options that returns a function `(rng, site) -> weights`. A site describes
a stack of equal layers. The weights have the layout of Flax's kernels:

    init = impulse(kernel_size=3)
    site = AttentionSite(grid=(14, 14), width=192, num_heads=3, head_dim=64, num_layers=12,
                         qk_scale=64**-0.5, positions=sincos_positions((14, 14), 192))
    weights = init(jax.random.key(0), site)      # weights.query: [12, 192, 3, 64]

Both calls may raise `InputError`: the first for invalid options, the second for a kind of site that
the scheme does not support, or for options that do not apply to it.

Each kind of site has a module with its schemes:

- `AttentionSite`: attention with positions, as in ViT (`tokens`, and `papers` as published).
- `RotarySite`: attention with rotary positions only (`rotary`).
- `WindowSite`: attention within windows, as in Swin (`windows`).
- `TokenMixingSite`: token-mixing MLPs, as in MLP-Mixer (`token_mixing`).
- `ConvSite`: depthwise convolutions, as in ConvMixer (`convolution`).

Symbols follow the papers: N tokens on a grid, width D, h heads of d = D / h channels, L layers, F
filters, kernel size f, positions P [N, D], X = LayerNorm(P), σ = d^-1/2, Q and K [D, d] of a head,
target map H [N, N] of a convolution, attention map M = softmax(σ X Q Kᵀ Xᵀ) [N, N].
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax

from structinit_jax.attention_init import convolution, papers, rotary, token_mixing, tokens, windows
from structinit_jax.attention_init.kernels import Dilation, FilterArray, OddInt, sincos_positions
from structinit_jax.attention_init.papers import PseudoInput
from structinit_jax.attention_init.rotary import rotary_angles
from structinit_jax.attention_init.sites import (
    AttentionInit,
    AttentionSite,
    AttentionWeights,
    ConvSite,
    ConvWeights,
    RotarySite,
    Site,
    SolveReport,
    TokenMixingSite,
    TokenMixingWeights,
    Weights,
    WindowSite,
)
from structinit_jax.attention_init.tokens import OpenFraction
from structinit_jax.errors import (
    InputError,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Probability,
    check_fields,
)


def impulse(
    *,
    kernel_size: OddInt | None = None,
    filters: FilterArray | None = None,
    dilation: Dilation | None = None,
    target_mass: OpenFraction | None = None,
    norm: PositiveFloat | None = None,
    mimetic_layers: Probability | None = None,
    keep_positions: bool | None = None,
    patch_scale: PositiveFloat | None = None,
    mlp_scale: NonNegativeFloat | None = None,
) -> AttentionInit:
    """Impulse initialization: layers that start as convolutions with one filter per head.

    `tokens.impulse` is the method for attention with positions, close to the 2024 paper's. The
    forms for other sites are our own: a `RotarySite` takes all options but `norm`, a `WindowSite`
    `kernel_size`, `filters`, `dilation` and `target_mass`, a `TokenMixingSite` the first
    three of these, and a `ConvSite` only `filters`. None means the site's default, given below.

    Args:
      kernel_size: Kernel size f of the impulses, odd; by default 3. A `ConvSite` has its own.
      filters: Your own filters instead of impulses: kernels [F, f, f].
      dilation: Distance in tokens between neighboring offsets, one for all layers or one per layer.
        By default 1, and more in the later layers of attention with positions on a large grid
        (`kernels.growing_dilation`).
      target_mass: Share of the attention that the solve puts on the target. It sets how sharp the
        maps are, in any model and on any grid. By default 0.5; with positions 0.2, or 12.8 times
        what uniform attention puts there if that is less (for impulses, on more than 64 tokens),
        and always more than uniform attention.
      norm: Root mean square norm of the columns of Q and K, instead of a target mass.
      mimetic_layers: Share of the layers, counted from the last, in which heads attend to similar
        tokens. By default 0.5.
      keep_positions: If false, the default, value and output projection have a product near
        -0.4 I, so that each layer removes 0.4 of the positions from the residual stream. If true,
        they do not act on positions (at a `RotarySite`, on the vector that all tokens share).
      patch_scale: Factor on the kernel of the patch embedding. The weaker the content next to the
        positions, the closer maps are to targets. By default 1.
      mlp_scale: Factor on the output kernels of the MLPs. By default 1. In other projects' models,
        multiply the kernels yourself instead of passing these two factors.
    """
    options = dict(locals())  # all arguments, since no other local is set yet
    if norm is not None and target_mass is not None:
        raise InputError(f"norm={norm} and target_mass={target_mass} exclude each other: pass one")
    for name, value in dict(kernel_size=kernel_size, dilation=dilation).items():
        if filters is not None and value is not None:
            raise InputError(f"{name}={value} is for impulses: leave it out, or leave out filters")
    functions = {
        AttentionSite: tokens.impulse,
        RotarySite: rotary.impulse,
        WindowSite: windows.impulse,
        TokenMixingSite: token_mixing.impulse,
        ConvSite: convolution.impulse,
    }
    return _by_site(impulse, functions, options)


def impulse_2024(
    *,
    kernel_size: OddInt | None = None,
    same_layers: bool | None = None,
    first_input: PseudoInput | None = None,
    following_input: PseudoInput | None = None,
    max_steps: PositiveInt | None = None,
    taps: PositiveInt | None = None,
) -> AttentionInit:
    """The impulse initialization of the 2024 paper as published, to reproduce it.

    The first five options are for attention with positions, where the sin-cos encoding replaces a
    learned table; `taps` is for convolutions.

    Args:
      kernel_size: Kernel size f, odd; 3 by default. Each head draws one of the f² offsets.
      same_layers: Whether all layers share Q and K, as in the paper's main results and by default.
        With two pseudo inputs, the first layer has its own. Layers that are not shared draw their
        own offsets and noise.
      first_input: Pseudo input of the first layer (table 6): 'positions' (the default), 'uniform',
        'gaussian', 'positions+uniform' or 'positions+gaussian'.
      following_input: Pseudo input of the other layers.
      max_steps: Number of Adam steps; 10,000 by default.
      taps: Number of nonzero entries in each filter, all equal: 1, the default, gives the impulses
        of table 4, and f² its box filters.
    """
    options = dict(locals())  # all arguments, since no other local is set yet
    functions = {AttentionSite: papers.impulse_2024, ConvSite: convolution.impulse_2024}
    return _by_site(impulse_2024, functions, options)


def impulse_2025(
    *,
    position_scale: PositiveFloat = 18.0,
    query_key_norm: PositiveFloat = 7.0,
) -> AttentionInit:
    """The impulse initialization of the 2025 paper as published, for learned positions.

    Args:
      position_scale: Factor on learned positions, whose standard deviation is 0.02 in the paper's
        program; fixed ones stay as they are.
      query_key_norm: Frobenius norm of each head's Q and K.
    """
    return _by_site(impulse_2025, {AttentionSite: papers.impulse_2025}, dict(locals()))


def mimetic(*, replace_positions: bool | None = None) -> AttentionInit:
    """Mimetic initialization (Trockman & Kolter 2023): heads attend to similar tokens.

    Args:
      replace_positions: Whether a sin-cos encoding replaces learned positions, by default true.
        Neighbors then have similar positions, to which heads attend. Learned positions start near
        zero, too small to matter; the 2025 paper's program keeps them.
    """
    functions = dict.fromkeys(ATTENTION, papers.mimetic) | {TokenMixingSite: token_mixing.mimetic}
    return _by_site(mimetic, functions, dict(replace_positions=replace_positions))


def default() -> AttentionInit:
    """The base initialization of our models, timm's or PyTorch's; in other models, timm's."""
    attention = dict.fromkeys(ATTENTION, papers.default)
    others = {TokenMixingSite: token_mixing.default, ConvSite: convolution.default}
    return _by_site(default, attention | others, {})


def kaiming_uniform() -> AttentionInit:
    """PyTorch's default for linear layers and convolutions: uniform between ±(fan-in)^-1/2."""
    attention = dict.fromkeys(ATTENTION, papers.kaiming_uniform)
    others = {TokenMixingSite: token_mixing.kaiming_uniform, ConvSite: convolution.default}
    return _by_site(kaiming_uniform, attention | others, {})


ATTENTION = (AttentionSite, RotarySite, WindowSite)
SCHEMES: dict[str, Callable[..., AttentionInit]] = {
    "impulse": impulse,
    "impulse_2024": impulse_2024,
    "impulse_2025": impulse_2025,
    "mimetic": mimetic,
    "default": default,
    "kaiming_uniform": kaiming_uniform,
}


def _by_site(
    scheme: Callable[..., AttentionInit],
    functions: dict[type, Callable[..., Weights]],
    options: dict[str, Any],
) -> AttentionInit:
    """Checks the options and returns a scheme's `(rng, site) -> weights`.

    The returned function calls the one for the site's type, without the options that are None, so
    that its defaults apply.
    """
    check_fields(scheme, options, "")
    options = {name: value for name, value in options.items() if value is not None}

    def init(rng, site):
        kind = type(site).__name__
        if type(site) not in functions:
            known = ", ".join(site_type.__name__ for site_type in functions)
            raise InputError(f"this scheme is for {known}, not for a {kind}: use 'default'")
        function = functions[type(site)]
        for name, value in options.items():
            if name not in inspect.signature(function).parameters:
                raise InputError(f"{name}={value!r} does not apply to a {kind}: leave it out")
        # TPUs would multiply in bfloat16: too coarse for a solve, and their compiler crashes on it.
        with jax.default_matmul_precision("highest"):
            return function(rng, site, **options)

    return init


__all__ = [
    "SCHEMES",
    "AttentionInit",
    "AttentionSite",
    "AttentionWeights",
    "ConvSite",
    "ConvWeights",
    "RotarySite",
    "Site",
    "SolveReport",
    "TokenMixingSite",
    "TokenMixingWeights",
    "Weights",
    "WindowSite",
    "default",
    "impulse",
    "impulse_2024",
    "impulse_2025",
    "kaiming_uniform",
    "mimetic",
    "rotary_angles",
    "sincos_positions",
]
