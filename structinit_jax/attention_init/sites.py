"""Sites, which describe a stack of layers to a scheme, and the weights that a scheme returns."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from structinit_jax.errors import (
    InputError,
    PositiveFloat,
    PositiveInt,
    check_fields,
    is_count,
    require,
)


def _is_grid(x):
    return isinstance(x, tuple) and len(x) == 2 and all(map(is_count, x))


def check_grid(argument: str, grid: Any) -> None:
    """Raises `InputError` unless a grid is a tuple of two positive whole numbers."""
    needs = "a tuple (rows, cols) of two positive whole numbers"
    require(argument, grid, needs, _is_grid)


def check_shape(field: str, array: Any, expected: tuple[int, ...]) -> None:
    """Raises `InputError` unless a weight of a scheme has the shape that the model needs."""
    if np.shape(array) != expected:
        raise InputError(
            f"weights.{field} has shape {np.shape(array)}, but the model needs {expected}"
        )


def is_concrete(array: Any) -> bool:
    """Whether this process can read an array: neither traced nor spread over processes."""
    return not isinstance(array, jax.core.Tracer) and getattr(array, "is_fully_addressable", True)


class _Site:
    """Base of the sites: checks every field by its annotation."""

    def __post_init__(self):
        kind = type(self).__name__
        check_fields(type(self), vars(self), f"{kind}.")
        if hasattr(self, "grid"):
            check_grid(f"{kind}.grid", self.grid)

    @property
    def num_tokens(self) -> int:
        """Number of tokens N."""
        return self.grid[0] * self.grid[1]


@dataclasses.dataclass(frozen=True)
class AttentionSite(_Site):
    """Stack of equal attention layers over one grid of tokens.

    Attributes:
      grid: Rows and columns of the image tokens, without class and register tokens.
      width: Channels D of a token.
      num_heads: Number of heads h.
      head_dim: Channels d of one head.
      num_layers: Number of layers L.
      qk_scale: Factor σ on query-key products before the softmax, usually d^-1/2.
      positions: Position encoding [N, D] that the model adds to its tokens, N = rows × cols in
        row-major order, or None. The rank of a traced array is unknown, so its solve costs more.
      positions_trainable: Whether the model uses `AttentionWeights.positions`.
      base_init: Initialization of the model's other layers, 'timm' or 'pytorch'.
    """

    grid: tuple[int, int]
    width: PositiveInt
    num_heads: PositiveInt
    head_dim: PositiveInt
    num_layers: PositiveInt
    qk_scale: PositiveFloat
    positions: np.ndarray | jax.Array | None = None
    positions_trainable: bool = False
    base_init: Literal["timm", "pytorch"] = "timm"

    def __post_init__(self):
        super().__post_init__()
        expected = (self.num_tokens, self.width)
        if self.positions is not None and np.shape(self.positions) != expected:
            raise InputError(
                f"AttentionSite.positions has shape {np.shape(self.positions)}, but "
                f"grid={self.grid} and width={self.width} need {expected}: leave out class and "
                "register tokens"
            )

    def require_positions(self) -> np.ndarray | jax.Array:
        """Returns `positions`, as a NumPy array if they are concrete.

        Raises:
          InputError: There are none, or all are equal.
        """
        if self.positions is None:
            raise InputError(
                "AttentionSite.positions=None: this scheme solves for attention to positions; pass "
                "the model's position encoding, or use 'mimetic' or 'default'"
            )
        if not is_concrete(self.positions):
            return self.positions
        positions = np.asarray(self.positions)
        if not 0 < np.ptp(positions.astype(np.float64), axis=0).max() < np.inf:
            raise InputError(
                "AttentionSite.positions are equal for all tokens or not finite: pass an encoding "
                "that tells tokens apart, or use 'mimetic' or 'default'"
            )
        return positions


@dataclasses.dataclass(frozen=True)
class WindowSite(AttentionSite):
    """Stack of attention layers within windows, as in Swin; `grid` is the window.

    Instead of positions the model adds a relative position bias to the logits, which a scheme sets
    with `AttentionWeights.bias`.
    """

    positions: None = dataclasses.field(default=None, init=False)
    positions_trainable: bool = dataclasses.field(default=False, init=False)


@dataclasses.dataclass(frozen=True)
class RotarySite(AttentionSite):
    """Stack of attention layers that rotate queries and keys (RoPE) and add no positions.

    The rotation by the angle θ takes the channels (a, b) of a pair to
    (a cos θ - b sin θ, b cos θ + a sin θ).

    Attributes:
      angles: Rotation [L, h, N, d / 2] of each pair of channels in radians; L or h may be 1 if all
        layers or heads share them.
      pairs: Channels that are rotated together: 'interleaved' for 2 k and 2 k + 1, 'halves' for k
        and k + d / 2.
    """

    positions: None = dataclasses.field(default=None, init=False)
    positions_trainable: bool = dataclasses.field(default=False, init=False)
    angles: np.ndarray | jax.Array | None = dataclasses.field(kw_only=True)
    pairs: Literal["interleaved", "halves"] = dataclasses.field(default="interleaved", kw_only=True)

    def __post_init__(self):
        super().__post_init__()
        if self.angles is None:
            return
        shape, layers, heads = np.shape(self.angles), self.num_layers, self.num_heads
        allowed = (1, layers), (1, heads), (self.num_tokens,), (self.head_dim / 2,)
        if len(shape) != 4 or any(n not in ns for n, ns in zip(shape, allowed, strict=True)):
            raise InputError(
                f"RotarySite.angles has shape {shape}, but needs [layers = {layers} or 1, heads = "
                f"{heads} or 1, tokens = {self.num_tokens}, head_dim / 2 = {self.head_dim / 2:g}]: "
                "leave out class and register tokens"
            )


@dataclasses.dataclass(frozen=True)
class TokenMixingSite(_Site):
    """Stack of equal token-mixing MLPs with exact GELU, as in MLP-Mixer, over one grid of tokens.

    Attributes:
      grid: Rows and columns of the tokens; N = rows × cols in row-major order.
      hidden: Hidden units of one MLP.
      num_layers: Number of MLPs L.
      width: Channels D; they share the weights.
    """

    grid: tuple[int, int]
    hidden: PositiveInt
    num_layers: PositiveInt
    width: PositiveInt


@dataclasses.dataclass(frozen=True)
class ConvSite(_Site):
    """Stack of equal depthwise convolutions, as in ConvMixer.

    Attributes:
      kernel_size: Height and width f of the kernel, odd or even.
      width: Channels D; each has its own filter.
      num_layers: Number of convolutions L.
    """

    kernel_size: PositiveInt
    width: PositiveInt
    num_layers: PositiveInt


class SolveReport(NamedTuple):
    """How close the attention maps are to their targets, as scalars averaged over the filters.

    Attributes:
      loss: Mean squared difference between target and attention map.
      target_mass: Attention on the target, averaged over the rows that have one (an impulse row
        has none if its neighbor is off the grid). A uniform map has 1 / N on an impulse.
      hit_rate: Fraction of those rows whose strongest attention is where the target is strongest
        (top-1). Well below 1, the head dimension or the rank of the encoding is too low.
      steps: Optimizer steps taken.
      norm: Norm of a head's Q and K as the root mean square of their d columns' norms; the
        geometric mean of both, since the maps depend on their product.
    """

    loss: Float[Array, ""]
    target_mass: Float[Array, ""]
    hit_rate: Float[Array, ""]
    steps: Float[Array, ""]
    norm: Float[Array, ""]


def unless_one(factor: float) -> float | None:
    """Returns a factor for `AttentionWeights`; 1 becomes None, which leaves the model's own."""
    return None if factor == 1 else factor


