"""Structured initialization of attention: pure JAX and optax, for any model.

A scheme is a callable `(key, site) -> AttentionWeights`. `AttentionSite` says what a stack of equal
attention layers looks like; `AttentionWeights` holds start values in Flax's own layout:

    init = impulse(kernel_size=3)
    site = AttentionSite(grid=(14, 14), width=192, num_heads=3, head_dim=64, num_layers=12,
                         qk_scale=64**-0.5, positions=sincos_positions((14, 14), 192))
    weights = init(jax.random.key(0), site)      # weights.query: [12, 192, 3, 64]

Other models' sites: attention within windows, as in Swin, has a relative position bias in place of
positions (`WindowSite`, `weights.bias`); MLP-Mixer's token-mixing MLPs are a `TokenMixingSite` and
take `TokenMixingWeights`; ConvMixer's depthwise filters are a `ConvSite` and take `ConvWeights`.

Symbols, as in the papers: N tokens on a grid, D width, h heads, d = D / h, L layers, f kernel size,
P [N, D] positions, X = LayerNorm(P), σ = d^-1/2, Q and K [D, d] of one head, H [N, N] the map of a
convolution, M = softmax(σ X Q Kᵀ Xᵀ). The solve makes M as close to H as a given norm of Q and K
lets it.

Which scheme to use:

- `impulse`: the default. The 2024 paper's problem solved by L-BFGS in the encoding's row space,
  with every option of kernels, offsets and sharpness. For small data sets, and where in doubt.
- `impulse_2024`, `impulse_2025`: as the papers did it, to compare with or reproduce. 2025 is made
  for learned positions.
- `mimetic` (Trockman & Kolter 2023): heads attend to tokens like themselves. The one to beat.
- `default` (timm's truncated normal) and `kaiming_uniform` (PyTorch's): no structure.
"""

from structinit_jax.attention_init.baselines import default, kaiming_uniform, mimetic
from structinit_jax.attention_init.papers import impulse_2024, impulse_2025
from structinit_jax.attention_init.pseudo_input import sincos_positions
from structinit_jax.attention_init.registry import SCHEMES, by_name, scheme_options
from structinit_jax.attention_init.sites import (
    AttentionInit,
    AttentionSite,
    AttentionWeights,
    ConvSite,
    ConvWeights,
    Site,
    SolveReport,
    TokenMixingSite,
    TokenMixingWeights,
    Weights,
    WindowSite,
)
from structinit_jax.attention_init.tokens import impulse

__all__ = [
    "SCHEMES",
    "AttentionInit",
    "AttentionSite",
    "AttentionWeights",
    "ConvSite",
    "ConvWeights",
    "Site",
    "SolveReport",
    "TokenMixingSite",
    "TokenMixingWeights",
    "Weights",
    "WindowSite",
    "by_name",
    "default",
    "impulse",
    "impulse_2024",
    "impulse_2025",
    "kaiming_uniform",
    "mimetic",
    "scheme_options",
    "sincos_positions",
]
