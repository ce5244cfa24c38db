"""Writes attention schemes into other projects' models."""

from __future__ import annotations  # so that signatures show the names of checked types

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Complex

from structinit_jax.attention_init import (
    AttentionInit,
    AttentionSite,
    AttentionWeights,
    RotarySite,
    WindowSite,
)
from structinit_jax.attention_init.sites import GRID, AttentionSizes, Grid, check_shape, draw_stacks
from structinit_jax.errors import InputError, require, warn
from structinit_jax.interop.foreign_model import ForeignModel, find_models, square_grid
from structinit_jax.interop.layouts import (
    Leaves,
    as_array,
    check_array,
    flatten,
    like,
    replace_rows,
)

# Tolerance for rotations from one token to the next, computed from bfloat16 sines and cosines.
ROUNDING = 0.05
ROTATIONS = (
    "model.eval().rope.get_embed(shape=grid) (timm) or "
    "model.eval().rope_embeddings(pixel_values) (Hugging Face)"
)


def initialize(
    params: Any,
    attention_init: AttentionInit,
    rng: jax.Array,
    *,
    num_heads: int | None = None,
    grid: Grid | None = None,
    positions: Any | None = None,
    rotations: Any | None = None,
    projections: Sequence[str] | None = None,
) -> Any:
    """Writes the weights of a scheme into the parameters of a freshly built model.

    The model is a ViT or, for schemes that support it, a model with a relative position bias in
    every layer (Swin, BEiT). Schemes assume that the LayerNorm before the attention has scale 1 and
    bias 0, that query-key products are scaled by d^-1/2, and that tokens are in row-major order.
    Parameters that contradict this raise an error, but they do not show everything: check the maps
    of a torch model with `torch_maps`.

    The biases of the projections that the scheme sets become zero. If the scheme returns positions,
    they replace the rows of a learned position table after those of class and register tokens.

    >>> model = nnx.MultiHeadAttention(num_heads=3, in_features=96, rngs=nnx.Rngs(0))
    >>> positions = si.sincos_positions(grid=(8, 8), width=96)
    >>> model = si.initialize(model, si.impulse(), jax.random.key(0), positions=positions)

    Args:
      params: A state dict, Linen tree, Equinox or NNX module, NNX state or pure dict; not modified.
        Arrays, here and in the other arguments, can be NumPy, JAX or torch arrays.
      attention_init: The scheme, such as `impulse()`; or `lambda rng, site: weights`.
      rng: Random key for the scheme.
      num_heads: Number of heads h, unless the shapes show it, as those of Flax's own attention do.
      grid: (rows, cols) of the image tokens; for sequences, (1, N); for Swin and BEiT, (rows, cols)
        of the windows that are not square. If None, the grid and all windows are square.
      positions: [N, D] encoding that a ViT adds to its tokens without storing it in `params`,
        for example `sincos_positions(grid, D)`, or for big_vision and vit-pytorch's SimpleViT
        `sincos_positions(grid, D, convention="big_vision")`. A table in `params` is then neither
        read nor written: if the model adds it to the tokens, leave `positions` out.
      rotations: Rotary positions (RoPE) of the image tokens: either sines and cosines
        [..., N, 2 d] from timm's `model.rope.get_embed(...)`, optionally with axes for layers and
        heads, or the pair (cosines, sines), each [..., N, d], from Hugging Face's
        `model.rope_embeddings(pixel_values)`. `impulse` then makes all tokens start from the same
        vector, in the rows of the position table or, without one, the bias of the patch embedding.
      projections: Names of the linear modules for query, key, value and output, below each
        attention layer, such as `("to_q", "to_k", "to_v", "fc")`. A fused module, whose output is
        query, key and value in this order, is repeated: `("qkv", "qkv", "qkv", "fc")`. If other
        layers have modules of these names, add the layer's: `("Attention_0.Dense_0", …)`. If None,
        the names that known projects use.

    Returns:
      Parameters with the same structure, array kinds (NumPy, JAX or torch), dtypes and shardings.
      Unchanged arrays may be shared with `params`.

    Raises:
      InputError: An argument is missing, or the model does not fit the scheme.
    """
    if grid is not None:
        GRID.require("grid", grid)
    if projections is not None:
        needs = "the names of four modules, of query, key, value and output"
        require("projections", projections, needs, len(projections) == 4)
    leaves, rebuild = flatten(params)
    models = find_models(leaves, num_heads, projections)
    sites = [_find_site(model, grid, as_array(positions), rotations) for model in models]
    if grid is not None:
        grids = [site.grid for site in sites]
        require("grid", grid, f"one of the windows {grids}, or left out", grid in grids)
    drawn = draw_stacks(attention_init, sites, rng)
    for model, site, weights in zip(models, sites, drawn, strict=True):
        for name, new in _write(model, weights, site).items():
            check_array(name, leaves[name])
            leaves[name] = like(new, leaves[name])
    return rebuild(leaves)


