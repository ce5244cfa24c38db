"""The seam: what a scheme may know of a stack of attention layers, and what it hands back."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from structinit_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class AttentionSite:
    """A stack of equal attention layers over one grid of tokens.

    Attributes:
      grid: (rows, cols) of the image tokens; class and register tokens are not counted.
      width: D, the channels of a token.
      num_heads: h.
      head_dim: d, the channels of one head.
      num_layers: L, the layers in the stack.
      qk_scale: σ, the factor on query-key products before the softmax (usually d^-1/2).
      positions: [N, D] position encoding that the model will really add to its tokens, N = rows ×
        cols in row-major order, or None where it adds none. A NumPy array marks a fixed encoding:
        its rank is then found at trace time, which makes the solve cheaper.
      positions_trainable: whether the model can start from another encoding, that is, whether it
        reads `AttentionWeights.positions`.
    """

    grid: tuple[int, int]
    width: int
    num_heads: int
    head_dim: int
    num_layers: int
    qk_scale: float
    positions: np.ndarray | jax.Array | None = None
    positions_trainable: bool = False

    def __post_init__(self):
        expected = (self.num_tokens, self.width)
        if self.positions is not None and self.positions.shape != expected:
            raise InputError(
                f"AttentionSite.positions has shape {self.positions.shape}, but grid={self.grid} "
                f"and width={self.width} need {expected}: leave out class and register tokens"
            )

    @property
    def num_tokens(self) -> int:
        """N, the tokens of the grid."""
        return self.grid[0] * self.grid[1]


@dataclasses.dataclass(frozen=True)
class WindowSite(AttentionSite):
    """A stack of attention layers within windows, as in Swin: no positions, but a bias table.

    `grid` is the window, whose tokens see one another only. A table of biases by relative position,
    one column for each head, is added to the logits; a scheme sets it by `AttentionWeights.bias`.
    """

    positions: None = dataclasses.field(default=None, init=False)
    positions_trainable: bool = dataclasses.field(default=False, init=False)


class SolveReport(NamedTuple):
    """How close a solve came, as scalars averaged over the filters that were solved.

    Attributes:
      loss: mean squared difference between target and attention map.
      target_mass: attention that lies where the target wants it, averaged over the rows that have a
        target (an impulse row has none where its neighbour is off the grid); 1 / N is what a
        uniform map has on an impulse.
      hit_rate: the part of those rows whose strongest attention lies where the target is strongest.
        Well below 1, the target is out of reach: the head dimension or the encoding's rank is too
        low.
      steps: optimizer steps taken.
      norm: root mean square norm of the columns of Q and K.
    """

    loss: Float[Array, ""]
    target_mass: Float[Array, ""]
    hit_rate: Float[Array, ""]
    steps: Float[Array, ""]
    norm: Float[Array, ""]


class AttentionWeights(NamedTuple):
    """Start values for a site, in the layout of Flax's `MultiHeadAttention` kernels.

    A field that is None leaves the model's own default. Biases start at zero in every scheme.

    Attributes:
      query: [L, D, h, d].
      key: [L, D, h, d].
      value: [L, D, h, d].
      out: [L, h, d, D], the projection behind the heads.
      positions: [N, D] start of a trainable position encoding.
      report: what a solve has to say of itself.
      filter_index: [L, h], which of the scheme's filters each head was given.
      bias: [L, R, h] relative position bias of a `WindowSite`, one row for each relative position
        in timm's order (`windows.relative_index`), R = (2 rows - 1) (2 cols - 1).
    """

    query: Float[Array, "L D h d"] | None = None
    key: Float[Array, "L D h d"] | None = None
    value: Float[Array, "L D h d"] | None = None
    out: Float[Array, "L h d D"] | None = None
    positions: Float[Array, "N D"] | None = None
    report: SolveReport | None = None
    filter_index: Int[Array, "L h"] | None = None
    bias: Float[Array, "L R h"] | None = None


@dataclasses.dataclass(frozen=True)
class ConvSite:
    """A stack of equal depthwise convolutions, such as ConvMixer's.

    Attributes:
      kernel_size: f, even or odd.
      width: D, the channels, each with a filter of its own.
      num_layers: L, the convolutions in the stack.
    """

    kernel_size: int
    width: int
    num_layers: int


class ConvWeights(NamedTuple):
    """Start values for a `ConvSite`.

    Attributes:
      kernel: [L, f, f, D], the weight on the neighbour at each place of the kernel.
    """

    kernel: Float[Array, "L f f D"]


@dataclasses.dataclass(frozen=True)
class TokenMixingSite:
    """A stack of equal token-mixing MLPs, such as MLP-Mixer's, over one grid of tokens.

    Each maps a channel's N values through `hidden` units with an exact GELU, all channels alike.

    Attributes:
      grid: (rows, cols) of the tokens; N = rows × cols in row-major order.
      hidden: the hidden units of one MLP.
      num_layers: L, the MLPs in the stack.
      width: D, the channels that are mixed alike.
    """

    grid: tuple[int, int]
    hidden: int
    num_layers: int
    width: int

    @property
    def num_tokens(self) -> int:
        """N, the tokens of the grid."""
        return self.grid[0] * self.grid[1]


class TokenMixingWeights(NamedTuple):
    """Start values for a `TokenMixingSite`; None leaves the model's own. Biases start at zero.

    Attributes:
      fc1: [L, N, hidden], first layer.
      fc2: [L, hidden, N], second layer.
      filter_index: [L], which of the scheme's filters each layer was given.
    """

    fc1: Float[Array, "L N hidden"] | None = None
    fc2: Float[Array, "L hidden N"] | None = None
    filter_index: Int[Array, " L"] | None = None


Site = AttentionSite | TokenMixingSite | ConvSite
Weights = AttentionWeights | TokenMixingWeights | ConvWeights
AttentionInit = Callable[[jax.Array, Site], Weights]
"""A scheme: `(key, site) -> weights`. Pure, and traceable by jit, vmap and eval_shape."""


def require_attention(site: Site, scheme: str) -> None:
    """Refuses a site without softmax attention, for which the scheme has no published form."""
    if not isinstance(site, AttentionSite):
        raise InputError(
            f"attention_init.name={scheme!r} is made for softmax attention, and a "
            f"{type(site).__name__} has none: use 'impulse' or 'default'"
        )


def require_positions(site: AttentionSite, scheme: str):
    """The site's positions, which the maps are solved against; refuses a site that has none."""
    if isinstance(site, WindowSite):
        raise InputError(
            f"attention_init.name={scheme!r} solves the maps against positions that the model adds "
            "to its tokens; attention within windows has a relative position bias in their place: "
            "use 'impulse', which sets that"
        )
    if site.positions is None:
        raise InputError(
            f"attention_init.name={scheme!r} needs a model that adds positions to its tokens: "
            "the maps are solved against them"
        )
    return site.positions


def check_choice(field: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises `InputError` unless the option is one of the choices."""
    if value not in choices:
        raise InputError(f"attention_init.{field}={value!r}: choose one of {', '.join(choices)}")


def check_positive(field: str, value: float | int) -> None:
    """Raises `InputError` unless the option is above zero."""
    if not value > 0:
        raise InputError(f"attention_init.{field}={value!r}: it must be positive")
