"""Solves for query and key factors whose softmax maps come closest to given targets.

With X = Z Vᵀ (Z [N, r], V [D, r] orthonormal), the map softmax(σ X Q Kᵀ Xᵀ) depends only on VᵀQ and
VᵀK. A sin-cos encoding has rank r of about 20 at any width, so factors [r, k], k = min(d, r), are
solved for instead of [D, d], once for each distinct filter.

The parts of a solve (`minimize`, `find_norm`), the comparison of maps with targets, and value and
projection, which need no solve, serve all kinds of attention.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from structinit_jax.attention_init.kernels import draw_flat, permutations
from structinit_jax.attention_init.sites import AttentionSite, SolveReport, is_concrete
from structinit_jax.errors import Check, InputError

TARGET_MASS = 0.5  # default of windows and rotary positions
MIN_HIT_RATE = 0.75  # below it, targets count as out of reach
# Directions weaker than this, relative to the strongest, cannot move a map at a reasonable norm.
RANK_TOLERANCE = 1e-4
# Starts of the solve, as regularizations of a pseudo-inverse relative to the strongest direction.
# The one with the lowest loss at START_HEADROOM times the norm leads to better solutions.
START_REGULARIZATIONS, START_HEADROOM = np.geomspace(3e-5, 3e-2, 7), 2.0
# Rows of the maps in the loss. All rows of a filter pose the same problem at different places, so
# on a larger grid an evenly spaced subset determines the solution.
MAX_ROWS = 1024
# A minimization has converged when this many steps in a row lower the loss by less than this
# fraction.
PATIENCE, MIN_IMPROVEMENT = 5, 2e-3
# With a target mass, the norm is fitted to it after each of several solves. It can at most double
# each time: factors scaled far beyond the norm they were solved at peak on the wrong tokens.
MASS_ROUNDS, NORM_CHANGE, NORM_GRID, NORM_BISECTIONS = 3, (1 / 16, 2.0), 16, 8


# -- the solve -------------------------------------------------------------------------------------


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
    # A uniform target may project to zero, which cannot be normalized.
    nothing = (product == 0).all(axis=(2, 3), keepdims=True)
    product = xp.where(nothing, xp.eye(z.shape[1], dtype=z.dtype)[None, None], product)
    return split_product(product, min(head_dim, z.shape[1]))


@functools.partial(jax.jit, static_argnames=("head_dim", "qk_scale", "max_steps"))
def solve_bank(
    starts: tuple[Float[Array, "S F r k"], Float[Array, "S F r k"]],
    z: Float[Array, "N r"],
    targets: Float[Array, "F n N"],
    *,
    head_dim: int,
    qk_scale: float,
    norm: float | Array = 3**-0.5,
    target_mass: float | Array | None = None,
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
      max_steps: Maximum number of steps of each solve.
    """
    # For constants of a traced caller, XLA would evaluate everything that depends on the targets
    # alone, such as their row maxima, at compile time, which is far slower.
    starts, z, targets = jax.lax.optimization_barrier((starts, z, targets))
    num_filters, _, num_tokens = targets.shape
    queries = z[loss_rows(num_tokens)]

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
        return minimize(loss, factors, max_steps=max_steps)

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


