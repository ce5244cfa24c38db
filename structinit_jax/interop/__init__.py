"""Exchanges weights with other projects.

`initialize` puts an attention scheme into the parameters of another project's model:

    state_dict = timm.create_model("vit_tiny_patch16_224").state_dict()
    params = {name: tensor.numpy() for name, tensor in state_dict.items()}
    params = initialize(params, impulse(), jax.random.key(0), num_heads=3)

`torch_maps` records the attention maps that a torch model computes; `analysis.measures` measures
them.

`from_timm` and `to_timm` convert the weights of our own models. `select_weights` starts a smaller
model from a larger one. State dicts hold NumPy or JAX arrays; only `torch_maps` needs torch.
"""

from structinit_jax.interop.convert import from_timm, select_weights, to_timm
from structinit_jax.interop.initialize import initialize, torch_maps

__all__ = [
    "from_timm",
    "initialize",
    "select_weights",
    "to_timm",
    "torch_maps",
]
