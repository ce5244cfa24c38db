"""How much of the intended structure attention maps have, layer by layer."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from structinit_jax.attention_init.kernels import convolution_maps, impulse_kernels, relative_index


class Measures(NamedTuple):
    """Measures per layer and head, averaged over images and tokens.

    Attributes:
      target_mass: Attention on the head's offset, over the tokens that have that neighbor; 1 / N
        for a uniform map.
      rank: Rank of the offset among all N tokens by attention, 1 for the strongest.
      distance: Mean distance between a token and what it attends to, in tokens.
      entropy: Entropy of a token's attention in nats; ln N for a uniform map.
      filter_index: Offset that target mass and rank refer to, an index into
        `kernels.kernel_offsets`.
    """

    target_mass: Float[Array, "L h"]
    rank: Float[Array, "L h"]
    distance: Float[Array, "L h"]
    entropy: Float[Array, "L h"]
    filter_index: Int[Array, "L h"]


def measure_maps(
    maps: Float[Array, "L B h T T"],
    grid: tuple[int, int],
    *,
    kernel_size: int = 3,
    filter_index: Int[Array, "L h"] | None = None,
) -> Measures:
    """Measures attention maps.

    Args:
      maps: Attention maps. Tokens before the grid's N (class and register tokens) are dropped, and
        the rows scaled to sum 1.
      grid: Rows and columns of the tokens.
      kernel_size: Size f of the kernel whose offsets are searched.
      filter_index: Each head's offset (`AttentionWeights.filter_index`). None picks each head's
        offset of the largest mass, which also suits trained models and schemes without offsets.
    """
    num_tokens = grid[0] * grid[1]
    maps = maps[..., -num_tokens:, -num_tokens:]
    maps = maps / maps.sum(axis=-1, keepdims=True)
    targets = jnp.asarray(convolution_maps(impulse_kernels(kernel_size), grid))
    rows = targets.sum(axis=(1, 2))
    masses = jnp.einsum("LBhnm,fnm->Lhf", maps, targets) / (maps.shape[1] * rows)[None, None, :]
    if filter_index is None:
        filter_index = masses.argmax(axis=-1)
    target_mass = jnp.take_along_axis(masses, filter_index[..., None], axis=-1)[..., 0]
    target = targets[filter_index]  # [L, h, N, N]
    on_target = jnp.einsum("LBhnm,Lhnm->LBhn", maps, target)
    has_target = target.sum(axis=-1)[:, None]  # [L, 1, h, N]
    stronger = jnp.sum(maps > on_target[..., None], axis=-1, dtype=jnp.float32)
    rank = jnp.sum((1 + stronger) * has_target, axis=(1, 3)) / (maps.shape[1] * rows[filter_index])
    y, x = np.divmod(np.arange(num_tokens), grid[1])
    distances = jnp.asarray(np.hypot(y[:, None] - y, x[:, None] - x), jnp.float32)
    distance = jnp.einsum("LBhnm,nm->Lh", maps, distances) / (maps.shape[1] * num_tokens)
    entropy = -jnp.mean(jnp.sum(jax.scipy.special.xlogy(maps, maps), axis=-1), axis=(1, 3))
    return Measures(target_mass, rank, distance, entropy, filter_index)


def attention_by_offset(
    maps: Float[Array, "*batch N N"], grid: tuple[int, int]
) -> Float[Array, "*batch R C"]:
    """Averages attention over tokens at every offset: the map as a convolution kernel.

    Args:
      maps: Attention maps over the N tokens of the grid.
      grid: Rows and columns of the tokens.

    Returns:
      [*batch, 2 rows - 1, 2 cols - 1]; the center is a token's attention to itself. Each offset is
      averaged over the tokens that have that neighbor.
    """
    shape = (2 * grid[0] - 1, 2 * grid[1] - 1)
    place = relative_index(grid).T.ravel()  # from query to key
    count = np.bincount(place, minlength=shape[0] * shape[1])
    flat = maps.reshape(-1, place.size)
    total = jnp.zeros((len(flat), count.size)).at[:, place].add(flat)
    kernels = total / jnp.asarray(count, jnp.float32)[None]
    return kernels.reshape(*maps.shape[:-2], *shape)
