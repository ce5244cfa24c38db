"""Structured initialization of attention: JAX and optax only, for any model.

A scheme takes its options and returns a function `(rng, site) -> weights`. A site describes a stack
of equal layers; the weights are in Flax's layout:

    init = impulse(kernel_size=3)
    site = AttentionSite(grid=(14, 14), width=192, num_heads=3, head_dim=64, num_layers=12,
                         qk_scale=64**-0.5, positions=sincos_positions((14, 14), 192))
    weights = init(jax.random.key(0), site)      # weights.query: [12, 192, 3, 64]

Each kind of site has a module with its schemes:

- `AttentionSite`: attention with positions, as in ViT (`tokens`, and `papers` as published).
- `RotarySite`: attention with rotary positions only (`rotary`).
- `WindowSite`: attention within windows, as in Swin (`windows`).
- `TokenMixingSite`: token-mixing MLPs, as in MLP-Mixer (`token_mixing`).
- `ConvSite`: depthwise convolutions, as in ConvMixer (`convolution`).

Symbols follow the papers: N tokens on a grid, width D, h heads of d = D / h channels, L
layers, F filters, kernel size f, positions P [N, D], X = LayerNorm(P), σ = d^-1/2, Q and K [D, d]
of one head, H [N, N] the map of a convolution, M = softmax(σ X Q Kᵀ Xᵀ).

To add a scheme, write a function that takes the options and returns `(rng, site) -> weights`, and
add it to `SCHEMES`. A config also finds it as 'my_module:my_scheme', without a change here.
"""

import inspect
from collections.abc import Callable
from typing import Any

from structinit_jax.attention_init import (
    convolution,
    papers,
    rotary,
    token_mixing,
    tokens,
    windows,
)
from structinit_jax.attention_init.kernels import (
    FilterKind,
    Filters,
    OddInt,
    Order,
    sincos_positions,
)
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
from structinit_jax.attention_init.solve import OpenFraction, VoInit
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
    kernel_size: OddInt | tuple[OddInt, ...] = 3,
    filters: FilterKind = "impulse",
    sigma: PositiveFloat = 0.7,
    dilation: PositiveInt | tuple[PositiveInt, ...] | None = None,
    offsets: Order = "even",
    same_layers: bool = False,
    target_mass: OpenFraction | None = None,
    norm: PositiveFloat | None = None,
    mimetic_layers: Probability | None = None,
    vo_init: VoInit | None = None,
    keep_positions: bool | None = None,
    patch_scale: PositiveFloat | None = None,
    mlp_scale: NonNegativeFloat | None = None,
    max_steps: PositiveInt | None = None,
) -> AttentionInit:
    """Impulse initialization: layers that start as convolutions with one filter per head.

    For attention with positions the weights are solved for, close to the targets of the 2024 paper
    but with maps of a given sharpness. The last layers attend to similar tokens, as `mimetic` does.
    On CIFAR-10 that trained nearly as well as `mimetic`, and much better than convolutions in all
    layers (benchmarks/results/search.md). The forms for other sites are our own.

    An option that is None takes the default for the site. An option that does not apply to a site
    raises an error.

    Args:
      kernel_size: Kernel size f, odd, at most the grid's shorter side; or one per layer. Arrays as
        filters have their own, and convolutions that of the model.
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
      target_mass: Attention mass wanted on target, between 0 and 1; by default 0.2 with positions
        and 0.5 otherwise. Only for attention. It fixes how sharp the maps are at any width and
        number of heads and on any grid.
      norm: Instead of a target mass, the root mean square norm of the columns of Q and K. 3^-1/2,
        that of Q in the 2024 paper's program, gives a target mass of 0.12 to 0.98, depending on the
        model. Only for attention with positions.
      mimetic_layers: Share of the layers, the last ones, whose query and key attend to similar
        tokens; 0.5 by default. Only for attention with positions.
      vo_init: Value and projection of attention. 'balanced', the default: V Proj near -0.4 I, in
        which all heads are equally strong. 'mimetic': the same by SVD as in `impulse_2025`, with
        heads sorted by singular values. 'default': the model's own.
      keep_positions: Whether value and projection leave the encoding's row space alone, or with
        rotary positions the vector that all tokens share. Otherwise every layer subtracts 0.4 of it
        from the residual stream. False by default with positions: as the stream loses them, the
        MLPs learn what is where less easily. True with rotary positions. No effect with
        `vo_init='default'`. Like the two scales not for windows.
      patch_scale: Factor on the kernel of the patch embedding; 1, the model's own, by default with
        positions and 0.3 with rotary ones. With less content next to the positions, the maps of
        real images are more like the targets in all layers. With 1,000 images of garments, 0.3 and
        mlp_scale=0 trained better, with photographs worse (benchmarks/results/search.md).
      mlp_scale: Factor on the output kernels of the MLPs, for the same reasons; 1 by default with
        positions and 0, with which they contribute nothing at first, with rotary ones.
      max_steps: Maximum number of steps of a solve, 400 by default. For a target mass there are
        three in a row. Only for attention with positions.

    Raises:
      InputError: The value of an option is not one of those above. The returned function raises it
        for an option that the site does not support.
    """
    check_fields(impulse, locals(), "")
    if norm is not None and target_mass is not None:
        raise InputError(
            f"norm={norm} and target_mass={target_mass} both say how sharp the maps are: pass one"
        )
    return _by_site(
        {
            AttentionSite: tokens.impulse,
            RotarySite: rotary.impulse,
            WindowSite: windows.impulse,
            TokenMixingSite: token_mixing.impulse,
            ConvSite: convolution.impulse,
        },
        Filters(filters, kernel_size, sigma, dilation, offsets, same_layers),
        target_mass=target_mass,
        norm=norm,
        mimetic_layers=mimetic_layers,
        vo_init=vo_init,
        keep_positions=keep_positions,
        patch_scale=patch_scale,
        mlp_scale=mlp_scale,
        max_steps=max_steps,
    )


