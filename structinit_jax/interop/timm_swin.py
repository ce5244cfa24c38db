"""timm's `SwinTransformer`."""

from collections.abc import Iterator

from structinit_jax.interop.entries import Entry, conv, fused_qkv, linear, norm, same
from structinit_jax.models.swin import SwinTransformer


def entries(model: SwinTransformer) -> Iterator[Entry]:
    """Every weight of the model, by timm's name."""
    yield from conv("patch_embed.proj", "patch_embedding")
    yield from norm("patch_embed.norm", "patch_norm")
    for s, depth in enumerate(model.depths):
        stage, ours = f"layers.{s}", f"stage{s + 1}"
        if s:
            yield from norm(f"{stage}.downsample.norm", f"{ours}/merging/norm")
            reduction = f"{stage}.downsample.reduction"
            yield from linear(reduction, f"{ours}/merging/reduction", bias=False)
        for i in range(depth):
            block, blocks = f"{stage}.blocks.{i}", f"{ours}/blocks"
            yield from norm(f"{block}.norm1", f"{blocks}/norm1", i)
            table = f"{block}.attn.relative_position_bias_table"
            yield same(table, f"{blocks}/relative_position_bias", i)
            yield from fused_qkv(f"{block}.attn.qkv", f"{blocks}/attention", i)
            yield from linear(f"{block}.attn.proj", f"{blocks}/attention/out", i, in_axes=2)
            yield from norm(f"{block}.norm2", f"{blocks}/norm2", i)
            yield from linear(f"{block}.mlp.fc1", f"{blocks}/mlp/fc1", i)
            yield from linear(f"{block}.mlp.fc2", f"{blocks}/mlp/fc2", i)
    yield from norm("norm", "norm")
    yield from linear("head.fc", "head")


def buffers(model: SwinTransformer) -> Iterator[str]:
    """Tables that older state dicts hold beside the weights, computed from the sizes alone.

    timm has not saved them since they became non-persistent buffers, so an export has none.
    """
    for s, depth in enumerate(model.depths):
        for i in range(depth):
            yield f"layers.{s}.blocks.{i}.attn.relative_position_index"
            yield f"layers.{s}.blocks.{i}.attn_mask"
