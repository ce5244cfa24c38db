"""Structured initialization of attention for any model; needs neither Flax nor our models.

A scheme is a function of options that returns an initializer, as in `jax.nn.initializers`: a
function `(rng, site) -> weights`. A site describes a stack of identical layers. The weights have
the layout of Flax's kernels:

    init = impulse(kernel_size=3)
    site = AttentionSite(grid=(14, 14), width=192, num_heads=3, head_dim=64, num_layers=12,
                         qk_scale=64**-0.5, positions=sincos_positions((14, 14), 192))
    weights = init(jax.random.key(0), site)      # weights.query: [12, 192, 3, 64]

Both calls can raise `InputError`: the first for invalid options, the second for a kind of site that
the scheme does not support, or for options that do not apply to that site.

Each kind of site has a module with its schemes:

- `AttentionSite`: attention with positions added to the tokens, as in ViT (`absolute`, and
  `published` for the papers' programs).
- `RotarySite`: attention with rotary positions only (`rotary`).
- `WindowSite`: attention within windows, as in Swin (`windows`).
- `TokenMixingSite`: token-mixing MLPs, as in MLP-Mixer (`token_mixing`).
- `ConvSite`: depthwise convolutions, as in ConvMixer (`token_mixing`).

Symbols follow the papers: N tokens on a grid, width D, h heads of d channels (D / h in our models),
L layers, F filters, kernel size f, positions P [N, D], X = LayerNorm(P), σ = d^-1/2, Q and K [D, d]
of a head, target map H [N, N] of a convolution, attention map M = softmax(σ X Q Kᵀ Xᵀ) [N, N].
"""

from __future__ import annotations  # so that signatures show the names of checked types

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np

from structinit_jax.attention_init import absolute, draws, published, rotary, token_mixing, windows
from structinit_jax.attention_init.positions import sincos_positions
from structinit_jax.attention_init.published import PseudoInput
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
    is_concrete,
)
from structinit_jax.attention_init.solve import reach_warning
from structinit_jax.attention_init.targets import FilterArray, OddInt
from structinit_jax.errors import (
    Fraction,
    InputError,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    check_fields,
    require,
    warn,
)


def impulse(
    *,
    kernel_size: OddInt = 3,
    filters: FilterArray | None = None,
    dilation: PositiveInt = 1,
    target_mass: Fraction = 0.3,
    replace_positions: bool = True,
) -> AttentionInit:
    """The papers' method: every head of every layer starts as an impulse convolution.

    Solves for query and key weights such that each head's attention to positions is

        softmax(σ X Q Kᵀ Xᵀ) ≈ H,

    where H attends to the neighbor at the head's offset (2024, equation 8; see `absolute`).
    `impulse_2024` and `impulse_2025` solve for Q and K as the papers do, with algorithm 1 and a
    pseudo-inverse; this scheme gets closer to H at the same norms. Once compiled, it takes less
    than a second on 14×14 tokens (two with learned positions); the time grows with the square of
    the number of tokens.

    The product of value and output projection is -0.4 I plus noise, as in the 2025 paper's program,
    although the text of both papers sets only Q and K. To set only these, wrap the initializer:
    `lambda rng, site: impulse()(rng, site)._replace(value=None, out=None)`. Most of the gain on
    CIFAR-10 then disappears (docs/results.md).

    The variants for rotary positions, windows (Swin) and token mixing (MLP-Mixer) are our own: the
    papers do not use rotary positions, and the 2025 paper has results for Swin and MLP-Mixer, but
    its program has no impulse for them. The scale of the filters at a `ConvSite` is our own too.

    >>> weights = si.impulse(kernel_size=3)(jax.random.key(0), site)  # a site as in `AttentionSite`
    >>> weights.query.shape
    (12, 96, 3, 32)

    Args:
      kernel_size: Odd kernel size f of the impulses. A `ConvSite` has its own kernel size.
      filters: Filters [F, f, f] to use instead of impulses; `kernel_size` is then ignored. For
        attention, they must not be negative.
      dilation: Distance in tokens between neighboring taps of a filter.
      target_mass: Share of a token's attention that goes to its target, which sets how sharp the
        maps are. It must be larger than the share under uniform attention, 1 / N for an impulse; in
        windows too small for that, the bias is zero. `weights.report` has the share reached.
      replace_positions: Whether a sin-cos encoding replaces learned positions. If false, learned
        positions are multiplied by 18, as in 2025, and the solve uses the result.

    Returns:
      The initializer, a function `(rng, site) -> weights`.

    Raises:
      InputError: An option is invalid. The initializer raises it if one does not fit the site.
    """
    return _by_site(
        impulse,
        locals(),
        {
            AttentionSite: absolute.impulse,
            RotarySite: rotary.impulse,
            WindowSite: windows.impulse,
            TokenMixingSite: token_mixing.mlp_impulse,
            ConvSite: token_mixing.conv_impulse,
        },
    )


