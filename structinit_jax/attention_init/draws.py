"""Random draws that schemes share, and the base initialization of attention layers."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from structinit_jax.attention_init.sites import AttentionStack, AttentionWeights


def draw_flat(
    draw: Callable[[PRNGKeyArray, tuple[int]], Array], rng: PRNGKeyArray, shape: tuple[int, ...]
) -> Array:
    """Returns the same values as `draw(rng, shape)`, but draws along a single axis.

    On CPUs, XLA unrolls loops over short axes together with the many rounds of the random
    generator, and takes up to 20 times as long to compile a draw over several axes.
    """
    return draw(rng, (math.prod(shape),)).reshape(shape)


def split_by_stack(rng: PRNGKeyArray, count: int) -> Sequence[PRNGKeyArray] | Array:
    """Returns the key of each stack of a model; a single stack gets `rng` itself.

    Our models and `interop` share it, so that both draw the same weights.
    """
    return [rng] if count == 1 else jax.random.split(rng, count)


def permutations(rngs: Array, size: int) -> Int[Array, "n size"]:
    """Returns a permutation of 0 … size - 1 for each key (not by vmap, which compiles slower)."""
    return jax.lax.map(lambda rng: jax.random.permutation(rng, size), rngs)


def trunc_normal(
    rng: PRNGKeyArray, shape: tuple[int, ...], dtype: DTypeLike = float, *, std: float
) -> Array:
    """Draws as timm's `trunc_normal_(std=std)`, which cuts at ±2, not at ±2 standard deviations."""
    return std * jax.random.truncated_normal(rng, -2 / std, 2 / std, shape, dtype)


def map_matrices(function: Callable[[Array], Any], matrices: Float[Array, "*batch m n"]) -> Any:
    """Applies a function, such as a decomposition, to each matrix of a batch, one after another.

    On CPUs, batches that several programs or devices decompose at the same time wait for each
    other's threads, without end or for long.
    """
    found = jax.lax.map(function, matrices.reshape(-1, *matrices.shape[-2:]))
    return jax.tree.map(lambda x: x.reshape(*matrices.shape[:-2], *x.shape[1:]), found)


def random_rotations(rng: PRNGKeyArray, shape: tuple[int, ...]) -> Float[Array, "*batch m n"]:
    """Draws matrices with orthonormal columns (m ≥ n), by which heads with equal maps differ."""
    return map_matrices(lambda x: jnp.linalg.qr(x)[0], draw_flat(jax.random.normal, rng, shape))


# -- the base initialization -----------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="sizes")
def base_weights(rng: PRNGKeyArray, sizes: AttentionStack) -> AttentionWeights:
    """Draws as timm, truncated normal of std 0.02, or as PyTorch, uniform ±(fan-in)^-1/2."""
    heads = (sizes.num_heads, sizes.head_dim)
    if sizes.base_init == "pytorch":
        draw = functools.partial(jax.random.uniform, minval=-1.0, maxval=1.0)
    else:
        draw = functools.partial(trunc_normal, std=0.02)
    rngs = jax.random.split(rng, 4)
    shape = (sizes.num_layers, sizes.width, *heads)
    inputs = [draw_flat(draw, each, shape) for each in rngs[:3]]
    out = draw_flat(draw, rngs[3], (sizes.num_layers, *heads, sizes.width))
    if sizes.base_init == "pytorch":
        inputs = [sizes.width**-0.5 * kernel for kernel in inputs]
        out = math.prod(heads) ** -0.5 * out
    return AttentionWeights(*inputs, out)


def baseline(
    rng: PRNGKeyArray,
    site: AttentionStack,
    *,
    draw: Callable[[PRNGKeyArray, AttentionStack], AttentionWeights],
    query_key_scale: float,
    value_scale: float,
) -> AttentionWeights:
    """Multiplies Q and K, and V and projection, of the drawn weights by factors."""
    weights = draw(rng, site.sizes)
    return AttentionWeights(
        query_key_scale * weights.query,
        query_key_scale * weights.key,
        value_scale * weights.value,
        value_scale * weights.out,
    )
