"""timm's `MlpMixer`."""

from collections.abc import Iterator

from structinit_jax.interop.entries import Entry, conv, linear, norm
from structinit_jax.models.mixer import MlpMixer


def entries(model: MlpMixer) -> Iterator[Entry]:
    """Every weight of the model, by timm's name."""
    yield from conv("stem.proj", "patch_embedding")
    depth = len(model.blocks.token_mlp.fc1.kernel[...])
    for i in range(depth):
        yield from norm(f"blocks.{i}.norm1", "blocks/norm1", i)
        yield from linear(f"blocks.{i}.mlp_tokens.fc1", "blocks/token_mlp/fc1", i)
        yield from linear(f"blocks.{i}.mlp_tokens.fc2", "blocks/token_mlp/fc2", i)
        yield from norm(f"blocks.{i}.norm2", "blocks/norm2", i)
        yield from linear(f"blocks.{i}.mlp_channels.fc1", "blocks/mlp/fc1", i)
        yield from linear(f"blocks.{i}.mlp_channels.fc2", "blocks/mlp/fc2", i)
    yield from norm("norm", "norm")
    yield from linear("head", "head")
