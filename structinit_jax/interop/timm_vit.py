"""timm's `VisionTransformer`."""

from collections.abc import Iterator

import numpy as np

from structinit_jax.attention_init import sincos_positions
from structinit_jax.errors import InputError
from structinit_jax.interop.entries import Entry, conv, fused_qkv, linear, norm, same
from structinit_jax.models.vit import VisionTransformer


def entries(model: VisionTransformer) -> Iterator[Entry]:
    """Every weight of the model, by timm's name."""
    yield from conv("patch_embed.proj", "patch_embedding")
    if model.pool == "class_token":
        yield same("cls_token", "class_token", lead=2)
    if model.num_registers:
        yield same("reg_token", "registers", lead=1)
    if model.positions is None:
        yield _fixed_positions(model)
    else:
        yield same("pos_embed", "positions", lead=1)
    attention = model.blocks.attention
    for i in range(len(attention.query.kernel[...])):
        yield from norm(f"blocks.{i}.norm1", "blocks/norm1", i)
        yield from fused_qkv(f"blocks.{i}.attn.qkv", "blocks/attention", i)
        if attention.query_norm is not None:
            yield from norm(f"blocks.{i}.attn.q_norm", "blocks/attention/query_norm", i)
            yield from norm(f"blocks.{i}.attn.k_norm", "blocks/attention/key_norm", i)
        yield from linear(f"blocks.{i}.attn.proj", "blocks/attention/out", i, in_axes=2)
        yield from norm(f"blocks.{i}.norm2", "blocks/norm2", i)
        yield from linear(f"blocks.{i}.mlp.fc1", "blocks/mlp/fc1", i)
        yield from linear(f"blocks.{i}.mlp.fc2", "blocks/mlp/fc2", i)
        if model.blocks.layer_scale:
            yield same(f"blocks.{i}.ls1.gamma", "blocks/scale1", i)
            yield same(f"blocks.{i}.ls2.gamma", "blocks/scale2", i)
    yield from norm("fc_norm" if model.pool == "mean" else "norm", "norm")
    yield from linear("head", "head")


def _fixed_positions(model):
    """The sin-cos encoding, which timm keeps as weights and this model does not."""
    width = model.head.kernel.shape[0]
    ours = np.pad(sincos_positions(model.grid, width), ((model.num_prefix, 0), (0, 0)))[None]

    def decode(array, shapes):
        if not np.allclose(array, ours, atol=1e-5):
            raise InputError(
                "state_dict['pos_embed'] is not the sin-cos encoding that model.positions='sincos' "
                "has: load it into a model with positions='learned'"
            )
        return []

    return Entry("pos_embed", (), None, lambda: ours, decode)
