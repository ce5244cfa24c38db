"""Measures how well a scheme's attention maps survive in the model they were written into."""

import math
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int

from structinit_jax.attention_init.sites import check_grid
from structinit_jax.errors import InputError
from structinit_jax.interop.host import Block, Grid, Host, PositionTable, find_host
from structinit_jax.interop.layouts import FIELDS, flatten
from structinit_jax.interop.other_sites import find_sites

NOISE_TOKENS = 1024  # tokens of noise images, enough for rates to about 0.02
MODELED = (
    "standard pre-norm ViT computed from the parameters, not the model itself: softmax attention "
    "without a mask, logits scaled by head_dim^-1/2, query, key and value of a fused tensor one "
    "after the other, positions added once and unscaled"
)


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


class Estimate(NamedTuple):
    """What the attention of a standard ViT with a model's parameters does, by layer and head.

    Attributes:
      modeled: What was computed. A model that differs has other maps, see `check`.
      position_to_content: Root mean square of the positions over that of the patch embeddings; the
        first layer's input is their sum.
      offset: See `Hits`, with a leading layer axis.
      hit_rate: See `Hits`.
      target_mass: See `Hits`.
    """

    modeled: str
    position_to_content: float
    offset: Int[np.ndarray, "L h 2"]
    hit_rate: Float[np.ndarray, "L h"]
    target_mass: Float[np.ndarray, "L h"]


def check(
    params: Any,
    images: Float[np.ndarray, "B H W C"] | None = None,
    *,
    layout: str | None = None,
    num_heads: int | None = None,
    grid: Grid | None = None,
    positions: np.ndarray | jax.Array | None = None,
) -> Estimate:
    """Estimates the attention maps of a freshly initialized model from its parameters.

        check(params, num_heads=3).hit_rate.mean(axis=1)  # by layer

    It models a standard pre-norm ViT, not your code: convolutional patches, positions, and blocks
    of softmax attention and an MLP with GELU. A norm without bias counts as RMSNorm. The maps
    exclude class and register tokens.

    Parameters do not show how they are used. The result is wrong without notice if the model scales
    its embeddings, positions or logits, masks its attention, stores a fused qkv by head, rotates
    queries and keys in addition to a position table, or has another number of heads or another grid
    of as many tokens. For a torch model, `torch_maps` records the maps that it really computes.

    Args:
      params: Parameters; for these and the other arguments see `initialize`.
      images: Images as the model sees them, with normalized channels. None draws noise with the
        spectrum of natural images, on which the rates are close to those on photographs.
      layout: One of `LAYOUTS`.
      num_heads: Number of heads h.
      grid: (rows, cols) of the image tokens.
      positions: [N, D] encoding that the model adds to its tokens without storing it.

    Raises:
      InputError: The parameters show a model of another form.
    """
    leaves, _ = flatten(params)
    if sites := find_sites(leaves, layout, grid):
        raise _not_modeled(sites[0].name)
    host = find_host(leaves, layout, num_heads)
    host.require_assumptions()
    if rotary := host.rotary_positions():
        raise _not_modeled(rotary)
    blocks = host.blocks()
    has_bias = all(f"{norm}.bias" in leaves for block in blocks for norm in block.norms)
    norm = _layer_norm if has_bias else _rms_norm
    table = host.positions(positions, grid)
    x, ratio = _embed(host, norm, images, table)
    attention = {path: np.asarray(array, np.float32) for path, array in host.arrays().items()}
    tokens, hits = math.prod(table.grid), []
    for i, block in enumerate(blocks * (host.num_layers if host.stack.stacked else 1)):
        layer = {path: array[i] for path, array in attention.items()}
        _require_known(block)
        x, maps = _run_block(host, norm, block, i, layer, x)
        hits.append(hit_rates(maps[..., -tokens:, -tokens:], table.grid))
    return Estimate(MODELED, ratio, *map(np.stack, zip(*hits, strict=True)))


def hit_rates(maps: Float[np.ndarray, "B h N N"], grid: Grid) -> Hits:
    """Measures the attention maps of one layer.

    Args:
      maps: Attention of each image token (third axis) to all image tokens (last axis), row by row,
        without class and register tokens, for a batch of images.
      grid: (rows, cols) of the image tokens.

    Raises:
      InputError: There are no maps, they are not of that grid, or they are NaN.
    """
    check_grid("grid", grid)
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

        grid, tokens = (14, 14), 196
        for maps in torch_maps(model, images):  # by layer; class and register tokens come first
            print(hit_rates(maps[..., -tokens:, -tokens:], grid).hit_rate)

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


def natural_noise(
    count: int, height: int, width: int, channels: int
) -> Float[np.ndarray, "B H W C"]:
    """Draws noise of mean 0 and deviation 1 whose amplitudes fall with frequency as 1 / f.

    A tenth of the variance is independent between the channels, as in photographs.
    """
    rng = np.random.default_rng(0)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = 1 / max(height, width)
    white = rng.standard_normal((count, 1 + channels, height, width))
    noise = np.fft.irfft2(np.fft.rfft2(white) / frequency, s=(height, width))
    noise = 0.9**0.5 * noise[:, :1] + 0.1**0.5 * noise[:, 1:]
    return np.moveaxis(noise / noise.std(), 1, -1).astype(np.float32)


