"""The solve: query and key factors whose softmax maps come closest to given targets.

With X = Z Vᵀ (Z [N, r], V [D, r] orthonormal), the map softmax(σ X Q Kᵀ Xᵀ) depends only on VᵀQ and
VᵀK. A sin-cos encoding has rank r of about 20 at any width, so factors [r, k], k = min(d, r), are
solved for instead of [D, d], once for each distinct filter.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from structinit_jax.attention_init.sites import SolveReport
from structinit_jax.errors import InputError

# Directions weaker than this, relative to the strongest, cannot move a map at a reasonable norm.
RANK_TOLERANCE = 1e-4
# Starts of the solve, as regularizations of a pseudo-inverse relative to the strongest direction.
# The one is taken that would be best at a higher norm, of which the solve makes better use.
START_REGULARIZATIONS, START_HEADROOM = np.geomspace(3e-5, 3e-2, 7), 2.0
# The solve has converged when this many steps in a row lower the loss by less than this fraction.
PATIENCE, MIN_IMPROVEMENT = 5, 2e-3
# Rows of the maps that enter the loss. All rows of a filter pose the same problem at another place,
# so on a larger grid an evenly spaced subset determines the solution.
MAX_ROWS = 1024
# With a target mass, the norm is fitted to it between solves: a grid search, then bisection.
MASS_ROUNDS, NORM_RANGE, NORM_GRID, NORM_BISECTIONS = 2, (0.05, 20.0), 24, 12
MIN_HIT_RATE = 0.75  # below it, targets count as out of reach
PSEUDO_INPUTS = ("positions", "uniform", "gaussian", "positions+uniform", "positions+gaussian")
# Options of `solve_bank` that are fixed at compile time.
STATIC_OPTIONS = ("target_mass", "optimizer", "learning_rate", "max_steps")


class Bank(NamedTuple):
    """Factors for every filter of a bank: a head's Q is V query, its K is V key."""

    query: Float[Array, "F r k"]
    key: Float[Array, "F r k"]
    report: SolveReport


# -- pseudo inputs: what stands for a layer's tokens in the solve ----------------------------------


def sincos_positions(
    grid: tuple[int, int], width: int, convention: str = "timm"
) -> Float[np.ndarray, "N D"]:
    """Returns the 2-D sine-cosine encoding with temperature 10,000; N = rows × cols, row-major.

    Args:
      grid: (rows, cols).
      width: Channels D, a multiple of 4 and at least 8.
      convention: 'timm' is timm's `build_sincos2d_pos_embed`, which the 2024 paper uses: channels
        sin y, sin x, cos y, cos x and frequencies 10,000^(-4 i / D), i = 0 … D/4 - 1. 'moco' is
        that of MoCo v3 and big_vision: sin x, cos x, sin y, cos y and 10,000^(-i / (D/4 - 1)).

    Raises:
      InputError: The width cannot be encoded, or the convention is unknown.
    """
    if width % 4 or width < 8:
        raise InputError(
            f"width={width}: sin-cos positions need a width of at least 8 that is divisible by 4; "
            "change the width or use learned positions"
        )
    if convention not in ("timm", "moco"):
        raise InputError(f"convention={convention!r}: choose 'timm' or 'moco'")
    quarter = width // 4
    steps = quarter if convention == "timm" else quarter - 1
    frequencies = 10_000.0 ** -(np.arange(quarter) / steps)
    y, x = np.meshgrid(*map(np.arange, grid), indexing="ij")
    y, x = (axis.reshape(-1, 1) * frequencies for axis in (y, x))
    if convention == "timm":
        channels = [np.sin(y), np.sin(x), np.cos(y), np.cos(x)]
    else:
        channels = [np.sin(x), np.cos(x), np.sin(y), np.cos(y)]
    return np.concatenate(channels, axis=1).astype(np.float32)


def layer_norm(x: Float[Array | np.ndarray, "N D"], epsilon: float = 1e-6):
    """LayerNorm without scale and bias: in float64 for a NumPy array, else in float32."""
    xp, dtype = (np, np.float64) if isinstance(x, np.ndarray) else (jnp, jnp.float32)
    x = x.astype(dtype)
    x = x - x.mean(axis=1, keepdims=True)
    return x / xp.sqrt((x * x).mean(axis=1, keepdims=True) + epsilon)


def draw_pseudo_input(
    rng: PRNGKeyArray, name: str, positions: Float[Array | np.ndarray, "N D"]
) -> Float[Array | np.ndarray, "N D"]:
    """Draws one of the pseudo inputs in table 6 of the 2024 paper, before LayerNorm.

    'uniform' is noise between -1 and 1; 'gaussian' is truncated normal noise of standard deviation
    (1/2)^1/2, that of the sin-cos encoding; a sum adds the noise to the positions.
    """
    if name == "positions":
        return positions
    if name.endswith("uniform"):
        noise = jax.random.uniform(rng, positions.shape, minval=-1.0, maxval=1.0)
    else:
        std = 0.5**0.5
        noise = std * jax.random.truncated_normal(rng, -2 / std, 2 / std, positions.shape)
    return noise + positions if name.startswith("positions+") else noise


