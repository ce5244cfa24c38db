"""A `where` over the images of a batch that computes only the selected ones."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

CHUNKS = 16


def apply_where(
    function: Callable[..., Array], mask: Bool[Array, " B"], images: Array, *arguments: Array
) -> Array:
    """Applies a function to the images selected by a mask; leaves the others unchanged.

    The selected images are gathered into chunks of a sixteenth of the batch, and a loop runs over
    as many chunks as they fill. Split a batch that is sharded over devices by `jax.shard_map`
    first, since the number of selected images differs between devices.

    Args:
      function: Maps `(image, *arguments)` of a single example to an image of the same shape.
      mask: Which images to change.
      images: `[B, ...]`.
      *arguments: Further inputs of the function, each `[B, ...]`.
    """
    B = len(images)
    size = -(-B // CHUNKS)
    # B pads the indices to full chunks. It is out of bounds: reads clip it, writes drop it.
    selected = jnp.nonzero(mask, size=CHUNKS * size, fill_value=B)[0]

    def update_chunk(chunk, images):
        index = jax.lax.dynamic_slice_in_dim(selected, chunk * size, size)
        inputs = (x.at[index].get(mode="clip") for x in (images, *arguments))
        return images.at[index].set(jax.vmap(function)(*inputs), mode="drop")

    count = jnp.sum(mask, dtype=jnp.int32)
    return jax.lax.fori_loop(0, (count + size - 1) // size, update_chunk, images)