# -- the forward pass ------------------------------------------------------------------------------


def _embed(host: Host, norm, images, table: PositionTable):
    """Returns the first block's input and the ratio of positions to content."""
    extra = [np.reshape(host.leaves[name], (-1, host.width)) for name in host.extra_tokens()]
    extra = np.concatenate([*extra, np.zeros((0, host.width))]).astype(np.float32)
    rows = np.asarray(table.rows, np.float32)
    extra[: table.prefix] += rows[: table.prefix]
    content, positions = _patches(host, norm, images, table.grid), rows[table.prefix :]
    ratio = float(np.sqrt(np.mean(np.square(positions)) / np.mean(np.square(content))))
    extra = np.broadcast_to(extra, (len(content), *extra.shape))
    x = np.concatenate([extra, content + positions], axis=1)
    return norm(x) if host.has_pre_norm() else x, ratio


def _patches(host: Host, norm, images, grid: Grid) -> Float[np.ndarray, "B N D"]:
    """Returns the patch embeddings, normed if the model has a norm for them."""
    kernel = np.asarray(host.leaves[host.patch_kernel()], np.float32)
    backbone = next((name for name in host.leaves if "patch_embed.backbone." in name), None)
    if backbone or kernel.ndim == 2:
        raise _not_modeled(backbone or host.patch_kernel())
    if host.stack.layout.torch:
        kernel = kernel.transpose(2, 3, 1, 0)
    height, width, channels, _ = kernel.shape
    rows, cols = grid
    shape = (rows * height, cols * width, channels)
    if images is None:
        images = natural_noise(max(2, NOISE_TOKENS // (rows * cols)), *shape)
    images = np.asarray(images)
    if images.shape[1:] != shape or not len(images):
        raise InputError(
            f"images has shape {images.shape}, but the model needs {('B', *shape)}: its "
            f"{rows}x{cols} tokens are patches of {height}x{width} pixels"
        )
    patches = images.reshape(-1, rows, height, cols, width, channels).swapaxes(2, 3)
    patches = patches.reshape(len(images), rows * cols, -1)
    tokens = patches @ kernel.reshape(-1, host.width)
    # Equinox's bias is [D, 1, 1].
    tokens = tokens + np.ravel(host.leaves.get(host.patch_bias(), 0)).astype(np.float32)
    if scale := host.patch_norm():
        return norm(tokens) * np.asarray(host.leaves[scale], np.float32)
    return tokens


def _run_block(host: Host, norm, block: Block, layer: int, attention, x):
    """Returns the block's output and its attention maps."""
    from scipy import special  # slow to import, and not always needed

    query, key, value = (_project(norm(x), attention, field) for field in FIELDS[:3])
    logits = np.einsum("bnhd,bmhd->bhnm", query, key, optimize=True) * host.head_dim**-0.5
    maps = special.softmax(logits, axis=-1)
    mixed = np.einsum("bhnm,bmhd->bnhd", maps, value, optimize=True)
    out = np.einsum("bnhd,hdD->bnD", mixed, attention["attention/out/kernel"], optimize=True)
    scale1, scale2 = [_leaf(host, name, layer) for name in block.scales] or (1, 1)
    x = x + scale1 * (out + attention.get("attention/out/bias", 0))
    hidden = _linear(host, block.mlp_in[0], layer, norm(x))
    hidden = hidden * special.ndtr(hidden)  # GELU
    return x + scale2 * _linear(host, block.mlp_out[0], layer, hidden), maps


def _require_known(block: Block) -> None:
    """Raises `InputError` unless the block is what `_run_block` computes."""
    allowed = ((2,), (1,), (1,), (0, 2), (0,))
    for kind, names, counts in zip(Block._fields, block, allowed, strict=True):
        if len(names) not in counts:
            needs = " or ".join(map(str, counts))
            raise _not_modeled(f"a block with {kind} {', '.join(names) or 'none'}, not {needs},")


def _not_modeled(name: str) -> InputError:
    return InputError(
        f"params: {name} is not part of the standard pre-norm ViT that `check` models: take the "
        "attention maps from the model itself (`torch_maps` for torch) and pass them to `hit_rates`"
    )


def _layer_norm(x):
    return _rms_norm(x - x.mean(axis=-1, keepdims=True))


def _rms_norm(x):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6)


def _project(x, attention, field):
    y = np.einsum("bnD,Dhd->bnhd", x, attention[f"attention/{field}/kernel"], optimize=True)
    return y + attention.get(f"attention/{field}/bias", 0)


def _linear(host, module, layer, x):
    kernel = _leaf(host, f"{module}.{host.stack.layout.leaf}", layer)
    y = x @ (kernel.T if host.stack.layout.torch else kernel)
    bias = f"{module}.bias"
    return y + _leaf(host, bias, layer) if bias in host.leaves else y


def _leaf(host, name, layer):
    array = host.leaves[name]
    return np.asarray(array[layer] if host.stack.stacked else array, np.float32)
