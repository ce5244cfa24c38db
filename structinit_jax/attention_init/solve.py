"""Solves for query and key factors whose softmax maps come closest to given targets.

With X = Z Vᵀ (Z [N, r], V [D, r] orthonormal), the map softmax(σ X Q Kᵀ Xᵀ) depends only on VᵀQ and
VᵀK. A sin-cos encoding has rank r of about 20 at any width, so factors [r, k], k = min(d, r), are
solved for instead of [D, d], once for each distinct filter.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from structinit_jax.attention_init.minimize import (
    MASS_ROUNDS,
    find_norm,
    make_optimizer,
    minimize,
)
from structinit_jax.attention_init.report import attention_maps, overlap, report_on_maps
from structinit_jax.attention_init.sites import SolveReport

# Directions weaker than this, relative to the strongest, cannot move a map at a reasonable norm.
RANK_TOLERANCE = 1e-4
# Starts of the solve, as regularizations of a pseudo-inverse relative to the strongest direction.
# The one with the lowest loss at START_HEADROOM times the norm leads to better solutions.
START_REGULARIZATIONS, START_HEADROOM = np.geomspace(3e-5, 3e-2, 7), 2.0
# Rows of the maps in the loss. All rows of a filter pose the same problem at different places, so
# on a larger grid an evenly spaced subset determines the solution.
MAX_ROWS = 1024
# Options of `solve_bank` that are fixed at compile time.
STATIC_OPTIONS = ("optimizer", "learning_rate", "max_steps")


class Bank(NamedTuple):
    """Factors for every filter of a bank: a head's Q is V query, its K is V key."""

    query: Float[Array, "F r k"]
    key: Float[Array, "F r k"]
    report: SolveReport


def loss_rows(num_tokens: int) -> Int[np.ndarray, " n"]:
    """Returns the rows of the maps that enter the loss, evenly spaced: n = min(N, `MAX_ROWS`)."""
    return np.linspace(0, num_tokens - 1, min(num_tokens, MAX_ROWS)).round().astype(int)


def row_space(
    x: np.ndarray | jax.Array,
) -> tuple[Float[Array | np.ndarray, "N r"], Float[Array | np.ndarray, "D r"]]:
    """Splits X [N, D] into coordinates Z [N, r] and an orthonormal basis V [D, r], X ≈ Z Vᵀ.

    For a NumPy array, r is the numerical rank. The values of a traced array are unknown when shapes
    are fixed, so r is then min(N, D), and the columns beyond the rank are zero: the same solution
    at a higher cost.
    """
    if isinstance(x, np.ndarray):
        # The smaller Gram matrix is many times faster than an SVD for a long or wide X. Its
        # rounding error, in float64, is far below the squared tolerance.
        gram = x.T @ x if x.shape[0] > x.shape[1] else x @ x.T
        squared, vectors = np.linalg.eigh(gram)
        kept = squared > RANK_TOLERANCE**2 * squared[-1]
        s, vectors = np.sqrt(squared[kept][::-1]), vectors[:, kept][:, ::-1]
        v = vectors if x.shape[0] > x.shape[1] else x.T @ (vectors / s)
        return (x @ v).astype(np.float32), v.astype(np.float32)
    u, s, vt = jnp.linalg.svd(x, full_matrices=False)
    kept = (s > RANK_TOLERANCE * s[0]).astype(x.dtype)
    return u * (s * kept)[None, :], vt.T * kept[None, :]


def split_product(product: Float[Array | np.ndarray, "*batch D D"], rank: int):
    """Returns A, B [..., D, k] with A Bᵀ closest to the product, singular values split evenly."""
    if isinstance(product, np.ndarray):
        xp = np
        u, s, vt = np.linalg.svd(product)
    else:
        # One by one: on CPUs, batches that several programs or devices decompose at the same time
        # wait for each other's threads, without end or for long.
        xp = jnp
        matrices = product.reshape(-1, *product.shape[-2:])
        u, s, vt = (
            x.reshape(*product.shape[:-2], *x.shape[1:])
            for x in jax.lax.map(jnp.linalg.svd, matrices)
        )
    root = xp.sqrt(s[..., None, :rank])
    return u[..., :rank] * root, xp.swapaxes(vt, -1, -2)[..., :rank] * root


