"""Solves for query and key factors whose softmax maps come closest to given targets.

With X = Z Bᵀ (Z [N, r], B [D, r] orthonormal), the map softmax(σ X Q Kᵀ Xᵀ) depends only on BᵀQ
and BᵀK. A sin-cos encoding has rank r of about 20 at any width, so factors [r, k], k = min(d, r),
are solved for instead of [D, d], once for each distinct filter.

The parts of a solve (`minimize`, `find_norm`) and the comparison of maps with targets serve all
kinds of attention.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from structinit_jax.attention_init.sites import SolveReport, is_concrete

TARGET_MASS = 0.5  # default of windows and rotary positions
MIN_HIT_RATE = 0.75  # below it, targets count as out of reach
# Directions weaker than this, relative to the strongest, cannot move a map at a reasonable norm.
RANK_TOLERANCE = 1e-4
# Starts of the solve, as regularizations of a pseudo-inverse relative to the strongest direction.
START_REGULARIZATIONS = np.geomspace(3e-5, 3e-2, 7)
START_HEADROOM = 2.0  # starts are compared at this multiple of the norm: better ones win there
# Rows of the maps in the loss. All rows of a filter pose the same problem at different places, so
# on a larger grid an evenly spaced subset determines the solution.
MAX_ROWS = 1024
MAX_STEPS = 400  # of a minimization
PATIENCE = 5  # a minimization ends after this many stalled steps in a row
MIN_IMPROVEMENT = 2e-3  # a step stalls if it lowers the loss by a smaller fraction
MASS_ROUNDS = 3  # solves for a target mass, after each of which the norm is fitted to it
# Range that `find_norm` searches, relative to the norm of the solve. If Q and K are scaled up much
# further, their maps peak on the wrong tokens.
NORM_CHANGE = (1 / 16, 2.0)
NORM_GRID = 16  # norms in the grid search
NORM_BISECTIONS = 8  # steps of the bisection that follows


# -- the solve -------------------------------------------------------------------------------------


class Bank(NamedTuple):
    """Factors for every filter of a bank: a head's Q is B query, its K is B key."""

    query: Float[Array, "F r k"]
    key: Float[Array, "F r k"]
    report: SolveReport


def row_space(
    x: Float[np.ndarray, "N D"],
) -> tuple[Float[np.ndarray, "N r"], Float[np.ndarray, "D r"]]:
    """Splits X into coordinates Z and an orthonormal basis B, X ≈ Z Bᵀ, of numerical rank r."""
    # The smaller Gram matrix is many times faster than an SVD for a long or wide X. Its rounding
    # error, in float64, is far below the squared tolerance.
    gram = x.T @ x if x.shape[0] > x.shape[1] else x @ x.T
    squared, vectors = np.linalg.eigh(gram)
    kept = squared > RANK_TOLERANCE**2 * squared[-1]
    s, vectors = np.sqrt(squared[kept][::-1]), vectors[:, kept][:, ::-1]
    basis = vectors if x.shape[0] > x.shape[1] else x.T @ (vectors / s)
    return (x @ basis).astype(np.float32), basis.astype(np.float32)


def start_factors(
    z: Float[np.ndarray, "N r"], targets: Float[np.ndarray, "F N N"], head_dim: int
) -> tuple[Float[np.ndarray, "S F r k"], Float[np.ndarray, "S F r k"]]:
    """Returns start values of Q and K for the solve, for each of S regularizations.

    Z⁺ H Z⁺ᵀ is split into factors of rank k = min(d, r), as in `papers.factor_logits`, but with
    regularized pseudo-inverses Z⁺ of `row_space`'s Z. Rows without a target stay flat.
    """
    # The columns of Z are orthogonal, so Z⁺ needs no decomposition.
    squared = (z * z).sum(axis=0)
    centered = targets @ z - targets.mean(axis=-1)[..., None] * z.sum(axis=0)[None, None]
    projected = np.einsum("nr,fns->frs", z, centered)
    ridges = START_REGULARIZATIONS.astype(np.float32)[:, None] ** 2 * squared.max()
    inverse = 1 / (squared[None] + ridges)
    product = np.einsum("sr,frt,st->sfrt", inverse, projected, inverse)
    # A uniform target may project to zero, which cannot be normalized.
    nothing = (product == 0).all(axis=(2, 3), keepdims=True)
    product = np.where(nothing, np.eye(z.shape[1], dtype=z.dtype), product)
    rank = min(head_dim, z.shape[1])
    u, s, vt = np.linalg.svd(product)
    root = np.sqrt(s[..., None, :rank])
    return u[..., :rank] * root, np.swapaxes(vt, -1, -2)[..., :rank] * root


