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

from structinit_jax.attention_init.site import SolveReport

# Directions weaker than this, relative to the strongest, cannot move a map at a sane weight norm.
RANK_TOLERANCE = 1e-4
# The solve has converged when this many steps in a row lower the loss by less than this share.
PATIENCE, MIN_IMPROVEMENT = 5, 1e-4


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
        u, s, vt = np.linalg.svd(x, full_matrices=False)
        r = int(np.sum(s > RANK_TOLERANCE * s[0]))
        z, v = u[:, :r] * s[:r], vt[:r].T
        return jnp.asarray(z, jnp.float32), jnp.asarray(v, jnp.float32)
    u, s, vt = jnp.linalg.svd(x, full_matrices=False)
    return u * s[None, :], vt.T


def attention_maps(
    z: Float[Array, "N r"],
    query: Float[Array, "F r k"],
    key: Float[Array, "F r k"],
    qk_scale: float,
) -> Float[Array, "F N N"]:
    """softmax(σ Z Q Kᵀ Zᵀ) for every filter of the bank."""
    queries = jnp.einsum("nr,frk->fnk", z, query) * qk_scale
    keys = jnp.einsum("nr,frk->fnk", z, key)
    return jax.nn.softmax(jnp.einsum("fnk,fmk->fnm", queries, keys), axis=-1)


@functools.partial(jax.jit, static_argnames=("head_dim", "qk_scale", "norm", "max_steps"))
def solve_bank(
    rng: PRNGKeyArray,
    z: Float[Array, "N r"],
    targets: Float[Array, "F N N"],
    *,
    head_dim: int,
    qk_scale: float,
    norm: float,
    max_steps: int,
) -> Bank:
    """Minimizes the mean of (H - M)² for each target H at a fixed weight norm, by L-BFGS.

    The objective is equation 8 of the 2024 paper. Its algorithm 1 rescales the columns of Q and K
    now and then; here the root mean square of the column norms is held at `norm` exactly, by
    solving for the direction of Q and of K only.

    Args:
      rng: draws the start.
      z: coordinates of the pseudo input, from `row_space`.
      targets: H, one map for each filter.
      head_dim: d, over whose columns the norm is shared when the factors are turned into weights.
      qk_scale: σ.
      norm: root mean square over the d columns of Q (and of K) of their Euclidean norms; bounds
        the sharpness of the maps.
      max_steps: the solve stops here if it has not converged before.
    """
    shape = (len(targets), z.shape[1], min(head_dim, z.shape[1]))
    frobenius_norm = norm * head_dim**0.5
    rows = jnp.sum(targets.sum(axis=-1) > 0, dtype=jnp.float32)  # whose neighbour is on the grid

    def at_norm(factor):
        length = jnp.sqrt(jnp.sum(factor**2, axis=(1, 2), keepdims=True))
        return factor * (frobenius_norm / length)

    def maps(factors):
        query, key = factors
        return attention_maps(z, at_norm(query), at_norm(key), qk_scale)

    def loss(factors):
        # A sum over filters keeps each filter's gradient independent of how many there are.
        return jnp.mean((targets - maps(factors)) ** 2, axis=(1, 2)).sum()

    optimizer = optax.lbfgs()
    value_and_grad = optax.value_and_grad_from_state(loss)

    def keep_going(carry):
        _, _, step, _, stalled = carry
        return (step < max_steps) & (stalled < PATIENCE)

    def body(carry):
        factors, state, step, best, stalled = carry
        value, grad = value_and_grad(factors, state=state)
        updates, state = optimizer.update(
            grad, state, factors, value=value, grad=grad, value_fn=loss
        )
        stalled = jnp.where(value < best * (1 - MIN_IMPROVEMENT), 0, stalled + 1)
        factors = optax.apply_updates(factors, updates)
        return factors, state, step + 1, jnp.minimum(best, value), stalled

    start = tuple(at_norm(jax.random.normal(k, shape)) for k in jax.random.split(rng))
    carry = (start, optimizer.init(start), jnp.int32(0), jnp.float32(jnp.inf), jnp.int32(0))
    factors, _, steps, _, _ = jax.lax.while_loop(keep_going, body, carry)

    solved = maps(factors)
    report = SolveReport(
        loss=jnp.mean((targets - solved) ** 2),
        share=jnp.sum(targets * solved) / rows,
        steps=steps.astype(jnp.float32),
        norm=jnp.float32(norm),
    )
    return Bank(at_norm(factors[0]), at_norm(factors[1]), report)
