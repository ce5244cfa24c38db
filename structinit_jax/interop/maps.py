"""Records the attention maps of torch models."""

from typing import Any

import numpy as np
from jaxtyping import Float


def torch_maps(model: Any, images: Any) -> list[Float[np.ndarray, "B h T T"]]:
    """Records the attention maps that a torch model computes.

    It collects the result of every softmax over a square of tokens, those inside
    `scaled_dot_product_attention` included. Pass a model that is not compiled.

    Args:
      model: A `torch.nn.Module`; it is called in evaluation mode.
      images: Its input, a tensor [B, C, H, W] with normalized channels.

    Returns:
      The maps in the order in which the model computes them, over all T tokens.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils._python_dispatch import TorchDispatchMode

    found, training = [], model.training
    fast_path = torch.backends.mha.get_fastpath_enabled()

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if "softmax" in function.__name__ and out.shape[-1] == out.shape[-2] > 1:
                maps = out if out.ndim == 4 else out.reshape(len(images), -1, *out.shape[-2:])
                found.append(maps.float().cpu().numpy())
            return out

    torch.backends.mha.set_fastpath_enabled(False)  # which fuses the softmax
    try:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), Recorder():
            model.eval()(images)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        model.train(training)
    return found