def solve_bank(
    z: Float[np.ndarray, "N r"],
    targets: Float[np.ndarray, "F N N"],
    *,
    head_dim: int,
    qk_scale: float,
    norm: float,
    target_mass: float | None = None,
) -> Bank:
    """Minimizes the mean of (H - M)² (2024, equation 8) for each target H at a fixed norm.

    The norm is the root mean square of the norms of the d columns of Q (and of K), and limits how
    sharp the maps are. With a target mass, it is only the initial value: the norm of each filter is
    then fitted to that mass. Only directions are optimized, from the best of the starts
    (`start_factors`).
    """
    starts = start_factors(z, targets, head_dim)
    rows = np.linspace(0, len(z) - 1, min(len(z), MAX_ROWS)).round().astype(int)
    sizes = dict(head_dim=head_dim, qk_scale=qk_scale)
    return _solve(starts, z[rows], z, targets[:, rows], norm, target_mass, **sizes)


@functools.partial(jax.jit, static_argnames=("head_dim", "qk_scale"))
def _solve(starts, queries, z, targets, norm, target_mass, *, head_dim, qk_scale):
    """Solves for a bank; `queries` and `targets` have only the rows that enter the loss."""
    # For constants of a traced caller, XLA would evaluate everything that depends on the targets
    # alone, such as their row maxima, at compile time, which is far slower.
    constants = (starts, queries, z, targets)
    starts, queries, z, targets = jax.lax.optimization_barrier(constants)
    num_filters = len(targets)

    def at_norm(factor, norm):
        length = jnp.sqrt(jnp.sum(factor**2, axis=(1, 2), keepdims=True))
        return factor * ((norm * head_dim**0.5)[:, None, None] / length)

    def maps(factors, norm):
        query, key = (at_norm(factor, norm) for factor in factors)
        return attention_maps(queries, z, query, key, qk_scale)

    def losses(factors, norm):
        return jnp.mean((targets - maps(factors, norm)) ** 2, axis=(1, 2))

    def improve(_, carry):
        factors, norm, steps = carry
        # At unit norm, so that step sizes mean the same at any norm of the weights. Summed, so
        # that the gradient of one filter does not shrink with the number of filters.
        factors = tuple(at_norm(factor, jnp.ones_like(norm)) for factor in factors)
        factors, more = minimize(lambda factors: losses(factors, norm).sum(), factors, MAX_STEPS)
        if target_mass is not None:
            norm = find_norm(lambda n: overlap(targets, maps(factors, n)), norm, target_mass)
        return factors, norm, steps + more

    norm = jnp.full(num_filters, norm, jnp.float32)
    by_start = jax.lax.map(lambda start: losses(start, START_HEADROOM * norm), starts)
    best = by_start.argmin(axis=0)
    factors = tuple(factor[best, np.arange(num_filters)] for factor in starts)
    rounds = 1 if target_mass is None else MASS_ROUNDS
    factors, norm, steps = jax.lax.fori_loop(0, rounds, improve, (factors, norm, jnp.int32(0)))
    report = report_on_maps(targets, maps(factors, norm), steps=steps, norm=norm.mean())
    return Bank(at_norm(factors[0], norm), at_norm(factors[1], norm), report)


def minimize(
    loss: Callable[[Any], Float[Array, ""]], factors: Any, max_steps: int
) -> tuple[Any, Int[Array, ""]]:
    """Minimizes a function of a tree of arrays by L-BFGS until it has converged.

    Returns the factors at the end and the number of steps.
    """
    lbfgs = optax.lbfgs()

    def keep_going(carry):
        _, _, step, _, stalled = carry
        return (step < max_steps) & (stalled < PATIENCE)

    def body(carry):
        factors, state, step, best, stalled = carry
        value, grad = optax.value_and_grad_from_state(loss)(factors, state=state)
        updates, state = lbfgs.update(grad, state, factors, value=value, grad=grad, value_fn=loss)
        stalled = jnp.where(value < best * (1 - MIN_IMPROVEMENT), 0, stalled + 1)
        factors = optax.apply_updates(factors, updates)
        return factors, state, step + 1, jnp.minimum(best, value), stalled

    zero = jnp.int32(0)
    carry = (factors, lbfgs.init(factors), zero, jnp.float32(jnp.inf), zero)
    factors, _, steps, _, _ = jax.lax.while_loop(keep_going, body, carry)
    return factors, steps


