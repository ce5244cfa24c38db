"""How much of the wanted structure a model's attention really has, layer by layer."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from structinit_jax.attention_init.kernels import convolution_maps, impulse_kernels


class Measures(NamedTuple):
    """Per layer and head, averaged over images and tokens.

    Attributes:
      target_mass: attention on the head's offset, over the tokens that have that neighbour; a
        uniform map has 1 / N.
      rank: place of the offset among all N tokens by attention, 1 for the strongest.
      distance: mean distance between a token and what it attends to, in tokens.
      entropy: of a token's attention, in nats; a uniform map has ln N.
      filter_index: the offset that share and rank speak of, an index of `kernels.kernel_offsets`.
    """

    target_mass: Float[Array, "L h"]
    rank: Float[Array, "L h"]
    distance: Float[Array, "L h"]
    entropy: Float[Array, "L h"]
    filter_index: Int[Array, "L h"]


def measure(
    model,
    images: Float[Array, "B H W C"],
    *,
    kernel_size: int = 3,
    filter_index: Int[Array, "L h"] | None = None,
) -> Measures:
    """Measures a model's attention maps on real images.

    Args:
      model: a callable `(images, with_maps=True) -> (logits, out)` with an attribute `grid` and
        `out['blocks']['attention_maps']` [L, B, h, T, T], such as the package's ViT.
      images: normalized as in training.
      kernel_size: f of the offsets that are looked for.
      filter_index: each head's offset (`AttentionWeights.filter_index`). None takes, for each head,
        the one with the largest share: fair to schemes that plan no offsets, and to trained models.
    """
    maps = model(images, with_maps=True)[1]["blocks"]["attention_maps"]
    return measure_maps(maps, model.grid, kernel_size=kernel_size, filter_index=filter_index)


def measure_maps(
    maps: Float[Array, "L B h T T"],
    grid: tuple[int, int],
    *,
    kernel_size: int = 3,
    filter_index: Int[Array, "L h"] | None = None,
) -> Measures:
    """Measures attention maps; tokens in front of the grid's are left out, rows scaled to sum 1."""
    num_tokens = grid[0] * grid[1]
    maps = maps[..., -num_tokens:, -num_tokens:]
    maps = maps / maps.sum(axis=-1, keepdims=True)
    targets = jnp.asarray(convolution_maps(impulse_kernels(kernel_size), grid))
    rows = targets.sum(axis=(1, 2))
    shares = jnp.einsum("LBhnm,fnm->Lhf", maps, targets) / (maps.shape[1] * rows)[None, None, :]
    if filter_index is None:
        filter_index = shares.argmax(axis=-1)
    chosen = targets[filter_index]  # [L, h, N, N]
    on_target = jnp.einsum("LBhnm,Lhnm->LBhn", maps, chosen)
    has_target = chosen.sum(axis=-1)[:, None]  # [L, 1, h, N]
    stronger = jnp.sum(maps > on_target[..., None], axis=-1, dtype=jnp.float32)
    rank = jnp.sum((1 + stronger) * has_target, axis=(1, 3)) / (maps.shape[1] * rows[filter_index])
    y, x = np.divmod(np.arange(num_tokens), grid[1])
    distances = jnp.asarray(np.hypot(y[:, None] - y, x[:, None] - x), jnp.float32)
    distance = jnp.einsum("LBhnm,nm->Lh", maps, distances) / (maps.shape[1] * num_tokens)
    entropy = -jnp.mean(jnp.sum(jax.scipy.special.xlogy(maps, maps), axis=-1), axis=(1, 3))
    target_mass = jnp.take_along_axis(shares, filter_index[..., None], axis=-1)[..., 0]
    return Measures(target_mass, rank, distance, entropy, filter_index)


def attention_by_offset(
    maps: Float[Array, "*batch N N"], grid: tuple[int, int]
) -> Float[Array, "*batch R C"]:
    """Mean attention at every offset on the grid: what the map would be as a convolution kernel.

    Returns:
      [*batch, 2 rows - 1, 2 cols - 1], the centre being a token's attention to itself. Each offset
      is averaged over the tokens that have that neighbour.
    """
    rows, cols = grid
    y, x = np.divmod(np.arange(rows * cols), cols)
    place = (y - y[:, None] + rows - 1) * (2 * cols - 1) + x - x[:, None] + cols - 1
    size = (2 * rows - 1) * (2 * cols - 1)
    count = np.bincount(place.ravel(), minlength=size)
    flat = maps.reshape(-1, place.size)
    total = jnp.zeros((len(flat), size)).at[:, place.ravel()].add(flat)
    kernels = total / jnp.asarray(count, jnp.float32)[None]
    return kernels.reshape(*maps.shape[:-2], 2 * rows - 1, 2 * cols - 1)
