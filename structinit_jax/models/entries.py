"""Entries, which map a tensor of timm to our arrays and back.

Ours are Flax's: kernels are [in, out] where torch has [out, in], convolutions [rows, cols, in, out]
where it has [out, in, rows, cols], and attention keeps its heads h and their channels d as separate
axes: query, key and value [D, h, d], output projection [h, d, D].
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Shape = tuple[int, ...]


class Entry(NamedTuple):
    """One tensor of timm.

    Attributes:
      name: Its name there, with dots.
      paths: Paths of our arrays that it holds, with slashes: several if they are fused, none if the
        tensor is computed rather than trained.
      encode: Turns our arrays into the tensor.
      decode: Turns the tensor and the shapes of our arrays into our arrays.
      layer: Index on the leading axis of our arrays if they stack all layers, else None.
    """

    name: str
    paths: tuple[str, ...]
    encode: Callable[..., Any]
    decode: Callable[[Any, Sequence[Shape]], list[Any]]
    layer: int | None = None

    def arrays(self, ours: Mapping[str, Any]) -> list[Any]:
        """Returns our arrays of this entry, without the layer axis; NumPy's as views."""
        arrays = [ours[path] for path in self.paths]
        return arrays if self.layer is None else [array[self.layer, ...] for array in arrays]

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        """Returns the shape of the tensor, given the shapes of our arrays."""
        return np.shape(self.encode(*(np.empty(shape, np.int8) for shape in shapes)))


def same(name: str, path: str, layer: int | None = None, *, lead: int = 0) -> Entry:
    """Maps an array with the same axes, except for `lead` leading axes of length 1 in theirs."""

    def encode(array):
        return array.reshape((1,) * lead + array.shape)

    return Entry(name, (path,), encode, lambda tensor, shapes: [tensor.reshape(shapes[0])], layer)


def norm(name: str, path: str, layer: int | None = None) -> Iterator[Entry]:
    """Maps the scale and bias of a normalization."""
    yield same(f"{name}.weight", f"{path}/scale", layer)
    yield same(f"{name}.bias", f"{path}/bias", layer)


def linear(
    name: str, *paths: str, layer: int | None = None, in_axes: int = 1, bias: bool = True
) -> Iterator[Entry]:
    """Maps a linear layer that holds one or more of ours, of equal sizes, fused along `out`.

    Our kernels have `in_axes` input axes; the others are output axes.
    """

    def encode(*kernels):
        return np.concatenate([k.reshape(math.prod(k.shape[:in_axes]), -1).T for k in kernels])

    def encode_bias(*biases):
        return np.concatenate([bias.reshape(-1) for bias in biases])

    def decode(tensor, shapes):  # a weight or a bias, which `.T` leaves as it is
        parts = np.split(tensor, len(shapes))
        return [part.T.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    kernels = tuple(f"{path}/kernel" for path in paths)
    yield Entry(f"{name}.weight", kernels, encode, decode, layer)
    if bias:
        biases = tuple(f"{path}/bias" for path in paths)
        yield Entry(f"{name}.bias", biases, encode_bias, decode, layer)


def conv(name: str, path: str, layer: int | None = None) -> Iterator[Entry]:
    """Maps a convolution. Ours may be [rows, cols, out] if depthwise, [in, out] if pointwise."""

    def encode(kernel):
        if kernel.ndim == 3:
            kernel = kernel[:, :, None]
        elif kernel.ndim == 2:
            kernel = kernel[None, None]
        return kernel.transpose(3, 2, 0, 1)

    def decode(weight, shapes):
        return [weight.transpose(2, 3, 1, 0).reshape(shapes[0])]

    yield Entry(f"{name}.weight", (f"{path}/kernel",), encode, decode, layer)
    yield same(f"{name}.bias", f"{path}/bias", layer)
