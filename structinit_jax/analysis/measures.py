"""Measures of attention maps and of representations, as pure functions of arrays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from structinit_jax.attention_init.solve import find_hits, overlap
from structinit_jax.attention_init.targets import relative_index
from structinit_jax.errors import require

# -- attention maps --------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="grid")
def measure_mean_maps(
    maps: Float[Array | np.ndarray, "*heads N N"], grid: tuple[int, int]
) -> dict[str, Float[Array, "*heads"]]:
    """Measures attention maps, averaged over images, of the N tokens of a grid (rows, columns).

    Returns averages over tokens:

    - 'distance': distance in tokens between a token and the tokens it attends to, as in Raghu et
      al. 2021 (arXiv:2108.08810).
    - 'neighborhood_mass': attention on the 3×3 neighborhood, including the token itself. Tokens at
      the border have fewer neighbors.
    - 'neighbor_mass': attention at the offset that gets the most (possibly on the token itself),
      averaged over the tokens with a neighbor there. Offsets reach up to half the grid, so at least
      a quarter of the tokens have a neighbor at each. About 1 / N for a uniform map.
    """
    num_tokens = grid[0] * grid[1]
    y, x = np.divmod(np.arange(num_tokens), grid[1])
    distances = np.hypot(y[:, None] - y, x[:, None] - x).astype(np.float32)
    near = (distances < 1.5).astype(np.float32)  # up to the diagonal neighbors
    return {
        "distance": jnp.einsum("...nm,nm->...", maps, distances) / num_tokens,
        "neighborhood_mass": jnp.einsum("...nm,nm->...", maps, near) / num_tokens,
        "neighbor_mass": _near_kernels(maps, grid).max(axis=(-2, -1)),
    }


def strongest_offsets(
    maps: Float[Array | np.ndarray, "*heads N N"], grid: tuple[int, int]
) -> Int[np.ndarray, "*heads 2"]:
    """Returns the offset (rows down, columns right) of the 'neighbor_mass' of `measure_mean_maps`.

    >>> strongest_offsets(np.eye(16), grid=(4, 4))
    array([0, 0])
    """
    kernels = np.asarray(_near_kernels(maps, grid))
    *lead, rows, columns = kernels.shape
    place = kernels.reshape(*lead, rows * columns).argmax(axis=-1)
    return np.stack([place // columns - rows // 2, place % columns - columns // 2], axis=-1)


def mean_entropy(maps: Float[Array, "B *heads N N"]) -> Float[Array, "*heads"]:
    """Returns the entropy of a token's attention in nats, averaged over images and tokens.

    The maximum is ln N, for a uniform map.
    """
    return -jnp.sum(jax.scipy.special.xlogy(maps, maps), axis=-1).mean(axis=(0, -1))


def measure_against_targets(
    maps: Float[Array, "B *heads N N"], targets: Float[Array, "*heads N N"]
) -> dict[str, Float[Array, "*heads"]]:
    """Measures how close maps are to each head's target, averaged over images.

    As in `SolveReport`, but for each head: 'target_mass' is the overlap of map and target, and
    'hit_rate' the fraction of rows whose strongest attention is where the target is strongest. Both
    cover only rows that have a target (an impulse has none where its neighbor is off the grid).
    """
    targets = jnp.broadcast_to(targets[None], maps.shape)
    hits, has_target = find_hits(targets, maps)
    rows = jnp.maximum(has_target[0].sum(axis=-1, dtype=jnp.float32), 1)
    return {
        "target_mass": overlap(targets, maps).mean(axis=0),
        "hit_rate": hits.sum(axis=-1, dtype=jnp.float32).mean(axis=0) / rows,
    }


def attention_by_offset(
    maps: Float[Array | np.ndarray, "*batch N N"], grid: tuple[int, int]
) -> Float[Array, "*batch R C"]:
    """Averages attention over tokens at every offset, which gives a convolution kernel.

    Each offset is averaged over the tokens of the grid (rows, columns) with a neighbor there. The
    result is [*batch, 2 rows - 1, 2 columns - 1]; the center is a token's attention to itself.
    """
    num_tokens = grid[0] * grid[1]
    needs = f"of shape [..., {num_tokens}, {num_tokens}]: leave out class and register tokens"
    require("maps", maps, needs, maps.shape[-2:] == (num_tokens, num_tokens))
    shape = (2 * grid[0] - 1, 2 * grid[1] - 1)
    place = relative_index(grid).T.ravel()  # from query to key
    count = np.bincount(place, minlength=shape[0] * shape[1])
    flat = maps.reshape(-1, place.size)
    total = jnp.zeros((len(flat), count.size)).at[:, place].add(flat)
    kernels = total / jnp.asarray(count, jnp.float32)[None]
    return kernels.reshape(*maps.shape[:-2], *shape)


def _near_kernels(maps, grid):
    """Returns the part of `attention_by_offset` with offsets up to half the grid."""
    rows, columns = (slice(side - 1 - side // 2, side + side // 2) for side in grid)
    return attention_by_offset(maps, grid)[..., rows, columns]


# -- representations -------------------------------------------------------------------------------


def stable_rank(x: Float[np.ndarray, "*batch N D"]) -> Float[np.ndarray, "*batch"]:
    """Returns ‖X‖² (Frobenius) / ‖X‖² (spectral) of each matrix, without centering.

    This is the rank of remark 1 in the 2024 paper: the sum of the squared singular values over the
    largest. It is between 1 and the rank. It uses NumPy because jaxlib's batched decompositions can
    deadlock on CPUs with two cores.
    """
    x = np.asarray(x, np.float64)
    transposed = x.swapaxes(-2, -1)
    wide = x.shape[-2] <= x.shape[-1]
    squares = np.linalg.eigvalsh(x @ transposed if wide else transposed @ x)
    return np.asarray(squares.sum(axis=-1) / squares[..., -1])