def impulse_mimetic(
    *,
    kernel_size: OddInt = 3,
    filters: FilterArray | None = None,
    dilation: PositiveInt = 1,
    target_mass: Fraction = 0.1,
) -> AttentionInit:
    """Our variant: `impulse` in the first half of the layers, then attention to similar tokens.

    In the second half, heads attend to similar tokens, as in `mimetic`. The default target mass is
    smaller than that of `impulse`; with sin-cos positions, masses from 0.05 to 0.2 train about
    equally well on CIFAR-10 (docs/results.md). Grids of ten tokens or fewer need a larger mass. A
    sin-cos encoding replaces learned positions. For the options, see `impulse`.

    >>> weights = si.impulse_mimetic()(jax.random.key(0), site)  # a site as in `AttentionSite`
    >>> weights.filter_index.shape  # half of the 12 layers, 3 heads
    (6, 3)
    """
    return _by_site(
        impulse_mimetic,
        locals(),
        {
            AttentionSite: partial(absolute.impulse, half=True),
            RotarySite: partial(rotary.impulse, half=True),
        },
    )


def impulse_2024(
    *,
    kernel_size: OddInt = 3,
    same_layers: bool = True,
    first_input: PseudoInput = "positions",
    following_input: PseudoInput = "positions",
    max_steps: PositiveInt = 10_000,
    rescale: bool = True,
    taps: PositiveInt = 1,
) -> AttentionInit:
    """The impulse initialization of the 2024 paper as published, to reproduce it.

    `taps` applies to convolutions. All other options apply to attention with positions, where the
    sin-cos encoding replaces a learned table.

    Args:
      kernel_size: Kernel size f, odd. Each head draws one of the f² offsets.
      same_layers: Whether all layers share Q and K, as in the paper's main results. With two pseudo
        inputs, the first layer has its own Q and K. Layers that do not share them draw their
        own offsets and noise.
      first_input: Pseudo input of the first layer (table 6): 'positions', 'uniform', 'gaussian',
        'positions+uniform' or 'positions+gaussian'.
      following_input: Pseudo input of the other layers.
      max_steps: Number of Adam steps.
      rescale: Whether Q and K are rescaled every 100 steps, which bounds their norms. The program
        does so; algorithm 1 as printed does not.
      taps: Number of nonzero entries in each filter, all equal: 1 gives the impulses of table 4,
        and f² its box filters.
    """
    return _by_site(
        impulse_2024,
        locals(),
        {AttentionSite: published.impulse_2024, ConvSite: token_mixing.conv_impulse_2024},
    )


def impulse_2025(
    *,
    position_scale: PositiveFloat = 18.0,
    query_key_norm: PositiveFloat = 7.0,
    target_scale: PositiveFloat = 1000.0,
    target_noise: NonNegativeFloat = 3.0,
    replace_positions: bool = False,
) -> AttentionInit:
    """The impulse initialization of the 2025 paper as published, for learned positions.

    The defaults are those of the paper's program. A summary of the paper gives other values, which
    we know only second-hand: target_scale=40, target_noise=1 and query_key_norm=2.

    Args:
      position_scale: Factor on learned positions, whose standard deviation is 0.02 in the paper's
        program; fixed positions are not scaled.
      query_key_norm: Frobenius norm of each head's Q and K.
      target_scale: Logit of the target. Only its ratio to `target_noise` matters.
      target_noise: Factor on the noise in the other logits.
      replace_positions: Whether a sin-cos encoding replaces learned positions, as in `impulse`; the
        program keeps them. The closed form needs positions of rank d: a sin-cos encoding has a
        lower rank, which leaves the maps of wide heads nearly uniform.
    """
    return _by_site(impulse_2025, locals(), {AttentionSite: published.impulse_2025})


