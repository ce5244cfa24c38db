"""Writes attention schemes into other projects' models, and records the maps of torch models."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from structinit_jax.attention_init import AttentionInit, AttentionSite, AttentionWeights
from structinit_jax.attention_init.sites import check_shape
from structinit_jax.errors import InputError
from structinit_jax.interop.entries import check_array, like, replace_rows
from structinit_jax.interop.host import Grid, Host, square
from structinit_jax.interop.layouts import Leaves, find_stack, flatten
from structinit_jax.interop.sites import find_window_sites, rotary_site

# Root mean square of the embeddings of white images of variance 1 under PyTorch's default kernel,
# whose variance is 1 / (3 fan-in).
PATCH_RMS = 3**-0.5


def initialize(
    params: Any,
    attention_init: AttentionInit,
    rng: jax.Array,
    *,
    num_heads: int | None = None,
    grid: Grid | None = None,
    positions: np.ndarray | jax.Array | None = None,
    rotations: Any | None = None,
) -> Any:
    """Writes the weights of a scheme into the parameters of a freshly built model.

    The model is a ViT or, for schemes that support them, a model with a relative position bias in
    every layer (Swin, BEiT). Schemes assume that the LayerNorm before the attention has scale 1 and
    bias 0, that query-key products are scaled by d^-1/2, and that tokens are in row-major order.
    Parameters that show otherwise raise an error, but they do not show everything: measure a torch
    model's own maps with `torch_maps`.

    The biases of the projections that the scheme sets become zero, and its encoding replaces a
    learned position table, except for class and register tokens. `mlp_scale` multiplies the output
    kernels of the MLPs. `patch_scale` multiplies the patch embedding's kernel, or the norm after
    it, and is relative to PyTorch's default kernel, so that the ratio of positions to content is
    the same in every model.

    Args:
      params: A state dict, Linen tree, Equinox or NNX module, NNX state or pure dict; not changed.
      attention_init: The scheme, such as `impulse()`; or `lambda rng, site: weights`.
      rng: Random key for the scheme.
      num_heads: Number of heads h; required for torch and Equinox, whose shapes do not show it.
      grid: (rows, cols) of the image tokens, or in Swin and BEiT of the windows that are not
        square; None assumes a square.
      positions: [N, D] encoding that the model adds to its tokens without storing it in `params`,
        for example `sincos_positions(grid, D)`, or for MoCo v3 and big_vision
        `sincos_positions(grid, D, convention="moco")`. A table in `params` is then ignored.
      rotations: Rotary positions (RoPE) of the image tokens, of a model that adds none to them:
        sines and cosines [..., N, 2 d] of timm's `model.rope.get_embed(...)`, optionally with axes
        for layers and heads, or the pair (cosines, sines) of Hugging Face's
        `model.rope_embeddings(pixel_values)`, as NumPy arrays.

    Returns:
      Parameters of the same structure, array kinds (NumPy or JAX), dtypes and shardings. Unchanged
      arrays may be shared with `params`.

    Raises:
      InputError: An argument is missing, or the model does not fit the scheme.
    """
    leaves, rebuild = flatten(params)
    sites = find_window_sites(leaves, grid)
    if not sites:
        host = Host(leaves, find_stack(leaves), num_heads)
        weights = attention_init(rng, _find_site(host, grid, positions, rotations))
        return rebuild(_write(host, weights, grid))
    given = dict(positions=positions, rotations=rotations, num_heads=num_heads)
    if unused := [name for name, value in given.items() if value is not None]:
        raise InputError(f"{unused[0]}: leave it out, the model has {sites[0].name} instead")
    rngs = [rng] if len(sites) == 1 else jax.random.split(rng, len(sites))
    for found, site_rng in zip(sites, rngs, strict=True):
        leaves = found.write(leaves, attention_init(site_rng, found.site))
    return rebuild(leaves)


def _find_site(
    host: Host,
    grid: Grid | None,
    positions: np.ndarray | jax.Array | None,
    rotations: Any | None,
) -> AttentionSite:
    if positions is not None and rotations is not None:
        raise InputError("positions and rotations exclude each other: pass one of them")
    host.require_assumptions()
    table = host.position_table(grid) if positions is None else None
    if rotations is not None:
        if table is not None:
            raise InputError(
                f"rotations: the model also adds the positions {table.name} to its tokens, which "
                "schemes then use: leave out rotations, and measure the maps"
            )
        return rotary_site(host, rotations, grid)
    rotary = host.rotary_positions()
    if rotary is not None:
        if host.position_table(grid) is None:
            raise InputError(
                f"params: {rotary} rotates queries and keys: pass rotations=model.rope.get_embed("
                "shape=grid).numpy() (timm) or model.rope_embeddings(pixel_values) (Hugging Face)"
            )
        warnings.warn(
            f"params: {rotary} rotates queries and keys, which moves the scheme's maps: measure "
            "them",
            stacklevel=3,
        )
    if positions is not None:
        check_array("positions", "the encoding", positions)
        grid = grid or square(len(positions))
        if grid is None:
            raise InputError(f"grid: pass grid=(rows, cols) of the {len(positions)} positions")
        return AttentionSite(grid=grid, **host.sizes(), positions=positions)
    if table is not None:
        return AttentionSite(
            grid=table.grid,
            **host.sizes(),
            positions=jnp.asarray(table.rows[table.prefix :], jnp.float32),
            positions_trainable=True,
        )
    if grid is not None:
        return AttentionSite(grid=grid, **host.sizes())  # some schemes need no positions
    raise InputError(
        f"positions: params hold no position table of width {host.width}: pass the encoding that "
        "the model adds to its tokens as positions=[N, D], or its rotary positions as rotations, "
        "or for a scheme that needs none ('mimetic') grid=(rows, cols)"
    )


def _write(host: Host, weights: AttentionWeights, grid: Grid | None) -> Leaves:
    if weights.bias is not None:
        raise InputError("weights.bias: the model has no relative position bias, so leave it None")
    new = host.with_attention(weights)
    if weights.positions is not None or weights.position_scale is not None:
        table = host.position_table(grid)
        if table is None:
            raise InputError("weights.positions: params hold no position table to write them to")
        rows = jnp.asarray(table.rows, jnp.float32)
        if weights.positions is not None:
            check_shape("positions", weights.positions, table.rows[table.prefix :].shape)
            rows = replace_rows(rows, weights.positions, table.prefix)
        if weights.position_scale is not None:
            rows = weights.position_scale * rows
        old = host.leaves[table.name]
        new[table.name] = like(rows.reshape(old.shape), old)
    if weights.patch_bias is not None:
        name = f"{host.patch_kernel().rpartition('.')[0]}.bias"
        if name not in new:
            raise InputError(
                f"params: the patch embedding has no {name}, in which this scheme needs to put a "
                "vector that all tokens share: build the model with it, or use 'mimetic'"
            )
        new[name] = like(weights.patch_bias.reshape(new[name].shape), new[name])
    scales = {}
    if weights.patch_scale is not None:
        name = host.patch_norm() or host.patch_kernel()
        squares = jnp.square(jnp.asarray(host.leaves[name], jnp.float32))
        rms = jnp.sqrt(jnp.sum(squares) / host.width)
        scales[name] = weights.patch_scale * PATCH_RMS / jnp.maximum(rms, 1e-12)
    if weights.mlp_scale is not None:
        scales |= dict.fromkeys(host.mlp_outputs(), weights.mlp_scale)
    for name, scale in scales.items():
        check_array("params", name, new[name])
        new[name] = like(scale * jnp.asarray(new[name], jnp.float32), new[name])
    return new


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
