"""Draws random arrays with programs that compile fast, and timm's truncated normal."""

import math
from collections.abc import Callable

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, PRNGKeyArray


def draw_flat(
    draw: Callable[[PRNGKeyArray, tuple[int]], Array], rng: PRNGKeyArray, shape: tuple[int, ...]
) -> Array:
    """Returns the same values as `draw(rng, shape)`, but draws along a single axis.

    On CPUs, XLA unrolls loops over short axes together with the many rounds of the random
    generator, and takes up to 20 times as long to compile a draw over several axes.

    Args:
      draw: Draws independent numbers, such as `jax.random.normal`.
      rng: Random key.
      shape: Shape of the result.
    """
    return draw(rng, (math.prod(shape),)).reshape(shape)


def trunc_normal(
    rng: PRNGKeyArray, shape: tuple[int, ...], dtype: DTypeLike = float, *, std: float
) -> Array:
    """Draws as timm's `trunc_normal_(std=std)`, which cuts at ±2, not at ±2 standard deviations."""
    return std * jax.random.truncated_normal(rng, -2 / std, 2 / std, shape, dtype)
