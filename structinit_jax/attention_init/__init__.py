"""Structured initialization of attention: JAX and optax only, for any model.

A scheme is a function `(rng, site) -> weights`. A site describes a stack of equal layers; the
weights are in Flax's layout:

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

Symbols are those of the papers: N tokens on a grid, width D, h heads of d = D / h channels, L
layers, F filters, kernel size f, positions P [N, D], X = LayerNorm(P), σ = d^-1/2, Q and K [D, d]
of one head, H [N, N] the map of a convolution, M = softmax(σ X Q Kᵀ Xᵀ).

Which scheme to use:

- `impulse`: the default. Solves for the map M of a given sharpness that is closest to H. Use it for
  small data sets, and when in doubt.
- `impulse_2024`, `impulse_2025`: as in the papers, for reproduction. 2025 is for learned positions.
- `mimetic` (Trockman & Kolter 2023): heads attend to similar tokens. The baseline to beat.
- `default` (the model's base init: timm's or PyTorch's) and `kaiming_uniform` (PyTorch's): no
  structure.

To add a scheme, write `@register("my_scheme", AttentionSite) def my_scheme(rng, site, *, option=1)`
in the module of that site. Outside the package, write a function that takes the options and returns
`(rng, site) -> weights`; `by_name("my_module:my_scheme")` finds it.
"""

# Importing these registers their schemes.
from structinit_jax.attention_init import (
    convolution,
    papers,
    rotary,
    token_mixing,
    tokens,
    windows,
)
from structinit_jax.attention_init.pseudo_input import sincos_positions
from structinit_jax.attention_init.registry import (
    SCHEMES,
    by_name,
    register,
    scheme,
    scheme_options,
)
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

default = scheme("default")
kaiming_uniform = scheme("kaiming_uniform")
mimetic = scheme("mimetic")
impulse = scheme("impulse")
impulse_2024 = scheme("impulse_2024")
impulse_2025 = scheme("impulse_2025")

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
    "by_name",
    "convolution",
    "default",
    "impulse",
    "impulse_2024",
    "impulse_2025",
    "kaiming_uniform",
    "mimetic",
    "papers",
    "register",
    "rotary",
    "rotary_angles",
    "scheme",
    "scheme_options",
    "sincos_positions",
    "token_mixing",
    "tokens",
    "windows",
]
