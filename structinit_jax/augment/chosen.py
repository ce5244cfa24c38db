"""Work on some images of a batch that costs little more than those images."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

CHUNKS = 16


def apply_where(
    function: Callable[..., Array],
    chosen: Bool[Array, " B"],
    images: Array,
    *arguments: Array,
) -> Array:
    """Replaces the chosen images by what a function makes of them; the others stay.

    The function runs on chunks of a sixteenth of the batch, as often as there are chosen images to
    fill them. Under `where` it would run on all images, and most operations are drawn for a few
    images only. Images of several devices have to be split by `jax.shard_map` first: which images
    are chosen is no matter between devices.

    Args:
      function: (images, *arguments) -> images, of any number of them, each by itself.
      chosen: which images.
      images: [B, ...].
      arguments: likewise.

    Returns:
      [B, ...].
    """
    B = len(images)
    size = -(-B // CHUNKS)
    # The last chunk is filled up with an index beyond the end: read anywhere, written nowhere.
    order = jnp.nonzero(chosen, size=CHUNKS * size, fill_value=B)[0]

    def work(chunk: Array, images: Array) -> Array:
        index = jax.lax.dynamic_slice_in_dim(order, chunk * size, size)
        inputs = (x.at[index].get(mode="clip") for x in (images, *arguments))
        return images.at[index].set(function(*inputs), mode="drop")

    count = jnp.sum(chosen, dtype=jnp.int32)
    return jax.lax.fori_loop(0, (count + size - 1) // size, work, images)
