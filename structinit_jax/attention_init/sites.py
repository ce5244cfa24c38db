"""Sites, which describe a stack of layers to a scheme, and the weights that a scheme returns."""

from __future__ import annotations  # so that signatures show the names of checked types

import dataclasses
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from structinit_jax.errors import (
    AtLeastTwo,
    Check,
    InputError,
    PositiveFloat,
    PositiveInt,
    check_fields,
    is_count,
    require,
    require_function,
)

# -- sites -----------------------------------------------------------------------------------------

GRID = Check(
    "a tuple (rows, cols) of two positive integers",
    lambda x: isinstance(x, tuple) and len(x) == 2 and all(map(is_count, x)),
)
Grid = Annotated[tuple[int, int], GRID]
KEY = Check(
    "a single random key, such as jax.random.key(0)",
    lambda x: isinstance(x, jax.Array) and jax.eval_shape(jax.random.bits, x).shape == (),
)


class _Site:
    """Base class of sites, which checks every field against its annotation."""

    def __post_init__(self):
        check_fields(type(self), vars(self), f"{type(self).__name__}.")

    @property
    def num_tokens(self) -> int:
        """Number of tokens N, for sites with a grid."""
        return self.grid[0] * self.grid[1]


@dataclasses.dataclass(frozen=True)
class AttentionSizes(_Site):
    """Base class of attention sites: a stack of identical layers over a grid of tokens."""

    grid: Grid
    width: PositiveInt
    num_heads: PositiveInt
    head_dim: PositiveInt
    num_layers: PositiveInt
    qk_scale: PositiveFloat
    _: dataclasses.KW_ONLY
    base_init: Literal["timm", "pytorch"] = "timm"

    @property
    def sizes(self) -> AttentionSizes:
        """The site without its arrays, because static arguments of jit must be hashable."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(AttentionSizes)}
        return AttentionSizes(**values | {"qk_scale": float(self.qk_scale)})  # may be a JAX scalar


@dataclasses.dataclass(frozen=True)
class AttentionSite(AttentionSizes):
    """Attention in a model that adds positions to its tokens, as in ViT.

    >>> positions = si.sincos_positions(grid=(8, 8), width=96)
    >>> site = si.AttentionSite((8, 8), width=96, num_heads=3, head_dim=32, num_layers=12,
    ...                         qk_scale=32**-0.5, positions=positions)

    Args:
      grid: Rows and columns of the N image tokens, in row-major order, without class and register
        tokens.
      width: Number of channels D of a token.
      num_heads: Number of heads h.
      head_dim: Number of channels d of a head.
      num_layers: Number of layers L.
      qk_scale: Factor σ on query-key products before the softmax, usually d^-1/2.
      positions: Encoding [N, D] that the model adds to its tokens. Only trainable positions can be
        traced; `impulse` needs the values of fixed ones.
      positions_trainable: Whether the positions are parameters, which a scheme can replace.
      base_init: The model's own initialization, which `default` draws: 'timm', truncated normal of
        standard deviation 0.02, or 'pytorch', uniform between ±(fan-in)^-1/2.
    """

    positions: np.ndarray | jax.Array | None = None
    positions_trainable: bool = False

    def __post_init__(self):
        super().__post_init__()
        expected = (self.num_tokens, self.width)
        needs = f"of shape [N, D] = {expected}: leave out class and register tokens"
        fits = self.positions is None or np.shape(self.positions) == expected
        require("AttentionSite.positions", self.positions, needs, fits)


@dataclasses.dataclass(frozen=True)
class WindowSite(AttentionSizes):
    """Attention within windows, as in Swin.

    Instead of positions, the model adds a relative position bias to the logits, which schemes set.
    `grid` is (rows, cols) of a window; the other arguments are those of `AttentionSite`.

    >>> site = si.WindowSite((7, 7), width=96, num_heads=3, head_dim=32, num_layers=2,
    ...                      qk_scale=32**-0.5)
    """


@dataclasses.dataclass(frozen=True)
class RotarySite(AttentionSizes):
    """Attention with rotary positions (RoPE), in a model that adds no positions to its tokens.

    An angle θ turns the channels (a, b) of a pair into (a cos θ - b sin θ, b cos θ + a sin θ).

    >>> angles = si.rotary_angles(grid=(8, 8), head_dim=32)
    >>> site = si.RotarySite((8, 8), width=96, num_heads=3, head_dim=32, num_layers=12,
    ...                      qk_scale=32**-0.5, angles=angles)

    Args:
      angles: Rotation [L, h, N, d / 2] of each pair of channels in radians, with 1 in place of L or
        h if all layers or heads share the angles.
      pairs: Channels of a pair: 2 k and 2 k + 1 if 'interleaved', k and k + d / 2 if 'halves'.

    The other arguments are those of `AttentionSite`.
    """

    _: dataclasses.KW_ONLY
    angles: np.ndarray | jax.Array
    pairs: Literal["interleaved", "halves"] = "interleaved"

    def __post_init__(self):
        super().__post_init__()
        require("RotarySite.width", self.width, "even", self.width % 2 == 0)
        require("RotarySite.head_dim", self.head_dim, "even", self.head_dim % 2 == 0)
        whole = (self.num_layers, self.num_heads, self.num_tokens, self.head_dim // 2)
        needs = (
            f"finite and of shape [L, h, N, d / 2] = {whole}, with 1 in place of L or h if layers "
            "or heads share the angles: leave out class and register tokens"
        )
        shape = np.shape(self.angles)
        fits = shape[2:] == whole[2:]
        fits = fits and all(n in (1, m) for n, m in zip(shape, whole, strict=True))
        if is_concrete(self.angles):
            fits = fits and np.isfinite(np.asarray(self.angles)).all()
        require("RotarySite.angles", self.angles, needs, fits)


@dataclasses.dataclass(frozen=True)
class TokenMixingSite(_Site):
    """Stack of identical token-mixing MLPs with exact GELU, as in MLP-Mixer.

    Args:
      grid: Rows and columns of the N tokens, in row-major order.
      hidden: Number of hidden units of each MLP.
      num_layers: Number of layers L.
    """

    grid: Grid
    hidden: AtLeastTwo
    num_layers: PositiveInt


@dataclasses.dataclass(frozen=True)
class ConvSite(_Site):
    """Stack of identical depthwise convolutions, as in ConvMixer.

    Args:
      kernel_size: Height and width f of the kernels, odd or even.
      width: Number of channels D, each with its own filter.
      num_layers: Number of layers L.
    """

    kernel_size: PositiveInt
    width: PositiveInt
    num_layers: PositiveInt


# -- weights ---------------------------------------------------------------------------------------


class SolveReport(NamedTuple):
    """How close the attention maps are to their targets, as scalars averaged over filters or heads.

    `impulse` averages over all filters, even if there are more than heads. With sin-cos positions
    and more than 1,024 tokens, it solves for a subset of the rows, and reports only on these.

    Attributes:
      loss: Mean squared difference between target and attention map.
      target_mass: Attention on the target, averaged over the rows that have one (an impulse row
        has none if its neighbor is off the grid). A uniform map has 1 / N on an impulse.
      wanted_mass: The scheme's option `target_mass`; 0 if the scheme has no such option.
      hit_rate: Fraction of the same rows whose attention peaks where the target does.
    """

    loss: Float[Array, ""]
    target_mass: Float[Array, ""]
    wanted_mass: Float[Array, ""]
    hit_rate: Float[Array, ""]


class AttentionWeights(NamedTuple):
    """Initial weights of attention layers, laid out as Flax's `MultiHeadAttention` kernels.

    Where a field is None, the model keeps its own initialization. Biases that have no field also
    keep theirs, except that `interop` zeroes the biases of the projections that it sets.

    Attributes:
      out: Kernel of the output projection.
      report: How close the maps are to their targets. A scheme that changes the query or key of
        another must set `report`, `filter_index` and `filters` to None: they describe its maps.
      positions: Values of a trainable position encoding, without class and register tokens.
      filter_index: Index of each head's filter in `filters`, for the first l ≤ L layers; the other
        layers have no filters.
      filters: The filters by offset between tokens, of 2 rows - 1 times 2 cols - 1 values, for
        analysis; `targets.filter_maps` returns their attention maps.
      bias: Relative position bias of a `WindowSite`, R = (2 rows - 1) (2 cols - 1), in timm's order
        (`targets.relative_index`).
      position_scale: Factor on the model's own trainable positions, including those of class and
        register tokens.
      patch_bias: Bias of the patch embedding, for a `RotarySite`; `interop` writes it to the rows
        of a position table instead.
    """

    query: Float[Array, "L D h d"] | None = None
    key: Float[Array, "L D h d"] | None = None
    value: Float[Array, "L D h d"] | None = None
    out: Float[Array, "L h d D"] | None = None
    positions: Float[Array | np.ndarray, "N D"] | None = None
    report: SolveReport | None = None
    filter_index: Int[Array, "l h"] | None = None
    filters: Float[Array | np.ndarray, "F y x"] | None = None
    bias: Float[Array, "L R h"] | None = None
    position_scale: float | Float[Array, ""] | None = None
    patch_bias: Float[Array, " D"] | None = None


class TokenMixingWeights(NamedTuple):
    """Initial weights for a `TokenMixingSite`; None keeps the model's own."""

    fc1: Float[Array, "L N hidden"] | None = None
    fc2: Float[Array, "L hidden N"] | None = None


