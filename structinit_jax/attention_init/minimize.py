"""Minimizes a function until convergence; finds the norm that gives a target mass."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from structinit_jax.errors import InputError

# A minimization has converged when this many steps in a row lower the loss by less than this
# fraction.
PATIENCE, MIN_IMPROVEMENT = 5, 2e-3
# With a target mass, the norm is fitted to it after each of several solves. It can at most double
# each time: far above the norm of their solve, factors make sharp maps on the wrong tokens.
MASS_ROUNDS, NORM_CHANGE, NORM_GRID, NORM_BISECTIONS = 3, (1 / 16, 2.0), 16, 8


def make_optimizer(name: str, learning_rate: float) -> optax.GradientTransformationExtraArgs:
    """Returns L-BFGS with its own line search, or another optax optimizer by its name."""
    if name == "lbfgs":
        return optax.lbfgs()
    try:
        made = getattr(optax, name)(learning_rate)
    except (AttributeError, TypeError):
        made = None
    if not isinstance(made, optax.GradientTransformation):
        raise InputError(
            f"optimizer={name!r}: not an optimizer of optax that needs a learning rate alone; use "
            "'lbfgs', or for example 'adam' with max_steps and learning_rate"
        )
    return optax.with_extra_args_support(made)


def minimize(
    loss: Callable[[Any], Float[Array, ""]],
    factors: Any,
    transform: optax.GradientTransformationExtraArgs,
    *,
    line_search: bool,
    max_steps: int,
) -> tuple[Any, Int[Array, ""]]:
    """Minimizes a function of a tree of arrays until it has converged.

    Args:
      loss: The function.
      factors: Start values.
      transform: Optimizer.
      line_search: Whether `transform` is L-BFGS, whose line search needs the loss.
      max_steps: Maximum number of steps.

    Returns:
      The factors at the end and the number of steps.
    """

    def keep_going(carry):
        _, _, step, _, stalled = carry
        return (step < max_steps) & (stalled < PATIENCE)

    def body(carry):
        factors, state, step, best, stalled = carry
        if line_search:
            value, grad = optax.value_and_grad_from_state(loss)(factors, state=state)
        else:
            value, grad = jax.value_and_grad(loss)(factors)
        extra = dict(value=value, grad=grad, value_fn=loss)
        updates, state = transform.update(grad, state, factors, **extra)
        stalled = jnp.where(value < best * (1 - MIN_IMPROVEMENT), 0, stalled + 1)
        factors = optax.apply_updates(factors, updates)
        return factors, state, step + 1, jnp.minimum(best, value), stalled

    zero = jnp.int32(0)
    carry = (factors, transform.init(factors), zero, jnp.float32(jnp.inf), zero)
    factors, _, steps, _, _ = jax.lax.while_loop(keep_going, body, carry)
    return factors, steps


def find_norm(
    mass_at: Callable[[Float[Array, " F"]], Float[Array, " F"]],
    norm: Float[Array, " F"],
    target_mass: float | Float[Array, ""],
) -> Float[Array, " F"]:
    """Finds each filter's smallest norm that reaches the mass, or the one that comes closest.

    The result is between 1/16 and 2 times the given norm (`NORM_CHANGE`). The grid search comes
    first because the mass is not monotonic: beyond some norm, a sharper map covers less of a soft
    target.

    Args:
      mass_at: Attention mass of each filter at the norms that it is given.
      norm: Norms of the solve.
      target_mass: Attention mass wanted on target.
    """
    change = jnp.geomspace(*NORM_CHANGE, NORM_GRID, dtype=norm.dtype)
    masses = jax.lax.map(lambda factor: mass_at(factor * norm), change)
    enough = masses >= target_mass
    reached = enough.any(axis=0)
    index = jnp.where(reached, enough.argmax(axis=0), masses.argmax(axis=0))
    low, high = norm * change[jnp.maximum(index - 1, 0)], norm * change[index]

    def bisect(_, bounds):
        low, high = bounds
        middle = jnp.sqrt(low * high)
        enough = mass_at(middle) >= target_mass
        return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

    fitted = jax.lax.fori_loop(0, NORM_BISECTIONS, bisect, (low, high))[1]
    return jnp.where(reached, fitted, high)
