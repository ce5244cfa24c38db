"""Applies attention schemes to other projects' models.

`initialize` writes a scheme into the parameters of another project's model, and `torch_maps`
records the attention maps that a torch model computes. Only `torch_maps` needs torch.
"""

from structinit_jax.interop.initialize import initialize
from structinit_jax.interop.torch_maps import torch_maps

__all__ = ["initialize", "torch_maps"]
