"""Schemes for other projects' models: their parameters in, the same parameters initialized out.

    state = timm.create_model("vit_tiny_patch16_224").state_dict()
    params = {name: tensor.numpy() for name, tensor in state.items()}
    params = initialize(params, impulse(), jax.random.key(0), num_heads=3)

Layouts: timm, Hugging Face, big_vision, vit_jax, and any Flax NNX model of `MultiHeadAttention`s
such as jimm's. `select_weights` starts a smaller model from a larger one. Torch is not needed:
state dicts come and go as NumPy or JAX arrays.
"""

from structinit_jax.interop.convert import from_timm, to_timm
from structinit_jax.interop.layouts import LAYOUTS
from structinit_jax.interop.select_weights import select_weights
from structinit_jax.interop.weights import attention_site, initialize, read, write

__all__ = [
    "LAYOUTS",
    "attention_site",
    "from_timm",
    "initialize",
    "read",
    "select_weights",
    "to_timm",
    "write",
]