def impulse_2024(
    *,
    kernel_size: OddInt | None = None,
    same_layers: bool | None = None,
    first_input: PseudoInput | None = None,
    following_input: PseudoInput | None = None,
    max_steps: PositiveInt | None = None,
    learning_rate: PositiveFloat | None = None,
    taps: PositiveInt | None = None,
    variance: PositiveFloat | None = None,
    num_filters: PositiveInt | None = None,
) -> AttentionInit:
    """The impulse initialization of the 2024 paper as published, to reproduce it.

    The first six options are for attention with positions (`papers.impulse_2024`), the last three
    for convolutions (`convolution.impulse_2024`).

    Args:
      kernel_size: Kernel size f, odd; 3 by default. Each head draws one of the f² offsets, with
        replacement.
      same_layers: Whether all layers share their Q and K, as in the paper's main results and by
        default. With two pseudo inputs, the first layer still has its own. Layers that are not
        shared draw their own offsets and noise.
      first_input: Pseudo input of the first layer (table 6): 'positions' (the default), 'uniform',
        'gaussian', 'positions+uniform' or 'positions+gaussian'.
      following_input: Pseudo input of the other layers.
      max_steps: Number of Adam steps; 10,000 by default.
      learning_rate: Adam's learning rate; 1e-4 by default.
      taps: Number of places with a weight in each filter, all with the same one. 1, the default, is
        the impulse of table 4, and f² its box.
      variance: If given, filters are Gaussians of this variance around one place instead.
      num_filters: Number of distinct filters of a layer, from which each channel draws one; None
        gives each channel its own. If filters are trained, they do not stay equal.
    """
    options = dict(locals())
    check_fields(impulse_2024, options, "")
    functions = {AttentionSite: papers.impulse_2024, ConvSite: convolution.impulse_2024}
    return _by_site(functions, **options)


def impulse_2025(
    *,
    kernel_size: OddInt = 3,
    position_scale: PositiveFloat = 18.0,
    query_key_norm: PositiveFloat = 7.0,
    value_out_scale: float = 1.0,
) -> AttentionInit:
    """The impulse initialization of the 2025 paper as published, for learned positions.

    Args:
      kernel_size: Kernel size f, odd; 3 in the paper.
      position_scale: Factor on learned positions; fixed ones stay as they are.
      query_key_norm: Frobenius norm of each head's Q and K.
      value_out_scale: Factor on value and projection.
    """
    options = dict(locals())
    check_fields(impulse_2025, options, "")
    return _by_site({AttentionSite: papers.impulse_2025}, **options)


def mimetic(
    *,
    position_scale: PositiveFloat | None = None,
    query_key_scale: float | None = None,
    value_out_scale: float | None = None,
) -> AttentionInit:
    """Mimetic initialization (Trockman & Kolter 2023): heads attend to similar tokens.

    Args:
      position_scale: Factor on learned positions. The three factors come from the 2025 program,
        are 1 by default, and apply to attention only.
      query_key_scale: Factor on query and key.
      value_out_scale: Factor on value and projection.
    """
    options = dict(locals())
    check_fields(mimetic, options, "")
    attention = dict.fromkeys((AttentionSite, RotarySite, WindowSite), tokens.mimetic)
    return _by_site(attention | {TokenMixingSite: token_mixing.mimetic}, **options)


def default(
    *,
    position_scale: PositiveFloat | None = None,
    query_key_scale: float | None = None,
    value_out_scale: float | None = None,
) -> AttentionInit:
    """The model's own initialization, timm's or PyTorch's (`config.model.base_init`).

    Args:
      position_scale: Factor on learned positions. The three factors come from the 2025 program,
        are 1 by default, and apply to attention only.
      query_key_scale: Factor on query and key.
      value_out_scale: Factor on value and projection.
    """
    options = dict(locals())
    check_fields(default, options, "")
    attention = dict.fromkeys((AttentionSite, RotarySite, WindowSite), tokens.default)
    others = {TokenMixingSite: token_mixing.default, ConvSite: convolution.default}
    return _by_site(attention | others, **options)


def kaiming_uniform() -> AttentionInit:
    """PyTorch's default for linear layers and convolutions: uniform between ±(inputs)^-1/2."""
    attention = dict.fromkeys((AttentionSite, RotarySite, WindowSite), tokens.kaiming_uniform)
    others = {TokenMixingSite: token_mixing.kaiming_uniform, ConvSite: convolution.default}
    return _by_site(attention | others)


SCHEMES: dict[str, Callable[..., AttentionInit]] = {
    "impulse": impulse,
    "impulse_2024": impulse_2024,
    "impulse_2025": impulse_2025,
    "mimetic": mimetic,
    "default": default,
    "kaiming_uniform": kaiming_uniform,
}


def _by_site(
    functions: dict[type, Callable[..., Weights]], *arguments: Any, **options: Any
) -> AttentionInit:
    """Returns `(rng, site) -> weights`, which calls the function for the site's type.

    Args:
      functions: Functions `(rng, site, *arguments, **options) -> weights` by type of site.
      *arguments: Passed to all of them.
      **options: Passed on unless None. The returned function raises `InputError` for an option that
        the function for the site does not take.
    """
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
        return function(rng, site, *arguments, **options)

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
