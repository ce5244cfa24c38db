"""Attention maps of other projects' models: recorded from torch, and measured."""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from structinit_jax.attention_init.sites import GRID
from structinit_jax.errors import InputError, require
from structinit_jax.interop.host import Grid


class Hits(NamedTuple):
    """How regular the attention maps of one layer are, by head.

    Attributes:
      offset: Most frequent offset (rows, cols) from a token to the one that it attends to most.
      hit_rate: Among the tokens with a neighbor at this offset, the share that attend most to it.
        Close to 1 for a convolution.
      target_mass: Mean attention that these tokens pay to that neighbor. It is small in flat maps,
        however often they hit.
    """

    offset: Int[np.ndarray, "h 2"]
    hit_rate: Float[np.ndarray, " h"]
    target_mass: Float[np.ndarray, " h"]


def hit_rates(maps: Float[np.ndarray, "B h N N"], grid: Grid) -> Hits:
    """Measures the attention maps of one layer.

    Args:
      maps: Attention of each image token (third axis) to all image tokens (last axis), row by row,
        without class and register tokens, for a batch of images.
      grid: (rows, cols) of the image tokens.

    Raises:
      InputError: There are no maps, they are not of that grid, or they are NaN.
    """
    require("grid", grid, *GRID)
    rows, cols = grid
    maps, tokens = np.asarray(maps), rows * cols
    if maps.ndim != 4 or maps.shape[2:] != (tokens, tokens) or not len(maps):
        raise InputError(
            f"maps has shape {maps.shape}, but grid={grid} needs [images, heads, {tokens}, "
            f"{tokens}]: cut off class and register tokens, or pass the grid"
        )
    if np.isnan(maps).any():
        raise InputError("maps hold NaN: parameters or images are not finite")
    strongest, token = maps.argmax(axis=-1), np.arange(tokens)
    dy = strongest // cols - token // cols  # [B, h, N]
    dx = strongest % cols - token % cols
    code = (dy + rows) * 2 * cols + dx + cols
    every = np.stack(np.divmod(np.arange(4 * tokens), 2 * cols)) - np.array([[rows], [cols]])
    neighbors = (rows - abs(every[0])) * (cols - abs(every[1]))  # tokens with one at this offset
    offsets, rates, masses = [], [], []
    for head in range(maps.shape[1]):
        counts = np.bincount(code[:, head].ravel(), minlength=4 * tokens)
        # Of equally frequent offsets the one of most tokens: if all attend to the same token, each
        # offset occurs once, and one that a single token has would count as a convolution.
        best = np.lexsort((neighbors, counts))[-1]
        offset = every[:, best]
        y, x = token // cols + offset[0], token % cols + offset[1]
        inside = (y >= 0) & (y < rows) & (x >= 0) & (x < cols)
        offsets.append(offset)
        rates.append(counts[best] / (len(maps) * neighbors[best]))
        masses.append(maps[:, head, token[inside], (y * cols + x)[inside]].mean())
    return Hits(np.array(offsets), np.array(rates), np.array(masses))


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