def _find_site(
    model: ForeignModel,
    grid: Grid | None,
    positions: np.ndarray | jax.Array | None,
    rotations: Any | None,
) -> AttentionSizes:
    """Returns the site of a model's attention layers; for arguments and errors see `initialize`."""
    model.require_assumptions()
    if scale := model.layer_scale():
        warn(
            f"params: {scale} makes the attention's output so small that the scheme's value and "
            "projection weights hardly matter: build the model without LayerScale (in timm, "
            "timm.model_entrypoint(NAME)(init_values=None)), unless only the maps matter"
        )
    if model.bias_tables:
        needs = "left out: the model has relative position biases instead"
        for name, value in (("positions", positions), ("rotations", rotations)):
            require(name, value, needs, value is None)
        return WindowSite(grid=_find_window(model, grid), **model.sizes())
    if grid is None and rotations is None:
        model.require_image_tokens()
    if rotations is not None:
        needs = "left out: with rotations, schemes do not use the positions that the model adds"
        require("positions", positions, needs, positions is None)
        return _rotary_site(model, rotations, grid)
    table = model.position_table(grid) if positions is None else None
    if rotary := model.rotary_positions():
        message = f"params: {rotary} rotates queries and keys: pass rotations={ROTATIONS}"
        if table is None and positions is None:
            raise InputError(message)
        warn(f"{message}; without them, the maps differ from the scheme's")
    weaker = "the maps are weaker than the scheme's: measure them"
    if norm := model.patch_norm():
        warn(f"params: {norm} normalizes the patches, so content outweighs positions, and {weaker}")
    if norm := model.norm_without_bias():
        warn(f"params: {norm} has no bias: if it is an RMSNorm, which keeps the mean, {weaker}")
    if positions is not None:
        needs = (
            f"of shape [N, {model.width}] for the N image tokens with grid={grid}: leave out class "
            "and register tokens, and pass grid=(rows, cols) if the rest do not fill a square"
        )
        shape = np.shape(positions)
        filled = grid or square_grid(shape[0] if shape else 0)
        fits = filled is not None and shape == (math.prod(filled), model.width)
        require("positions", positions, needs, fits)
        return AttentionSite(grid=filled, **model.sizes(), positions=positions)
    if table is not None:
        positions = jnp.asarray(table.rows[table.prefix :], jnp.float32)
        options = dict(positions=positions, positions_trainable=True)
        return AttentionSite(grid=table.grid, **model.sizes(), **options)
    if grid is not None:
        return AttentionSite(grid=grid, **model.sizes())  # some schemes need no positions
    raise InputError(
        f"positions: params hold no position table of width {model.width} with 'pos' in its name: "
        "rename a table that has another name, or pass the fixed encoding that the model adds as "
        f"positions=[N, D]; or, in a model that rotates queries and keys, rotations={ROTATIONS}; "
        "or, for a scheme that needs no positions ('mimetic'), grid=(rows, cols)"
    )


def _num_offsets(window: Grid) -> int:
    """Returns the number of offsets between the tokens of a window."""
    return (2 * window[0] - 1) * (2 * window[1] - 1)


def _find_window(model: ForeignModel, grid: Grid | None) -> Grid:
    """Returns the window of a bias table: a row per offset, plus 3 for BEiT's class token."""
    table = model.bias_tables[0]
    rows = len(model.leaves[table])
    side = math.isqrt(rows) // 2 + 1
    sizes = (rows, rows - 3)
    fitting = [w for w in (grid, (side, side)) if w and _num_offsets(w) in sizes]
    needs = f"(rows, cols) of a window with as many offsets as the {rows} rows of {table}"
    require("grid", grid, needs, fitting)
    return fitting[0]