def row_space(
    x: np.ndarray | jax.Array,
) -> tuple[Float[Array | np.ndarray, "N r"], Float[Array | np.ndarray, "D r"]]:
    """Splits X [N, D] into coordinates Z [N, r] and an orthonormal basis V [D, r], X ≈ Z Vᵀ.

    For a NumPy array, r is the numerical rank. The values of a traced array are unknown when shapes
    are fixed, so r is then min(N, D): the same solution at a higher cost.
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
    return u * s[None, :], vt.T


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


# -- the problem and its solution -----------------------------------------------------------------


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


def report_on_maps(targets, maps, *, steps, norm) -> SolveReport:
    """Compares maps [F, n, m] with their targets; steps and norm are copied into the report."""
    strongest = targets.max(axis=-1)
    has_target = strongest > 0
    at_peak = jnp.take_along_axis(targets, maps.argmax(axis=-1)[..., None], axis=-1)[..., 0]
    hits = has_target & (at_peak == strongest)
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
        f"only {100 * float(report.hit_rate):.0f} % of the attention rows peak on their target, "
        "since the head dimension and the rank of the position encoding, or the frequencies of "
        "rotary positions, limit the maps: use fewer heads, a smaller kernel, or sin-cos positions"
    )


def warn_if_out_of_reach(report: SolveReport) -> None:
    """Warns the caller of a scheme if its targets are out of reach, unless the report is traced."""
    message = None if isinstance(report.hit_rate, jax.core.Tracer) else out_of_reach(report)
    if message:
        warnings.warn(message, stacklevel=4)


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
    """Minimizes the mean of (H - M)² (2024, equation 8) for each target H at a fixed norm.

    Algorithm 1 of the 2024 paper rescales the columns of Q and K from time to time; here the root
    mean square of the column norms is held exactly: only the directions are optimized, starting
    from a pseudo-inverse as in the 2025 paper.

    Args:
      starts: Start values to choose from, from `start_factors`.
      z: Coordinates of the pseudo input, from `row_space`.
      targets: H, one map per filter.
      head_dim: Number of columns d over which the norm is spread.
      qk_scale: σ.
      norm: Root mean square norm of the d columns of Q (and of K), which limits how sharp the maps
        are. Only the starting point if `target_mass` is given.
      target_mass: Attention mass wanted on target, to which each filter's norm is fitted.
      optimizer: 'lbfgs' or the name of another optax optimizer.
      learning_rate: Learning rate of an optimizer other than L-BFGS.
      max_steps: Maximum number of steps of each solve.
    """
    num_filters, num_tokens = targets.shape[:2]
    rows = np.linspace(0, num_tokens - 1, min(num_tokens, MAX_ROWS)).round().astype(int)
    queries, targets = z[rows], targets[:, rows]
    transform = make_optimizer(optimizer, learning_rate)

    def at_norm(factor, norm):
        length = jnp.sqrt(jnp.sum(factor**2, axis=(1, 2), keepdims=True))
        return factor * ((norm * head_dim**0.5)[:, None, None] / length)

    def maps(factors, norm):
        query, key = (at_norm(factor, norm) for factor in factors)
        return attention_maps(queries, z, query, key, qk_scale)

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
        return minimize(loss, factors, transform, optimizer == "lbfgs", max_steps)

    def fit_norm(factors):
        return find_norm(lambda norm: overlap(targets, maps(factors, norm)), norm, target_mass)

    norm = jnp.full(num_filters, norm, jnp.float32)
    factors, steps = solve(best_start(norm), norm)
    if target_mass is not None:
        for _ in range(MASS_ROUNDS):
            factors, more = solve(factors, fit_norm(factors))
            steps += more
        norm = fit_norm(factors)
    report = report_on_maps(targets, maps(factors, norm), steps=steps, norm=norm.mean())
    return Bank(at_norm(factors[0], norm), at_norm(factors[1], norm), report)


def minimize(
    loss: Callable[[Any], Float[Array, ""]],
    factors: Any,
    transform: optax.GradientTransformationExtraArgs,
    line_search: bool,
    max_steps: int,
) -> tuple[Any, Int[Array, ""]]:
    """Minimizes a function of a tree of arrays until it has converged.

    Args:
      loss: The function.
      factors: Start values.
      transform: Optimizer.
      line_search: Whether it is L-BFGS, which needs the loss to search along a line.
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

    The grid search comes first because the mass is not monotonic: beyond some norm, a sharper map
    covers less of a soft target.

    Args:
      mass_at: Attention mass of each filter at the norms that it is given.
      norm: An array of the result's shape and type.
      target_mass: Attention mass wanted on target.
    """
    grid = jnp.geomspace(*NORM_RANGE, NORM_GRID, dtype=norm.dtype)
    masses = jax.lax.map(lambda value: mass_at(jnp.full_like(norm, value)), grid)
    enough = masses >= target_mass
    reached = enough.any(axis=0)
    index = jnp.where(reached, enough.argmax(axis=0), masses.argmax(axis=0))
    low, high = grid[jnp.maximum(index - 1, 0)], grid[index]

    def bisect(_, bounds):
        low, high = bounds
        middle = jnp.sqrt(low * high)
        enough = mass_at(middle) >= target_mass
        return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

    fitted = jax.lax.fori_loop(0, NORM_BISECTIONS, bisect, (low, high))[1]
    return jnp.where(reached, fitted, high)
