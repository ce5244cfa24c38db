"""The solve: query and key factors whose softmax maps come closest to given targets.

With the thin singular value decomposition X = Z Vᵀ of the pseudo input (Z [N, r], V [D, r]), the
map softmax(σ X Q Kᵀ Xᵀ) depends on VᵀQ and VᵀK alone. A sin-cos encoding has r of about 20 whatever
the width, so the problem is solved for factors [r, k], k = min(d, r), instead of [D, d], once for
each distinct filter of a bank.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PRNGKeyArray

from structinit_jax.attention_init.sites import SolveReport
from structinit_jax.errors import InputError

# Directions weaker than this, relative to the strongest, cannot move a map at a sane weight norm.
RANK_TOLERANCE = 1e-4
# The solve has converged when this many steps in a row lower the loss by less than this share.
PATIENCE, MIN_IMPROVEMENT = 5, 1e-3
# Rows of the maps that enter the loss. All rows of a filter pose the same question at another
# place, so for a larger grid an evenly spread part of them determines the solution.
MAX_ROWS = 1024
# When a share of attention is asked for, the norm is fitted to it between two solves.
SHARE_ROUNDS, NORM_RANGE, NORM_GRID, NORM_BISECTIONS = 2, (0.05, 20.0), 24, 12


class Bank(NamedTuple):
    """Factors for every filter of a bank; Q = V query, K = V key for one head.

    Attributes:
      query: [F, r, k].
      key: [F, r, k].
      report: how close they came.
    """

    query: Float[Array, "F r k"]
    key: Float[Array, "F r k"]
    report: SolveReport


def row_space(x: np.ndarray | jax.Array) -> tuple[Float[Array, "N r"], Float[Array, "D r"]]:
    """Splits X [N, D] into coordinates Z [N, r] and an orthonormal basis V [D, r], X ≈ Z Vᵀ.

    For a NumPy array r is the numerical rank. The values of a traced array are not known when its
    shapes are fixed, so r is then min(N, D): the same solution at a higher price.
    """
    if isinstance(x, np.ndarray):
        # Through the smaller Gram matrix, which is many times faster for a long or wide X. Its
        # rounding, in float64, is far below the tolerance squared.
        gram = x.T @ x if x.shape[0] > x.shape[1] else x @ x.T
        squared, vectors = np.linalg.eigh(gram)
        kept = squared > RANK_TOLERANCE**2 * squared[-1]
        s, vectors = np.sqrt(squared[kept][::-1]), vectors[:, kept][:, ::-1]
        v = vectors if x.shape[0] > x.shape[1] else x.T @ (vectors / s)
        return jnp.asarray(x @ v, jnp.float32), jnp.asarray(v, jnp.float32)
    u, s, vt = jnp.linalg.svd(x, full_matrices=False)
    return u * s[None, :], vt.T


def attention_maps(
    queries: Float[Array, "n r"],
    keys: Float[Array, "m r"],
    query: Float[Array, "F r k"],
    key: Float[Array, "F r k"],
    qk_scale: float,
) -> Float[Array, "F n m"]:
    """softmax(σ Z Q Kᵀ Zᵀ) for every filter, from the coordinates of querying and of all tokens."""
    q = jnp.einsum("nr,frk->fnk", queries, query) * qk_scale
    k = jnp.einsum("mr,frk->fmk", keys, key)
    return jax.nn.softmax(jnp.einsum("fnk,fmk->fnm", q, k), axis=-1)


def overlap(targets: Float[Array, "F n m"], maps: Float[Array, "F n m"]) -> Float[Array, " F"]:
    """Attention that lies where the target wants it, averaged over the rows that have a target."""
    rows = jnp.sum(targets.max(axis=-1) > 0, axis=-1, dtype=jnp.float32)
    return jnp.sum(jnp.minimum(targets, maps), axis=(1, 2)) / rows


def closeness(targets, maps, *, steps, norm) -> SolveReport:
    """What a `SolveReport` says of maps [F, n, m] and their targets."""
    strongest = targets.max(axis=-1)
    has_target = strongest > 0
    peaks = jnp.take_along_axis(targets, maps.argmax(axis=-1)[..., None], axis=-1)[..., 0]
    hits = has_target & (peaks == strongest)
    return SolveReport(
        loss=jnp.mean((targets - maps) ** 2),
        target_mass=jnp.mean(overlap(targets, maps)),
        hit_rate=jnp.sum(hits, dtype=jnp.float32) / jnp.sum(has_target, dtype=jnp.float32),
        steps=jnp.asarray(steps, jnp.float32),
        norm=jnp.asarray(norm, jnp.float32),
    )


def make_optimizer(name: str, learning_rate: float) -> optax.GradientTransformationExtraArgs:
    """L-BFGS with its own line search, or any other optax optimizer with a learning rate."""
    if name == "lbfgs":
        # Twice optax's memory ends a third lower after as many steps, where maps are sharp.
        return optax.lbfgs(memory_size=20)
    if not callable(getattr(optax, name, None)):
        raise InputError(
            f"attention_init.optimizer={name!r}: optax has no such optimizer; use 'lbfgs', or "
            "another one such as 'adam' together with max_steps and learning_rate"
        )
    return optax.with_extra_args_support(getattr(optax, name)(learning_rate))


@functools.partial(
    jax.jit,
    static_argnames=(
        "head_dim",
        "qk_scale",
        "target_mass",
        "optimizer",
        "learning_rate",
        "max_steps",
    ),
)
def solve_bank(
    rng: PRNGKeyArray,
    z: Float[Array, "N r"],
    targets: Float[Array, "F N N"],
    *,
    head_dim: int,
    qk_scale: float,
    norm: float | Array = 3**-0.5,
    target_mass: float | None = None,
    optimizer: str = "lbfgs",
    learning_rate: float = 1e-2,
    max_steps: int = 400,
) -> Bank:
    """Minimizes the mean of (H - M)² for each target H at a fixed weight norm.

    The objective is equation 8 of the 2024 paper. Its algorithm 1 rescales the columns of Q and K
    now and then; here the root mean square of the column norms is held exactly, by solving for the
    direction of Q and of K only.

    Args:
      rng: draws the start.
      z: coordinates of the pseudo input, from `row_space`.
      targets: H, one map for each filter.
      head_dim: d, over whose columns the norm is shared when the factors are turned into weights.
      qk_scale: σ.
      norm: root mean square over the d columns of Q (and of K) of their Euclidean norms; bounds
        the sharpness of the maps. Where a share is asked for, only the start.
      target_mass: attention wanted on target; each filter's norm is then fitted to it.
      optimizer: 'lbfgs' or the name of another optax optimizer.
      learning_rate: of an optimizer other than L-BFGS.
      max_steps: the solve stops here if it has not converged before.
    """
    num_filters, num_tokens = targets.shape[:2]
    rows = np.linspace(0, num_tokens - 1, min(num_tokens, MAX_ROWS)).round().astype(int)
    queries, targets = z[rows], targets[:, rows]
    shape = (num_filters, z.shape[1], min(head_dim, z.shape[1]))
    start = tuple(jax.random.uniform(rng, (2, *shape), minval=-1.0, maxval=1.0))
    transform = make_optimizer(optimizer, learning_rate)

    def at_norm(factor, norm):
        length = jnp.sqrt(jnp.sum(factor**2, axis=(1, 2), keepdims=True))
        return factor * ((norm * head_dim**0.5)[:, None, None] / length)

    def maps(factors, norm):
        query, key = (at_norm(factor, norm) for factor in factors)
        return attention_maps(queries, z, query, key, qk_scale)

    def solve(factors, norm):
        def loss(factors):
            # A sum over filters keeps each one's gradient independent of how many there are.
            return jnp.mean((targets - maps(factors, norm)) ** 2, axis=(1, 2)).sum()

        # At unit norm, so that steps have the same meaning whatever the budget.
        factors = tuple(at_norm(factor, jnp.ones(num_filters)) for factor in factors)
        return _minimize(loss, factors, transform, optimizer == "lbfgs", max_steps)

    norm = jnp.full(num_filters, norm, jnp.float32)
    factors, steps = solve(start, norm)
    for _ in range(SHARE_ROUNDS if target_mass is not None else 0):
        norm = _fit_norm(lambda norm, f=factors: overlap(targets, maps(f, norm)), norm, target_mass)
        factors, more = solve(factors, norm)
        steps += more
    if target_mass is not None:
        norm = _fit_norm(lambda norm: overlap(targets, maps(factors, norm)), norm, target_mass)
    report = closeness(targets, maps(factors, norm), steps=steps, norm=norm.mean())
    return Bank(at_norm(factors[0], norm), at_norm(factors[1], norm), report)


def _minimize(loss, factors, transform, line_search: bool, max_steps: int):
    value_and_grad = (
        optax.value_and_grad_from_state(loss)
        if line_search
        else lambda factors, state: jax.value_and_grad(loss)(factors)
    )

    def keep_going(carry):
        _, _, step, _, stalled = carry
        return (step < max_steps) & (stalled < PATIENCE)

    def body(carry):
        factors, state, step, best, stalled = carry
        value, grad = value_and_grad(factors, state=state)
        updates, state = transform.update(
            grad, state, factors, value=value, grad=grad, value_fn=loss
        )
        stalled = jnp.where(value < best * (1 - MIN_IMPROVEMENT), 0, stalled + 1)
        factors = optax.apply_updates(factors, updates)
        return factors, state, step + 1, jnp.minimum(best, value), stalled

    zero = jnp.int32(0)
    carry = (factors, transform.init(factors), zero, jnp.float32(jnp.inf), zero)
    factors, _, steps, _, _ = jax.lax.while_loop(keep_going, body, carry)
    return factors, steps


def _fit_norm(share_at, norm, share):
    """Each filter's smallest norm that reaches the share, or the one that comes closest to it.

    A grid finds it first, since beyond some norm a soft target loses what a sharper map takes away.
    """
    grid = jnp.geomspace(*NORM_RANGE, NORM_GRID)
    shares = jax.lax.map(lambda value: share_at(jnp.full_like(norm, value)), grid)
    enough = shares >= share
    reached = enough.any(axis=0)
    index = jnp.where(reached, enough.argmax(axis=0), shares.argmax(axis=0))
    low, high = grid[jnp.maximum(index - 1, 0)], grid[index]

    def bisect(_, bounds):
        low, high = bounds
        middle = jnp.sqrt(low * high)
        enough = share_at(middle) >= share
        return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

    fitted = jax.lax.fori_loop(0, NORM_BISECTIONS, bisect, (low, high))[1]
    return jnp.where(reached, fitted, high)