class ConvWeights(NamedTuple):
    """Initial weights for a `ConvSite`: the kernels [L, f, f, D]."""

    kernel: Float[Array, "L f f D"]


Site = AttentionSite | RotarySite | WindowSite | TokenMixingSite | ConvSite
Weights = AttentionWeights | TokenMixingWeights | ConvWeights
# A pure function `(rng, site) -> weights`, traceable by jit, vmap and eval_shape.
AttentionInit = Callable[[jax.Array, Site], Weights]


def draw_stacks(scheme: AttentionInit, sites: Sequence[Site], rng: jax.Array) -> list[Weights]:
    """Returns a scheme's weights for each stack of a model; a single stack gets `rng` itself.

    Our models and `interop` share this function so that both draw the same weights. Raises
    `InputError` unless `scheme(rng, site)` can be called and returns weights that its site can use.
    """
    fix = ": call the scheme, as in impulse()"
    require_function("attention_init", scheme, ("rng", "site"), fix)
    KEY.require("rng", rng)
    rngs = [rng] if len(sites) == 1 else jax.random.split(rng, len(sites))
    weights = []
    for stack_rng, site in zip(rngs, sites, strict=True):
        weights.append(scheme(stack_rng, site))
        check_weights(weights[-1], site)
    return weights


def check_weights(weights: Any, site: Site) -> None:
    """Raises `InputError` unless a scheme returned weights that its site can use."""
    others = {TokenMixingSite: TokenMixingWeights, ConvSite: ConvWeights}
    expected = others.get(type(site), AttentionWeights)
    kind = type(site).__name__
    if not isinstance(weights, expected):
        raise InputError(
            f"attention_init returned {type(weights).__name__} for {kind}, but must return "
            f"{expected.__name__}(…)"
        )
    if not isinstance(weights, AttentionWeights):
        return
    trainable = getattr(site, "positions_trainable", False)
    has_table = isinstance(site, WindowSite)
    settable = {"positions": trainable, "position_scale": trainable, "bias": has_table}
    needs = f"None: the model of this {kind} has no trainable array that it could set"
    for field, is_settable in settable.items():
        value = getattr(weights, field)
        require(f"weights.{field}", value, needs, value is None or is_settable)


def check_shape(field: str, array: Any, expected: tuple[int, ...]) -> None:
    """Raises `InputError` unless a weight of a scheme has the shape that the model needs."""
    needs = f"of shape {expected}, as in the model"
    require(f"weights.{field}", array, needs, np.shape(array) == expected)


def is_concrete(array: Any) -> bool:
    """Whether this process can read an array: it is neither traced nor spread over processes."""
    return not isinstance(array, jax.core.Tracer) and getattr(array, "is_fully_addressable", True)
