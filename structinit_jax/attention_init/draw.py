"""Random arrays whose programs compile fast."""

import math
from collections.abc import Callable

from jaxtyping import Array, PRNGKeyArray


def draw_flat(
    draw: Callable[[PRNGKeyArray, tuple[int]], Array], rng: PRNGKeyArray, shape: tuple[int, ...]
) -> Array:
    """Returns `draw(rng, shape)`, drawn along a single axis: the same values.

    On CPUs, XLA unrolls the loops over short axes together with the many rounds of the random
    generator, and compiles a draw of several axes up to 20 times as slowly as this one.

    Args:
      draw: Draws independent numbers, such as `jax.random.normal`.
      rng: Random key.
      shape: Shape of the result.
    """
    return draw(rng, (math.prod(shape),)).reshape(shape)
