"""Structured initialization for Vision Transformers, in JAX.

    import structinit_jax as si

    params = si.initialize(params, si.impulse(), jax.random.key(0), num_heads=3)

The public names are imported at their first use, so that the import of the package is free.
"""

import importlib

__version__ = "0.1.0"

_NAMES = {
    "attention_init": (
        "AttentionSite",
        "AttentionWeights",
        "ConvSite",
        "RotarySite",
        "TokenMixingSite",
        "WindowSite",
        "default",
        "impulse",
        "impulse_2024",
        "impulse_2025",
        "impulse_mimetic",
        "mimetic",
        "rotary_angles",
        "sincos_positions",
    ),
    "config": ("base_config", "load_config"),
    "errors": ("InputError",),
    "evaluate": ("Classifier",),
    "interop": ("initialize", "torch_maps"),
    "models": ("ConvMixer", "MlpMixer", "SwinTransformer", "VisionTransformer"),
    "models.timm": ("from_timm", "select_weights", "to_timm"),
    "training.train": ("train",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_MODULES)


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
