"""Exchanges weights with other projects.

`initialize` puts an attention scheme into the parameters of another project's model, and
`torch_maps` records the attention maps that a torch model computes. `from_timm` and `to_timm`
convert the weights of our own models. `select_weights` starts a smaller model from a larger one.
State dicts may hold NumPy or JAX arrays or torch tensors; only `torch_maps` needs torch.
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
