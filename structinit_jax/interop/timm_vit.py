"""timm's `VisionTransformer`."""

from collections.abc import Iterator

from structinit_jax.interop.entries import Entry, conv, fused_qkv, linear, norm, same
from structinit_jax.models.vit import VisionTransformer


def entries(model: VisionTransformer) -> Iterator[Entry]:
    """Every weight of the model, by timm's name."""
    yield from conv("patch_embed.proj", "patch_embedding")
    if model.pool == "class_token":
        yield same("cls_token", "class_token", lead=2)
    yield same("pos_embed", "positions", lead=1)
    depth = len(model.blocks.attention.query.kernel[...])
    for i in range(depth):
        yield from norm(f"blocks.{i}.norm1", "blocks/norm1", i)
        yield from fused_qkv(f"blocks.{i}.attn.qkv", "blocks/attention", i)
        yield from linear(f"blocks.{i}.attn.proj", "blocks/attention/out", i, in_axes=2)
        yield from norm(f"blocks.{i}.norm2", "blocks/norm2", i)
        yield from linear(f"blocks.{i}.mlp.fc1", "blocks/mlp/fc1", i)
        yield from linear(f"blocks.{i}.mlp.fc2", "blocks/mlp/fc2", i)
    yield from norm("fc_norm" if model.pool == "mean" else "norm", "norm")
    yield from linear("head", "head")