class AttentionWeights(NamedTuple):
    """Initial weights for an `AttentionSite`, laid out as Flax's `MultiHeadAttention` kernels.

    None leaves the model's own initialization. Biases without a field keep theirs, except that
    `interop` zeroes the biases of the projections that it sets.

    Attributes:
      query: [L, D, h, d].
      key: [L, D, h, d].
      value: [L, D, h, d].
      out: Output projection [L, h, d, D].
      positions: Initial value [N, D] of a trainable position encoding.
      position_scale: Factor on the model's own trainable positions, including those of class token
        and registers.
      patch_scale: Factor on the kernel of the patch embedding, as PyTorch initializes it. Flax's is
        3^1/2 times as large; `interop` makes up for that.
      patch_bias: Bias [D] of the patch embedding.
      mlp_scale: Factor on the output kernels of the MLPs.
      report: Result of the solve.
      filter_index: Index [L, h] of each head's filter among the scheme's filters. The
        `mimetic_layers` of `impulse` have one too, which their maps do not follow.
      targets: The filters as maps [F, N, N], to which `filter_index` refers. For analysis only.
      bias: Relative position bias [L, R, h] of a `WindowSite`, R = (2 rows - 1) (2 cols - 1), rows
        in timm's order (`kernels.relative_index`).
    """

    query: Float[Array, "L D h d"] | None = None
    key: Float[Array, "L D h d"] | None = None
    value: Float[Array, "L D h d"] | None = None
    out: Float[Array, "L h d D"] | None = None
    positions: Float[Array, "N D"] | None = None
    report: SolveReport | None = None
    filter_index: Int[Array, "L h"] | None = None
    targets: Float[Array | np.ndarray, "F N N"] | None = None
    bias: Float[Array, "L R h"] | None = None
    position_scale: float | Float[Array, ""] | None = None
    patch_scale: float | Float[Array, ""] | None = None
    patch_bias: Float[Array, " D"] | None = None
    mlp_scale: float | Float[Array, ""] | None = None


class TokenMixingWeights(NamedTuple):
    """Initial weights for a `TokenMixingSite`; None leaves the model's own.

    Attributes:
      fc1: First layer [L, N, hidden].
      fc2: Second layer [L, hidden, N].
      filter_index: Index [L] of each layer's filter among the scheme's filters.
      targets: The filters as maps [F, N, N].
    """

    fc1: Float[Array, "L N hidden"] | None = None
    fc2: Float[Array, "L hidden N"] | None = None
    filter_index: Int[Array, " L"] | None = None
    targets: Float[Array | np.ndarray, "F N N"] | None = None


class ConvWeights(NamedTuple):
    """Initial weights for a `ConvSite`: the kernels [L, f, f, D]."""

    kernel: Float[Array, "L f f D"]


Site = AttentionSite | TokenMixingSite | ConvSite
Weights = AttentionWeights | TokenMixingWeights | ConvWeights
AttentionInit = Callable[[jax.Array, Site], Weights]
"""Function `(rng, site) -> weights`: pure, and traceable by jit, vmap and eval_shape."""