def find_norm(
    mass_at: Callable[[Float[Array, " F"]], Float[Array, " F"]],
    norm: Float[Array, " F"],
    target_mass: float | Float[Array, ""],
) -> Float[Array, " F"]:
    """Finds each filter's smallest norm that reaches the mass, or the one that comes closest.

    `mass_at` returns the attention mass of each filter at given norms. The result is between 1/16
    and 2 times the norm of the solve (`NORM_CHANGE`). The grid search comes first because the mass
    is not monotonic: beyond some norm, a sharper map covers less of a soft target.
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


# -- maps and targets ------------------------------------------------------------------------------


def attention_maps(
    queries: Float[Array, "n r"],
    keys: Float[Array, "m r"],
    query: Float[Array, "F r k"],
    key: Float[Array, "F r k"],
    qk_scale: float,
) -> Float[Array, "F n m"]:
    """Returns softmax(σ Z Q Kᵀ Zᵀ) for every filter, given Z of querying and of all tokens."""
    q = jnp.einsum("nr,frk->fnk", queries, query) * qk_scale
    k = jnp.einsum("mr,frk->fmk", keys, key)
    return jax.nn.softmax(jnp.einsum("fnk,fmk->fnm", q, k), axis=-1)


def overlap(targets: Float[Array, "F n m"], maps: Float[Array, "F n m"]) -> Float[Array, " F"]:
    """Returns the attention mass on target, averaged over the rows that have a target."""
    rows = jnp.sum(targets.max(axis=-1) > 0, axis=-1, dtype=jnp.float32)
    return jnp.sum(jnp.minimum(targets, maps), axis=(1, 2)) / rows


def find_hits(
    targets: Float[Array, "*F n m"], maps: Float[Array, "*F n m"]
) -> tuple[Bool[Array, "*F n"], Bool[Array, "*F n"]]:
    """Returns which rows peak where their target peaks, and which have a target at all."""
    strongest = targets.max(axis=-1)
    has_target = strongest > 0
    at_peak = jnp.take_along_axis(targets, maps.argmax(axis=-1)[..., None], axis=-1)[..., 0]
    return has_target & (at_peak == strongest), has_target


def report_on_maps(targets, maps, *, steps, norm) -> SolveReport:
    """Compares maps [F, n, m] with their targets; copies steps and norm into the report."""
    hits, has_target = find_hits(targets, maps)
    return SolveReport(
        loss=jnp.mean((targets - maps) ** 2),
        target_mass=jnp.mean(overlap(targets, maps)),
        hit_rate=jnp.sum(hits, dtype=jnp.float32) / jnp.sum(has_target, dtype=jnp.float32),
        steps=jnp.asarray(steps, jnp.float32),
        norm=jnp.asarray(norm, jnp.float32),
    )


def out_of_reach(report: SolveReport) -> str | None:
    """Returns a warning if too few rows peak on their target, else None."""
    if report.hit_rate >= MIN_HIT_RATE:
        return None
    return (
        f"only {100 * float(report.hit_rate):.0f} % of the attention rows peak on their target. "
        "The head dimension, the rank of the positions (sin-cos for 'impulse', learned for "
        "'impulse_2025'), the frequencies of rotary positions, a small target mass or norm, or few "
        "steps may be the cause: use fewer heads, a smaller kernel, or a larger target mass"
    )


def warn_if_out_of_reach(report: SolveReport) -> None:
    """Warns the caller of a scheme if its targets are out of reach, unless the report is traced."""
    if is_concrete(report.hit_rate) and (message := out_of_reach(report)):
        # The levels are this function, `impulse`, the function that `_by_site` returns, its caller.
        warnings.warn(message, stacklevel=4)
