"""Exchanges weights with other projects.

`initialize` puts an attention scheme into the parameters of another project's model:

    state_dict = timm.create_model("vit_tiny_patch16_224").state_dict()
    params = {name: tensor.numpy() for name, tensor in state_dict.items()}
    params = initialize(params, impulse(), jax.random.key(0), num_heads=3)

It supports timm, torchvision, open_clip, Hugging Face, big_vision, vit_jax, deit3-jax and Flax NNX
models with `MultiHeadAttention` layers, for example jimm's. `attention_site`, `read` and `write`
are its parts. `check` measures the resulting attention maps on images.

`from_timm` and `to_timm` convert the weights of our own models. `select_weights` starts a smaller
model from a larger one. State dicts hold NumPy or JAX arrays; torch is not needed.
"""

from structinit_jax.interop.check import Check, check, hit_rates
from structinit_jax.interop.convert import from_timm, to_timm
from structinit_jax.interop.initialize import attention_site, initialize, read, write
from structinit_jax.interop.layouts import LAYOUTS
from structinit_jax.interop.select_weights import select_weights

__all__ = [
    "LAYOUTS",
    "Check",
    "attention_site",
    "check",
    "from_timm",
    "hit_rates",
    "initialize",
    "read",
    "select_weights",
    "to_timm",
    "write",
]
