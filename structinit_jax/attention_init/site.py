"""The seam: what a scheme may know of a stack of attention layers, and what it hands back."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float

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


class SolveReport(NamedTuple):
    """How close a solve came, as scalars averaged over the distinct filters.

    Attributes:
      loss: mean squared difference between target and attention map.
      share: mean attention on the true offset, over the rows whose neighbour is on the grid;
        1 / N is what a uniform map has.
      steps: optimizer steps taken.
      norm: mean Euclidean norm of the columns of Q and K.
    """

    loss: Float[Array, ""]
    share: Float[Array, ""]
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
    """

    query: Float[Array, "L D h d"] | None = None
    key: Float[Array, "L D h d"] | None = None
    value: Float[Array, "L D h d"] | None = None
    out: Float[Array, "L h d D"] | None = None
    positions: Float[Array, "N D"] | None = None
    report: SolveReport | None = None


AttentionInit = Callable[[jax.Array, AttentionSite], AttentionWeights]
"""A scheme: `(key, site) -> weights`. Pure, and traceable by jit, vmap and eval_shape."""
