"""Every random stream of a run, as a function of its seed.

Devices use JAX keys, for initial weights and for augmentation and drop path at each step. Hosts use
NumPy's Philox, for the order of the examples and the boxes and interpolation of random crops:
unlike `Generator`, its raw output stays the same across versions of NumPy.
"""

import math
from collections.abc import Callable

import jax
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, PRNGKeyArray, UInt64

# Philox counters, one for each kind of draw.
ORDER = (0, 0, 0, 0)
BOX = (0, 0, 0, 1)
INTERPOLATION = (0, 0, 0, 2)


def split_seed(seed: ArrayLike) -> tuple[PRNGKeyArray, PRNGKeyArray, PRNGKeyArray]:
    """Returns the random keys for weights, attention_init and steps, from `config.seed`.

    The keys use Threefry, whatever JAX's default is: with other generators, such as 'rbg', the
    numbers that `jax.vmap` draws for an image depend on the number of images on its device.
    """
    rng = jax.random.key(seed, impl="threefry2x32")
    params_rng, attention_rng, steps_rng = jax.random.split(rng, 3)
    return params_rng, attention_rng, steps_rng


def step_rngs(seed: ArrayLike, step: ArrayLike) -> tuple[PRNGKeyArray, PRNGKeyArray]:
    """Returns the random keys for augmentation and model at a step, counted from 0."""
    _, _, steps_rng = split_seed(seed)
    augment_rng, model_rng = jax.random.split(jax.random.fold_in(steps_rng, step))
    return augment_rng, model_rng


def host_bits(
    seed: int | np.integer, index: int | np.integer, counter: tuple[int, ...], count: int
) -> UInt64[np.ndarray, " count"]:
    """Draws 64-bit numbers on the host, for an epoch or for a position in the training stream."""
    key = np.array([seed, index], np.uint64)
    counter = np.array(counter, np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(count)


def draw_flat(
    draw: Callable[[PRNGKeyArray, tuple[int], DTypeLike], Array],
    rng: PRNGKeyArray,
    shape: tuple[int, ...],
    dtype: DTypeLike = "float32",
) -> Array:
    """Returns the same values as `draw(rng, shape, dtype)`, but draws along a single axis.

    On CPUs, XLA unrolls loops over short axes together with the many rounds of the random
    generator: a draw over several axes takes up to 20 times as long to compile.
    """
    return draw(rng, (math.prod(shape),), dtype).reshape(shape)