def mimetic(
    *,
    replace_positions: bool = True,
    position_scale: PositiveFloat = 1.0,
    query_key_scale: PositiveFloat = 1.0,
    value_scale: PositiveFloat = 1.0,
) -> AttentionInit:
    """Mimetic initialization (Trockman & Kolter 2023): heads attend to similar tokens.

    The 2025 paper's `mimetica_b_c` is `mimetic(replace_positions=False, position_scale=a,
    query_key_scale=b, value_scale=c)`. Decomposing a matrix for each head takes 17 s for ViT-B on
    two CPU cores, and minutes for ViT-L.

    >>> weights = si.mimetic()(jax.random.key(0), site)  # a site as in `AttentionSite`

    Args:
      replace_positions: Whether a sin-cos encoding replaces learned positions. Neighbors then have
        similar positions, so heads attend to them. Learned positions start too close to zero to
        matter; the 2025 paper's program keeps them.
      position_scale: Factor on learned positions that are kept.
      query_key_scale: Factor on Q and on K.
      value_scale: Factor on V and on the output projection.
    """
    return _by_site(
        mimetic,
        locals(),
        {**_attention_baselines(draws.mimetic_weights), TokenMixingSite: token_mixing.mlp_mimetic},
    )


def default(
    *,
    replace_positions: bool = False,
    position_scale: PositiveFloat = 1.0,
    query_key_scale: PositiveFloat = 1.0,
    value_scale: PositiveFloat = 1.0,
) -> AttentionInit:
    """The base initialization of our models, timm's or PyTorch's; in other models, timm's.

    The options are those of `mimetic`, to compare at equal norms (the 2025 paper's `defaulta_b_c`).
    """
    return _by_site(
        default,
        locals(),
        {
            **_attention_baselines(draws.base_weights),
            TokenMixingSite: lambda rng, site: TokenMixingWeights(),  # The model keeps its own.
            ConvSite: token_mixing.conv_default,
        },
    )


SCHEMES: dict[str, Callable[..., AttentionInit]] = {
    scheme.__name__: scheme
    for scheme in (impulse, impulse_2024, impulse_2025, impulse_mimetic, mimetic, default)
}


def _attention_baselines(
    draw: Callable[..., AttentionWeights],
) -> dict[type, Callable[..., AttentionWeights]]:
    """Returns, for each kind of attention, a function that scales the weights of `draw`."""
    return {
        AttentionSite: partial(absolute.baseline, draw=draw),
        RotarySite: partial(draws.baseline, draw=draw),
        WindowSite: partial(draws.baseline, draw=draw),
    }


def _by_site(
    scheme: Callable[..., AttentionInit],
    options: Mapping[str, Any],
    functions: Mapping[type, Callable[..., Weights]],
) -> AttentionInit:
    """Checks a scheme's options and returns its initializer, a function `(rng, site) -> weights`.

    The initializer calls the function for the site's type with the options that this function
    accepts. It raises `InputError` for any other option that is not at its default.
    """
    check_fields(scheme, options)
    parameters = inspect.signature(scheme).parameters
    changed = {
        name: value
        for name, value in options.items()
        if not np.array_equal(value, parameters[name].default)
    }
    if options.get("replace_positions"):
        needs = "left out with replace_positions=True: it scales learned positions that are kept"
        scale = changed.get("position_scale")
        require("position_scale", scale, needs, scale is None)

    def initialize_site(rng: jax.Array, site: Site) -> Weights:
        kind = type(site)
        if kind not in functions:
            known = ", ".join(site_type.__name__ for site_type in functions)
            raise InputError(
                f"{scheme.__name__} is for {known}, not for {kind.__name__}: use another scheme"
            )
        function = functions[kind]
        taken = options.keys() & inspect.signature(function).parameters.keys()
        for name in changed.keys() - taken:
            raise InputError(f"{name}={changed[name]!r} does not apply to {kind.__name__}")
        # TPUs would multiply in bfloat16, which is too coarse for a solve and crashes the compiler.
        with jax.default_matmul_precision("highest"):
            weights = function(rng, site, **{name: options[name] for name in taken})
        report = getattr(weights, "report", None)
        if report and is_concrete(report.hit_rate) and (message := reach_warning(report)):
            warn(message)
        return weights

    return initialize_site
