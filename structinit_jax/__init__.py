"""Structured initialization for Vision Transformers, in JAX.

    import structinit_jax as si

    params = si.initialize(params, si.impulse(), jax.random.key(0), num_heads=3)

Public names are imported on first use, so importing the package costs nothing.
"""

from etils import epy

__version__ = "0.1.0"

with epy.lazy_api_imports(
    globals(), error_msg="{symbol_name} needs the trainer, pip install '.[train]' in a clone: "
):
    from structinit_jax.attention_init import (
        AttentionSite,
        AttentionWeights,
        ConvSite,
        ConvWeights,
        RotarySite,
        TokenMixingSite,
        TokenMixingWeights,
        WindowSite,
        default,
        impulse,
        impulse_2024,
        impulse_2025,
        impulse_mimetic,
        mimetic,
        rotary_angles,
        sincos_positions,
    )
    from structinit_jax.config import base_config, load_config
    from structinit_jax.errors import InputError
    from structinit_jax.interop import initialize, torch_maps
    from structinit_jax.models import ConvMixer, MlpMixer, SwinTransformer, VisionTransformer
    from structinit_jax.models.model import Model
    from structinit_jax.models.timm import from_timm, select_weights, to_timm
    from structinit_jax.training.evaluation import Classifier
    from structinit_jax.training.train import train

del epy  # Not part of the public API.
