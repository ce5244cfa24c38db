"""Solves for query and key factors whose softmax maps come closest to given targets.

The factors are BᵀQ and BᵀK [r, k], k = min(d, r), which `absolute` explains. `minimize` and the
comparison of maps with targets are used for all kinds of attention.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from structinit_jax.attention_init.draws import map_matrices
from structinit_jax.attention_init.sites import SolveReport
from structinit_jax.errors import require

# Directions weaker than this, relative to the strongest, cannot change a map at a reasonable norm.
RANK_TOLERANCE = 1e-4
# Regularization of the pseudo-inverse in `start_factors`, relative to the strongest direction.
START_REGULARIZATION = 1e-3
# Below this mass, fewer rows would peak on their target, so `solve` optimizes directions at this
# mass and then lowers the norm.
SHARP_MASS = 0.2
# On fewer than 25 tokens, `sharp_mass` is at least this many times uniform attention, up to 0.3.
SHARP_TOKENS = 5
SOFTEN_STEPS = 20  # Number of bisections of the norm.
# With sin-cos positions, all rows of a map pose the same problem at different places, so this many
# are enough. With noise, the other rows would not peak on their target.
MAX_ROWS = 1024
# Adam needs about as many evaluations as L-BFGS with a line search, and compiles faster.
STEPS = 150
LEARNING_RATE = 0.1
B1 = 0.9
B2 = 0.95
EPSILON = 1e-12
# Every step multiplies the norm by the odds p / (1 - p) of the target mass over the odds of the
# current mass, to this power. With a larger exponent, the norm grows faster than the directions
# turn, and narrow heads end up with maps that peak on the wrong tokens.
ODDS_EXPONENT = 0.1
# Bounds of the norm, relative to the start. Beyond them, maps peak on the wrong tokens.
NORM_CHANGE = (1 / 16, 8.0)


# -- the solve -------------------------------------------------------------------------------------


def row_space(
    x: Float[np.ndarray, "N D"],
) -> tuple[Float[np.ndarray, "N r"], Float[np.ndarray, "D r"]]:
    """Splits X into coordinates Z and an orthonormal basis B, X ≈ Z Bᵀ, of numerical rank r."""
    # For a long or wide X, decomposing the smaller Gram matrix is many times faster than an SVD.
    # Its rounding error, in float64, is far below the squared tolerance.
    gram = x.T @ x if x.shape[0] > x.shape[1] else x @ x.T
    squared, vectors = np.linalg.eigh(gram)
    kept = squared > RANK_TOLERANCE**2 * squared[-1]
    s = np.sqrt(squared[kept][::-1])
    vectors = vectors[:, kept][:, ::-1]
    basis = vectors if x.shape[0] > x.shape[1] else x.T @ (vectors / s)
    return (x @ basis).astype(np.float32), basis.astype(np.float32)


@jax.jit
def full_row_space(x: Float[Array, "N D"]) -> tuple[Float[Array, "N r"], Float[Array, "D r"]]:
    """Splits X = Z Bᵀ as `row_space` does, at full rank r = min(N, D); X can be traced."""
    u, s, vt = jnp.linalg.svd(x, full_matrices=False)
    return u * s[None], vt.T


def start_factors(
    z: Float[np.ndarray | Array, "N r"], targets: Float[np.ndarray, "F N N"], head_dim: int
) -> tuple[Float[np.ndarray | Array, "F r k"], Float[np.ndarray | Array, "F r k"]]:
    """Returns initial values of Q and K for the solve.

    Like the closed form of 2025 (`published.factor_logits`), they factor Z⁺ H Z⁺ᵀ at rank
    k = min(d, r), with a regularized pseudo-inverse Z⁺. Rows of H are centered because softmax
    ignores constants.
    """
    xp = np if isinstance(z, np.ndarray) else jnp
    # The columns of Z are orthogonal, so Z⁺ needs no decomposition.
    squared = (z * z).sum(axis=0)
    centered = targets @ z - targets.mean(axis=-1)[..., None] * z.sum(axis=0)[None, None]
    inverse = 1 / (squared + START_REGULARIZATION**2 * squared.max())
    product = inverse[None, :, None] * xp.einsum("nr,fns->frs", z, centered) * inverse[None, None]
    rank = min(head_dim, z.shape[1])
    u, s, vt = np.linalg.svd(product) if xp is np else map_matrices(jnp.linalg.svd, product)
    root = xp.sqrt(s[:, None, :rank])
    return u[..., :rank] * root, xp.swapaxes(vt, -1, -2)[..., :rank] * root


def start_norm(head_dim: int, qk_scale: float, width: int) -> float:
    """Returns the norm at which a solve for a target mass starts, where σ d norm² D = 128.

    Logits are proportional to this product. Sharp maps need about 200 on 7×7 tokens and 850 on
    24×24, at any width and number of heads.
    """
    return (128 / (qk_scale * head_dim * width)) ** 0.5


@functools.partial(
    jax.jit,
    static_argnames=("head_dim", "qk_scale", "target_mass", "learning_rate", "sharp_mass", "steps"),
)
def solve(
    start: tuple[Float[np.ndarray | Array, "F r k"], Float[np.ndarray | Array, "F r k"]],
    z: Float[np.ndarray | Array, "N r"],
    targets: Float[np.ndarray | Array, "F n N"],
    norm: float | Float[Array, ""],
    *,
    rows: Int[np.ndarray | Array, "F n"] | None = None,
    head_dim: int,
    qk_scale: float,
    target_mass: float | None = None,
    learning_rate: float = LEARNING_RATE,
    sharp_mass: float = SHARP_MASS,
    steps: int = STEPS,
) -> tuple[Float[Array, "F r k"], Float[Array, "F r k"], SolveReport]:
    """Minimizes the mean of (H - M)² (2024, equation 8) for each target H; returns BᵀQ and BᵀK.

    Adam optimizes only directions, from `start` (`start_factors`). How sharp the maps are depends
    on the norm of Q and K, the root mean square of the norms of their d columns: it starts at
    `norm` (`start_norm`) and is adjusted to the `target_mass` for each filter. For a target mass
    below `sharp_mass`, directions are optimized at `sharp_mass`, and the norm is then lowered.
    Without a target mass, it stays at `norm`. `rows` are the indices of the rows in `targets`
    (`sample_rows`); None means all.
    """
    # In a traced caller these are constants, and XLA would evaluate everything that depends only on
    # them, such as the row maxima of the targets, at compile time, which is far slower.
    start, z, targets = jax.lax.optimization_barrier((start, z, targets))
    sharp_mass = max(sharp_mass, min(0.3, SHARP_TOKENS / len(z)))
    queries = z if rows is None else z[rows]
    axes = "nr" if rows is None else "fnr"

    def at_norm(factor, norm):
        length = jnp.sqrt(jnp.sum(factor**2, axis=(1, 2), keepdims=True))
        return factor * ((norm * head_dim**0.5)[:, None, None] / length)

    def maps(factors, norm):
        query, key = (at_norm(factor, norm) for factor in factors)
        query = jnp.einsum(f"{axes},frk->fnk", queries, query) * qk_scale
        key = jnp.einsum("mr,frk->fmk", z, key)
        return jax.nn.softmax(jnp.einsum("fnk,fmk->fnm", query, key), axis=-1)

    def loss_and_mass(factors, norm):
        found = maps(factors, norm)
        # With a sum, the gradient of one filter does not shrink with the number of filters.
        loss = jnp.mean((targets - found) ** 2, axis=(1, 2)).sum()
        return loss, overlap(targets, found)

    norm = jnp.full(len(targets), norm, jnp.float32)
    # The factors have unit norm, so step sizes mean the same at any norm of the weights.
    factors = tuple(at_norm(factor, jnp.ones_like(norm)) for factor in start)
    solved_mass = None if target_mass is None else np.float32(max(target_mass, sharp_mass))
    factors, norm = minimize(
        loss_and_mass, factors, norm, solved_mass, learning_rate=learning_rate, steps=steps
    )
    if target_mass is not None and target_mass < sharp_mass:
        norm = _soften(lambda norm: loss_and_mass(factors, norm)[1], norm, target_mass)
    report = report_on_maps(targets, maps(factors, norm), target_mass or 0.0)
    return at_norm(factors[0], norm), at_norm(factors[1], norm), report


def _soften(
    mass_at: Callable[[Array], Array], norm: Float[Array, " F"], target_mass: float
) -> Float[Array, " F"]:
    """Returns the norms from 0 to `norm` at which the mass on the targets is `target_mass`."""

    def halve(_, ends):
        low, high = ends
        middle = (low + high) / 2
        above = mass_at(middle) > target_mass
        return jnp.where(above, low, middle), jnp.where(above, middle, high)

    return jax.lax.fori_loop(0, SOFTEN_STEPS, halve, (jnp.zeros_like(norm), norm))[1]


def sample_rows(
    targets: Float[np.ndarray, "F N N"],
) -> tuple[Int[np.ndarray, "F n"] | None, Float[np.ndarray, "F n N"]]:
    """Returns the indices of the rows that the loss uses, None for all, and these rows.

    They are selected here because maps of a large grid are too large for constants of a program.
    """
    if targets.shape[1] <= MAX_ROWS:
        return None, targets
    with jax.ensure_compile_time_eval():
        select = jax.vmap(lambda has_target: loss_rows(has_target, MAX_ROWS))
        rows = np.asarray(select(targets.max(axis=-1) > 0))
    return rows, np.take_along_axis(targets, rows[..., None], axis=1)


def loss_rows(has_target: Bool[Array, " N"], most: int) -> Int[Array, " n"]:
    """Returns the n = min(N, most) rows of a map that enter its loss.

    If N > `most`, they are evenly spaced among the rows with a target. If the neighbor is far away,
    these rows can be fewer than `most` and are then repeated.
    """
    if len(has_target) <= most:
        return jnp.arange(len(has_target))
    first = jnp.argsort(~has_target, stable=True)  # rows with a target come first
    last = has_target.sum(dtype=jnp.float32) - 1
    return first[jnp.round(jnp.linspace(0, last, most)).astype(jnp.int32)]


def require_above_uniform(target_mass: float, targets: Float[np.ndarray, "F N N"]) -> None:
    """Raises `InputError` unless `target_mass` exceeds that of uniform attention on each target."""
    tokens = targets.shape[-1]
    require("tokens", tokens, "2 or more: use smaller patches, or another scheme", tokens > 1)
    rows = (targets.max(axis=-1) > 0).sum(axis=-1)
    uniform = (np.minimum(targets, 1 / tokens).sum(axis=(1, 2)) / rows).max()
    needs = f"above {uniform:.3g}, the mass of uniform attention, which is lower on a larger grid"
    require("target_mass", target_mass, needs, target_mass > uniform)


def minimize(
    loss_and_mass: Callable[[Any, Array], tuple[Float[Array, ""], Array]],
    factors: Any,
    norm: Float[Array, "*F"],
    target_mass: float | np.float32 | Float[Array, ""] | None,
    *,
    learning_rate: float = LEARNING_RATE,
    steps: int = STEPS,
) -> tuple[Any, Float[Array, "*F"]]:
    """Minimizes a loss with Adam over `factors`, a tree of arrays, and returns factors and norm.

    `loss_and_mass(factors, norm)` normalizes the factors, so only their directions matter; their
    columns should have a norm of about 1. With a target mass, the norm rises while the mass is too
    low and falls while it is too high, within `NORM_CHANGE`.

    The learning rate falls linearly to 0. Unlike in `optax.adam`, entries along the last axis of an
    array share a second moment. With a second moment per entry, rounding errors would grow to full
    steps where the loss is flat, and a seed's weights would differ between one device and eight.
    """
    bounds = [change * norm for change in NORM_CHANGE]
    count = np.arange(1, steps + 1)
    rates = 1 - (count - 1) / steps
    rates *= np.sqrt(1 - B2**count) / (1 - B1**count)  # corrects the bias of both moments
    rates = learning_rate * jnp.asarray(rates, jnp.float32)

    def mean_square(grads):
        return jax.tree.map(lambda grad: jnp.mean(grad**2, axis=-1, keepdims=True), grads)

    def body(step, carry):
        factors, first, second, norm = carry
        grads, mass = jax.grad(loss_and_mass, has_aux=True)(factors, norm)
        if target_mass is not None:
            odds = mass / (1 - jnp.minimum(mass, 0.999))
            change = (target_mass / (1 - target_mass) / odds) ** ODDS_EXPONENT
            norm = jnp.clip(norm * change, *bounds).astype(norm.dtype)
        first = optax.tree.update_moment(grads, first, B1, order=1)
        second = optax.tree.update_moment(mean_square(grads), second, B2, order=1)
        rate = rates[step]
        updates = jax.tree.map(lambda m, v: -rate * m / (jnp.sqrt(v) + EPSILON), first, second)
        return optax.apply_updates(factors, updates), first, second, norm

    zeros = jax.tree.map(jnp.zeros_like, factors)
    start = (factors, zeros, mean_square(zeros), norm)
    factors, _, _, norm = jax.lax.fori_loop(0, steps, body, start)
    return factors, norm


# -- maps and targets ------------------------------------------------------------------------------


def overlap(targets: Float[Array, "*F n m"], maps: Float[Array, "*F n m"]) -> Float[Array, "*F"]:
    """Returns the attention mass Σ min(H, M) on each target, averaged over rows with a target."""
    rows = jnp.sum(targets.max(axis=-1) > 0, axis=-1, dtype=jnp.float32)
    return jnp.sum(jnp.minimum(targets, maps), axis=(-2, -1)) / jnp.maximum(rows, 1)


def find_hits(
    targets: Float[Array, "*F n m"], maps: Float[Array, "*F n m"]
) -> tuple[Bool[Array, "*F n"], Bool[Array, "*F n"]]:
    """Returns which rows peak where their target peaks, and which have a target at all."""
    strongest = targets.max(axis=-1)
    has_target = strongest > 0
    at_peak = jnp.take_along_axis(targets, maps.argmax(axis=-1)[..., None], axis=-1)[..., 0]
    return has_target & (at_peak == strongest), has_target


def report_on_maps(
    targets: Float[Array, "*F n m"], maps: Float[Array, "*F n m"], wanted_mass: ArrayLike = 0.0
) -> SolveReport:
    """Compares attention maps with their targets; the wanted mass is copied to the report."""
    hits, has_target = find_hits(targets, maps)
    return SolveReport(
        loss=jnp.mean((targets - maps) ** 2),
        target_mass=jnp.mean(overlap(targets, maps)),
        wanted_mass=jnp.asarray(wanted_mass, jnp.float32),
        hit_rate=jnp.sum(hits, dtype=jnp.float32) / jnp.sum(has_target, dtype=jnp.float32),
    )


# Below this hit rate or fraction of the wanted mass, a warning says that targets are out of reach.
MIN_HIT_RATE = 0.75
MIN_MASS = 0.95


def reach_warning(report: SolveReport) -> str | None:
    """Returns a warning if the maps are far from their targets, else None."""
    if report.hit_rate < MIN_HIT_RATE:
        return (
            f"only {100 * report.hit_rate:.0f} % of the attention rows peak on their target: use "
            "heads with more channels, a smaller kernel, a larger target_mass (for filters with "
            "several taps), a larger max_steps (impulse_2024), or a new model with learned "
            "positions (impulse_2025)"
        )
    if report.target_mass < MIN_MASS * report.wanted_mass:
        return (
            f"the targets get {report.target_mass:.3g} of the attention, less than "
            f"target_mass={report.wanted_mass:.3g}: use a smaller target_mass, heads with more "
            "channels, or a smaller kernel"
        )
    return None
