"""Which tensor of timm holds which weights of ours, in both directions at once."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np


class Entry(NamedTuple):
    """One tensor of timm, and the weights of ours that it holds.

    Attributes:
      name: timm's.
      paths: ours, with slashes; several where timm fuses them.
      layer: index on the leading axis of our stacked layers, or None.
      encode: our arrays -> timm's array.
      decode: (timm's array, shapes of ours) -> our arrays.
    """

    name: str
    paths: tuple[str, ...]
    layer: int | None
    encode: Callable[..., np.ndarray]
    decode: Callable[[np.ndarray, list[tuple[int, ...]]], list[np.ndarray]]


def same(name: str, path: str, layer: int | None = None, *, lead: int = 0) -> Entry:
    """An array that both hold alike, but for `lead` leading axes of length one in timm's."""

    def encode(array):
        return array.reshape((1,) * lead + array.shape)

    return Entry(name, (path,), layer, encode, lambda a, shapes: [a.reshape(shapes[0])])


def norm(name: str, path: str, layer: int | None = None) -> Iterator[Entry]:
    """A normalization's scale and bias."""
    yield same(f"{name}.weight", f"{path}/scale", layer)
    yield same(f"{name}.bias", f"{path}/bias", layer)


def linear(
    name: str, path: str, layer: int | None = None, in_axes: int = 1, bias: bool = True
) -> Iterator[Entry]:
    """A linear layer: timm [out, in], ours [in axes..., out axes...]."""

    def encode(kernel):
        return kernel.reshape(np.prod(kernel.shape[:in_axes]), -1).T

    yield Entry(
        f"{name}.weight", (f"{path}/kernel",), layer, encode, lambda a, s: [a.T.reshape(s[0])]
    )
    if bias:
        yield Entry(
            f"{name}.bias", (f"{path}/bias",), layer, np.ravel, lambda a, s: [a.reshape(s[0])]
        )


def conv(name: str, path: str, layer: int | None = None) -> Iterator[Entry]:
    """A convolution: timm [out, in, rows, cols], ours [rows, cols, in, out]."""
    yield Entry(
        f"{name}.weight",
        (f"{path}/kernel",),
        layer,
        lambda kernel: kernel.transpose(3, 2, 0, 1),
        lambda a, shapes: [a.transpose(2, 3, 1, 0)],
    )
    yield same(f"{name}.bias", f"{path}/bias", layer)


def fused_qkv(name: str, path: str, layer: int | None = None) -> Iterator[Entry]:
    """The one linear layer [3 h d, D] of timm for our query, key and value [D, h, d]."""
    parts = ("query", "key", "value")

    def encode_kernel(*kernels):
        return np.concatenate([k.reshape(k.shape[0], -1).T for k in kernels])

    def decode_kernel(array, shapes):
        return [a.T.reshape(s) for a, s in zip(np.split(array, 3), shapes, strict=True)]

    def encode_bias(*biases):
        return np.concatenate([b.ravel() for b in biases])

    def decode_bias(array, shapes):
        return [a.reshape(s) for a, s in zip(np.split(array, 3), shapes, strict=True)]

    for suffix, leaf, encode, decode in (
        ("weight", "kernel", encode_kernel, decode_kernel),
        ("bias", "bias", encode_bias, decode_bias),
    ):
        paths = tuple(f"{path}/{part}/{leaf}" for part in parts)
        yield Entry(f"{name}.{suffix}", paths, layer, encode, decode)
