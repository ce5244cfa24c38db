"""Structured initialization of attention: pure JAX and optax, for any model.

A scheme is a callable `(key, site) -> AttentionWeights`. `AttentionSite` says what a stack of equal
attention layers looks like; `AttentionWeights` holds start values in Flax's own layout:

    init = impulse(kernel_size=3)
    site = AttentionSite(grid=(14, 14), width=192, num_heads=3, head_dim=64, num_layers=12,
                         qk_scale=64**-0.5, positions=sincos_positions((14, 14), 192))
    weights = init(jax.random.key(0), site)      # weights.query: [12, 192, 3, 64]

Schemes: `default` (truncated normal), `mimetic` (Trockman & Kolter 2023) and `impulse` (Zheng et
al., arXiv:2505.19985 and its 2024 precursor, solved by L-BFGS in the encoding's row space).
"""

from structinit_jax.attention_init.pseudo_input import sincos_positions
from structinit_jax.attention_init.schemes import (
    SCHEMES,
    by_name,
    default,
    impulse,
    mimetic,
    scheme_options,
)
from structinit_jax.attention_init.site import (
    AttentionInit,
    AttentionSite,
    AttentionWeights,
    SolveReport,
)

__all__ = [
    "SCHEMES",
    "AttentionInit",
    "AttentionSite",
    "AttentionWeights",
    "SolveReport",
    "by_name",
    "default",
    "impulse",
    "mimetic",
    "scheme_options",
    "sincos_positions",
]