def start_factors(
    z: Float[Array | np.ndarray, "N r"],
    targets: Float[Array | np.ndarray, "F N N"],
    head_dim: int,
):
    """Returns start values of Q and K [S, F, r, k] for the solve, one for each regularization.

    Z⁺ H Z⁺ᵀ is split into factors of rank k = min(d, r), as in `papers.factor_logits`, but with
    regularized pseudo-inverses Z⁺ of `row_space`'s Z. Rows without a target stay flat. NumPy arrays
    are computed by NumPy: XLA's decompositions can deadlock on several virtual CPU devices.
    """
    xp = np if isinstance(z, np.ndarray) else jnp
    # The columns of Z are orthogonal, so Z⁺ needs no decomposition.
    squared = (z * z).sum(axis=0)
    centered = targets @ z - targets.mean(axis=-1)[..., None] * z.sum(axis=0)[None, None]
    projected = xp.einsum("nr,fns->frs", z, centered)
    ridges = START_REGULARIZATIONS.astype(np.float32)[:, None] ** 2 * squared.max()
    inverse = 1 / (squared[None] + ridges)
    product = xp.einsum("sr,frt,st->sfrt", inverse, projected, inverse)
    # A uniform target may leave nothing, which no factor brings to a norm.
    nothing = (product == 0).all(axis=(2, 3), keepdims=True)
    product = xp.where(nothing, xp.eye(z.shape[1], dtype=z.dtype)[None, None], product)
    return split_product(product, min(head_dim, z.shape[1]))


@functools.partial(jax.jit, static_argnames=("head_dim", "qk_scale", *STATIC_OPTIONS))
def solve_bank(
    starts: tuple[Float[Array, "S F r k"], Float[Array, "S F r k"]],
    z: Float[Array, "N r"],
    targets: Float[Array, "F n N"],
    *,
    head_dim: int,
    qk_scale: float,
    norm: float | Array = 3**-0.5,
    target_mass: float | Array | None = None,
    optimizer: str = "lbfgs",
    learning_rate: float = 1e-2,
    max_steps: int = 400,
) -> Bank:
    """Minimizes the mean of (H - M)² (2024, equation 8) for each target H at a fixed norm.

    The 2024 paper's program rescales the columns of Q and the rows of K from time to time; here the
    root mean square of the column norms of both is held exactly: only the directions are optimized,
    starting from a pseudo-inverse as in the 2025 paper.

    Args:
      starts: Start values to choose from, from `start_factors`.
      z: Coordinates of the pseudo input, from `row_space`.
      targets: The `loss_rows` of H, one map per filter; constants of a traced caller become part of
        the program.
      head_dim: Number of columns d over which the norm is spread.
      qk_scale: σ.
      norm: Root mean square norm of the d columns of Q (and of K), which limits how sharp the maps
        are. Only the starting point if `target_mass` is given.
      target_mass: Attention mass wanted on target, to which each filter's norm is fitted.
      optimizer: 'lbfgs' or the name of another optax optimizer.
      learning_rate: Learning rate of an optimizer other than L-BFGS.
      max_steps: Maximum number of steps of each solve.
    """
    # If a traced caller passes constants, XLA would compute at compile time, far more slowly, what
    # depends on the targets alone, such as their row maxima.
    starts, z, targets = jax.lax.optimization_barrier((starts, z, targets))
    num_filters, _, num_tokens = targets.shape
    queries = z[loss_rows(num_tokens)]
    transform = make_optimizer(optimizer, learning_rate)

    def at_norm(factor, norm):
        length = jnp.sqrt(jnp.sum(factor**2, axis=(1, 2), keepdims=True))
        return factor * ((norm * head_dim**0.5)[:, None, None] / length)

    def maps(factors, norm):
        query, key = (at_norm(factor, norm) for factor in factors)
        return attention_maps(queries, z, query, key, qk_scale)

    def mass(factors, norm):
        return overlap(targets, maps(factors, norm))

    def losses(factors, norm):
        return jnp.mean((targets - maps(factors, norm)) ** 2, axis=(1, 2))

    def best_start(norm):
        by_start = jax.lax.map(lambda start: losses(start, START_HEADROOM * norm), starts)
        best = by_start.argmin(axis=0)
        return tuple(factor[best, np.arange(num_filters)] for factor in starts)

    def solve(factors, norm):
        def loss(factors):
            # A sum over filters keeps each one's gradient independent of how many there are.
            return losses(factors, norm).sum()

        # At unit norm, so that step sizes mean the same at any norm of the weights.
        factors = tuple(at_norm(factor, jnp.ones_like(norm)) for factor in factors)
        line_search = optimizer == "lbfgs"
        return minimize(loss, factors, transform, line_search=line_search, max_steps=max_steps)

    def improve(_, carry):
        factors, norm, steps = carry
        factors, more = solve(factors, norm)
        if target_mass is not None:
            mass_at = functools.partial(mass, factors)
            norm = find_norm(mass_at, norm, target_mass)
        return factors, norm, steps + more

    norm = jnp.full(num_filters, norm, jnp.float32)
    rounds = 1 if target_mass is None else MASS_ROUNDS
    carry = (best_start(norm), norm, jnp.int32(0))
    factors, norm, steps = jax.lax.fori_loop(0, rounds, improve, carry)
    report = report_on_maps(targets, maps(factors, norm), steps=steps, norm=norm.mean())
    return Bank(at_norm(factors[0], norm), at_norm(factors[1], norm), report)