def minimize(
    loss: Callable[[Any], Float[Array, ""]], factors: Any, *, max_steps: int
) -> tuple[Any, Int[Array, ""]]:
    """Minimizes a function of a tree of arrays by L-BFGS until it has converged.

    Args:
      loss: The function.
      factors: Start values.
      max_steps: Maximum number of steps.

    Returns:
      The factors at the end and the number of steps.
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
    """Returns which rows are strongest where their target is, and which have a target at all."""
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
        warnings.warn(message, stacklevel=4)


# -- value and projection --------------------------------------------------------------------------


def mimetic_vo(
    rng: PRNGKeyArray, site: AttentionSite
) -> tuple[Float[Array, "L D h d"], Float[Array, "L h d D"]]:
    """Returns V and projection with V Proj = 0.4 U - 0.4 I over all heads of a layer, U uniform.

    Heads are sorted by singular values, the strongest first.
    """
    require_narrow_heads(site)
    layers, width, heads = site.num_layers, site.width, (site.num_heads, site.head_dim)
    inner = heads[0] * heads[1]
    value, out = factors_near_identity(rng, (layers, width), inner, noise=0.4, identity=-0.4)
    out = jnp.swapaxes(out, -1, -2).reshape(layers, *heads, width)
    return value.reshape(layers, width, *heads), out


def balanced_vo(
    rng: PRNGKeyArray, site: AttentionSite
) -> tuple[Float[Array, "L D h d"], Float[Array, "L h d D"]]:
    """Returns V = c (I - U / 2) Π and Proj = -c Πᵀ (I - U' / 2), so V Proj ≈ -0.4 (I - noise).

    c² = 0.4, U and U' are uniform noise as in `mimetic`, and the permutation Π distributes the
    channels over the heads: some are left out or used twice unless h d = D.
    """
    noise_rng, channel_rng = jax.random.split(rng)
    layers, width = site.num_layers, site.width
    inner, bound = site.num_heads * site.head_dim, (3 / width) ** 0.5
    rngs = jax.random.split(channel_rng, layers)
    channels = permutations(rngs, width)
    channels = jnp.tile(channels, (1, -(-inner // width)))[:, :inner]
    identity = jax.nn.one_hot(channels, width)  # [L, inner, D], the rows of Πᵀ
    # 16 random bits are plenty for noise, and half the cost of 32.
    draw = functools.partial(jax.random.bits, dtype="uint16")
    bits = draw_flat(draw, noise_rng, (2, *identity.shape))
    half_noise = bound * ((bits.astype(jnp.float32) + 0.5) / 2**16 - 0.5)
    value, out = 0.4**0.5 * (identity[None] - half_noise)
    heads = (layers, site.num_heads, site.head_dim, width)
    return jnp.moveaxis(value.reshape(heads), -1, 1), -out.reshape(heads)


def remove_inputs(
    kernel: Float[Array, "L D h d"], v: Float[Array | np.ndarray, "D r"]
) -> Float[Array, "L D h d"]:
    """Removes the part of a kernel that acts on inputs in the span of the orthonormal V."""
    return kernel - jnp.einsum("Dr,Lrhd->LDhd", v, jnp.einsum("Er,LEhd->Lrhd", v, kernel))


def remove_outputs(
    kernel: Float[Array, "L h d D"], v: Float[Array | np.ndarray, "D r"]
) -> Float[Array, "L h d D"]:
    """Removes the outputs of a kernel in the span of the orthonormal V."""
    return kernel - jnp.einsum("Dr,Lhdr->LhdD", v, jnp.einsum("LhdE,Er->Lhdr", kernel, v))


def factors_near_identity(
    rng: PRNGKeyArray, shape: tuple[int, ...], rank: int, *, noise: float, identity: float
) -> tuple[Float[Array, "*batch D k"], Float[Array, "*batch D k"]]:
    """Returns A, B [*shape, rank] with A Bᵀ closest to `near_identity` of the same arguments."""
    return split_product(near_identity(rng, shape, noise=noise, identity=identity), rank)


def near_identity(
    rng: PRNGKeyArray, shape: tuple[int, ...], *, noise: float, identity: float
) -> Float[Array, "*batch D D"]:
    """Draws noise · U + identity · I, [*shape, D] with D = shape[-1].

    U is uniform between ±(3 / D)^1/2, so that its entries have variance 1 / D.
    """
    width = shape[-1]
    bound = (3 / width) ** 0.5
    draw = functools.partial(jax.random.uniform, minval=-bound, maxval=bound)
    uniform = draw_flat(draw, rng, (*shape, width))
    eye = jnp.broadcast_to(jnp.eye(width), uniform.shape)
    return noise * uniform + identity * eye


def require_narrow_heads(site: AttentionSite) -> None:
    """Raises `InputError` if the heads have more channels than the model."""
    inner = site.num_heads * site.head_dim
    if inner > site.width:
        raise InputError(
            f"num_heads={site.num_heads} × head_dim={site.head_dim} = {inner} channels are more "
            f"than width={site.width}, which mimetic weights do not allow: use 'default', or "
            "vo_init='balanced' of 'impulse'"
        )


OpenFraction = Annotated[int | float, Check("a number between 0 and 1", lambda x: 0 < x < 1)]
VoInit = Literal["balanced", "mimetic", "default"]
VO_INITS: dict[str, Callable] = {
    "balanced": balanced_vo,
    "mimetic": mimetic_vo,
    "default": lambda rng, site: (None, None),
}