def _rotary_site(model: ForeignModel, given: Any, grid: Grid | None) -> RotarySite:
    """Returns the site for the `rotations` of `initialize`, timm's table or Hugging Face's pair."""
    parts = tuple(map(as_array, given if isinstance(given, tuple | list) else (given,)))
    d = model.head_dim
    is_pair = len(parts) == 2
    shapes = [np.shape(part) for part in parts]
    shape = shapes[0] if shapes else ()
    lead = (1,) * (4 - len(shape)) + shape[:-2]
    heads = (model.num_layers, model.num_heads)
    needs = (
        f"timm's model.rope.get_embed(shape=grid) [N, {2 * d}] or Hugging Face's pair "
        f"model.rope_embeddings(pixel_values) of [N, {d}], with leading axes for {heads[0]} layers "
        f"and {heads[1]} heads if these differ"
    )
    fits = len(lead) == 2 and all(n in (1, m) for n, m in zip(lead, heads, strict=True))
    fits = fits and len(parts) <= 2 and len({*shapes}) == 1
    fits = fits and shape[-1] == (d if is_pair else 2 * d)
    require("rotations.shape", shapes, needs, fits)
    parts = [np.asarray(part, np.float64) for part in parts]
    cos, sin = parts if is_pair else (parts[0][..., d:], parts[0][..., :d])
    # Both channels of a pair have the same sine and cosine, which shows how channels are paired.
    interleaved = all(np.array_equal(part[..., ::2], part[..., 1::2]) for part in (sin, cos))
    pairs, firsts = ("interleaved", slice(0, d, 2)) if interleaved else ("halves", slice(d // 2))
    angles = np.arctan2(sin[..., firsts], cos[..., firsts])
    angles = angles.reshape(*lead, *angles.shape[-2:]).astype(np.float32)
    tokens = angles.shape[2]
    grid = grid or square_grid(tokens)
    needs = (
        f"(rows, cols) of the image tokens, whose {tokens} rotations advance by equal angles along "
        "rows and columns: pass only the rotations of the image tokens, row by row"
    )
    fits = grid is not None and math.prod(grid) == tokens
    require("grid", grid, needs, fits and _advances_evenly(np.exp(1j * angles), grid))
    return RotarySite(grid=grid, **model.sizes(), angles=angles, pairs=pairs)


def _advances_evenly(rotations: Complex[np.ndarray, "L h N p"], grid: Grid) -> bool:
    """Whether e^iθ changes by a constant factor per row and per column, as in 2-D RoPE."""
    rotations = rotations.reshape(*rotations.shape[:2], *grid, -1)
    right = rotations[..., 1:, :] * rotations[..., :-1, :].conj()
    down = rotations[..., 1:, :, :] * rotations[..., :-1, :, :].conj()
    return all(
        np.allclose(steps, steps[..., :1, :1, :], rtol=0, atol=ROUNDING) for steps in (right, down)
    )


def _write(model: ForeignModel, weights: AttentionWeights, site: AttentionSizes) -> Leaves:
    """Returns new values of the leaves that a scheme's weights change."""
    new = model.write_attention(weights)
    if weights.bias is not None:
        shape = (model.num_layers, _num_offsets(site.grid), model.num_heads)
        check_shape("bias", weights.bias, shape)
        for name, biases in zip(model.bias_tables, weights.bias, strict=True):
            new[name] = replace_rows(model.leaves[name], biases, 0)
    positions = weights.positions
    if weights.patch_bias is not None:
        check_shape("patch_bias", weights.patch_bias, (model.width,))
        if isinstance(site, RotarySite) and model.position_table(site.grid) is not None:
            positions = jnp.broadcast_to(weights.patch_bias, (site.num_tokens, model.width))
        else:
            name = model.patch_bias()
            new[name] = weights.patch_bias.reshape(model.leaves[name].shape)
    if positions is not None or weights.position_scale is not None:
        table = model.position_table(site.grid)
        rows = table.rows
        if positions is not None:
            check_shape("positions", positions, rows[table.prefix :].shape)
            rows = replace_rows(rows, positions, table.prefix)
        if weights.position_scale is not None:
            rows = weights.position_scale * jnp.asarray(rows, jnp.float32)
        new[table.name] = rows.reshape(model.leaves[table.name].shape)
    return new
