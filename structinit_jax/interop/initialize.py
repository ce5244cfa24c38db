"""Writes attention schemes into other projects' models."""

from typing import Any

import jax
import jax.numpy as jnp

from structinit_jax.attention_init import AttentionInit, AttentionWeights
from structinit_jax.attention_init.draws import split_by_stack
from structinit_jax.attention_init.sites import check_shape
from structinit_jax.checks import check_scheme
from structinit_jax.errors import InputError
from structinit_jax.interop.arrays import as_array, check_array, like, replace_rows
from structinit_jax.interop.host import Grid, Host, find_hosts
from structinit_jax.interop.layouts import Leaves, flatten
from structinit_jax.interop.sites import find_site, num_offsets


def initialize(
    params: Any,
    attention_init: AttentionInit,
    rng: jax.Array,
    *,
    num_heads: int | None = None,
    grid: Grid | None = None,
    positions: Any | None = None,
    rotations: Any | None = None,
) -> Any:
    """Writes the weights of a scheme into the parameters of a freshly built model.

    The model is a ViT or, for schemes that support them, a model with a relative position bias in
    every layer (Swin, BEiT). Schemes assume that the LayerNorm before the attention has scale 1 and
    bias 0, that query-key products are scaled by d^-1/2, and that tokens are in row-major order.
    Parameters that show otherwise raise an error, but they do not show everything: check the maps
    of a torch model with `torch_maps`.

    The biases of the projections that the scheme sets become zero. If the scheme has positions,
    they replace a learned position table, except for class and register tokens.

    Args:
      params: A state dict, Linen tree, Equinox or NNX module, NNX state or pure dict; not changed.
        All arrays, also the following, may be NumPy's, JAX's or torch's.
      attention_init: The scheme, such as `impulse()`; or `lambda rng, site: weights`.
      rng: Random key for the scheme.
      num_heads: Number of heads h, for ViTs of torch and Equinox, whose shapes do not show it.
      grid: (rows, cols) of the image tokens, (1, N) in a model of sequences, or in Swin and BEiT
        (rows, cols) of the windows that are not square. If None, all are square.
      positions: [N, D] encoding that a ViT adds to its tokens without storing it in `params`,
        for example `sincos_positions(grid, D)`, or for big_vision and vit-pytorch's SimpleViT
        `sincos_positions(grid, D, convention="big_vision")`. A table in `params` is then neither
        read nor written: if the model adds it to the tokens, leave `positions` out.
      rotations: Rotary positions (RoPE) of the image tokens, in a model that adds no positions:
        either sines and cosines [..., N, 2 d] of timm's `model.rope.get_embed(...)`, optionally
        with axes for layers and heads, or the pair (cosines, sines), each [..., N, d], of Hugging
        Face's `model.rope_embeddings(pixel_values)`.

    Returns:
      Parameters of the same structure, array kinds (NumPy, JAX or torch), dtypes and shardings.
      Unchanged arrays may be shared with `params`.

    Raises:
      InputError: An argument is missing, or the model does not fit the scheme.
    """
    check_scheme(attention_init)
    leaves, rebuild = flatten(params)
    hosts = find_hosts(leaves, num_heads)
    sites = [find_site(host, grid, as_array(positions), rotations) for host in hosts]
    if grid is not None and all(site.grid != grid for site in sites):
        windows = ", ".join(str(site.grid) for site in sites)
        raise InputError(f"grid={grid} is none of the windows {windows}: leave it out")
    rngs = split_by_stack(rng, len(hosts))
    for host, site, site_rng in zip(hosts, sites, rngs, strict=True):
        for name, new in _write(host, attention_init(site_rng, site), site.grid).items():
            check_array("params", name, leaves[name])
            leaves[name] = like(new, leaves[name])
    return rebuild(leaves)


def _write(host: Host, weights: AttentionWeights, grid: Grid) -> Leaves:
    """Returns new values of the leaves that a scheme's weights change."""
    new = host.write_attention(weights)
    if weights.bias is not None:
        shape = (host.num_layers, num_offsets(grid), host.num_heads)
        check_shape("bias", weights.bias, shape)
        for name, biases in zip(host.bias_tables, weights.bias, strict=True):
            new[name] = replace_rows(host.leaves[name], biases, 0)
    if weights.positions is not None or weights.position_scale is not None:
        table = host.position_table(grid)
        rows = table.rows
        if weights.positions is not None:
            check_shape("positions", weights.positions, rows[table.prefix :].shape)
            rows = replace_rows(rows, weights.positions, table.prefix)
        if weights.position_scale is not None:
            rows = weights.position_scale * jnp.asarray(rows, jnp.float32)
        new[table.name] = rows.reshape(host.leaves[table.name].shape)
    if weights.patch_bias is not None:
        name = host.patch_bias()
        new[name] = weights.patch_bias.reshape(host.leaves[name].shape)
    return new
