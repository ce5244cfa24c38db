"""timm's `ConvMixer`."""

from collections.abc import Iterator

import numpy as np

from structinit_jax.interop.entries import Entry, conv, linear, norm, same
from structinit_jax.models.convmixer import ConvMixer


def entries(model: ConvMixer) -> Iterator[Entry]:
    """Every weight and running statistic of the model, by timm's name."""
    yield from conv("stem.0", "patch_embedding")
    yield from _batch_norm("stem.2", "stem_norm")
    for i in range(model.sites()["blocks"].num_layers):
        yield from _depthwise(f"blocks.{i}.0.fn.0", "blocks/spatial", i)
        yield from _batch_norm(f"blocks.{i}.0.fn.2", "blocks/norm1", i)
        yield from _pointwise(f"blocks.{i}.1", "blocks/channel", i)
        yield from _batch_norm(f"blocks.{i}.3", "blocks/norm2", i)
    yield from linear("head", "head")


def _batch_norm(name: str, path: str, layer: int | None = None) -> Iterator[Entry]:
    yield from norm(name, path, layer)
    yield same(f"{name}.running_mean", f"{path}/mean", layer)
    yield same(f"{name}.running_var", f"{path}/variance", layer)
    # PyTorch counts batches for a momentum of None, which timm does not use: nothing depends on it.
    yield Entry(
        f"{name}.num_batches_tracked", (), layer, lambda: np.zeros((), np.int64), lambda a, s: []
    )


def _depthwise(name: str, path: str, layer: int) -> Iterator[Entry]:
    """Filters: timm [D, 1, f, f], ours [f, f, D]."""
    yield Entry(
        f"{name}.weight",
        (f"{path}/kernel",),
        layer,
        lambda kernel: kernel.transpose(2, 0, 1)[:, None],
        lambda a, shapes: [a[:, 0].transpose(1, 2, 0)],
    )
    yield same(f"{name}.bias", f"{path}/bias", layer)


def _pointwise(name: str, path: str, layer: int) -> Iterator[Entry]:
    """A convolution of size 1: timm [out, in, 1, 1], ours [in, out]."""
    yield Entry(
        f"{name}.weight",
        (f"{path}/kernel",),
        layer,
        lambda kernel: kernel.T[:, :, None, None],
        lambda a, shapes: [a[:, :, 0, 0].T],
    )
    yield same(f"{name}.bias", f"{path}/bias", layer)
