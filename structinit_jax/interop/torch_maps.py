"""Records the attention maps of torch models."""

from typing import Any

import numpy as np
from jaxtyping import Float

from structinit_jax.errors import InputError


def torch_maps(model: Any, images: Any) -> list[Float[np.ndarray, "B h T T"]]:
    """Records the attention maps that a torch model computes.

    These are the results of every softmax over square logits [..., T, T], including those inside
    `scaled_dot_product_attention`; in Swin, B is the number of windows.

    Args:
      model: A `torch.nn.Module` that is not compiled. It is called in evaluation mode.
      images: The model's input, a tensor [B, C, H, W] with normalized channels.

    Returns:
      The maps in the order in which the model computes them, over all T tokens, including class and
      register tokens.

    Raises:
      InputError: No map was found.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils._python_dispatch import TorchDispatchMode

    found = []
    unseen = InputError(
        "model: the call computed no softmax over square logits [..., T, T]: pass a model that is "
        "not compiled, computes its attention in torch and does not choose a fused kernel"
    )
    modes = [(module, module.training) for module in model.modules()]
    fast_path = torch.backends.mha.get_fastpath_enabled()

    class Recorder(TorchDispatchMode):
        supports_higher_order_operators = True

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            if not hasattr(function, "decompose"):  # a higher-order operator: flex_attention
                raise unseen
            with self:  # in inference mode, operations that contain a softmax arrive intact
                out = function.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
            out = function(*args, **kwargs)
            is_softmax = "softmax" in function.__name__ and out.ndim > 2
            if is_softmax and out.shape[-1] == out.shape[-2] > 1:
                maps = out if out.ndim == 4 else out.reshape(len(images), -1, *out.shape[-2:])
                found.append(maps.float().cpu().numpy())
            return out

    torch.backends.mha.set_fastpath_enabled(False)  # It fuses the softmax.
    try:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), Recorder():
            model.eval()  # returns None in some projects
            model(images)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for module, training in modes:
            module.training = training
    if not found:
        raise unseen
    return found
