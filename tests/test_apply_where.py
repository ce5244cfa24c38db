import jax
import jax.numpy as jnp
import numpy as np
import pytest

from structinit_jax.augment.rand_augment import CHUNKS, apply_where

apply_jit = jax.jit(apply_where, static_argnums=0)


def add(image, amount):
    return image + amount


@pytest.mark.parametrize("count", [1, 7, CHUNKS, 3 * CHUNKS + 5])
@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.6, 1.0])
def test_masked_images_change_once_and_the_others_stay(count, fraction):
    random = np.random.default_rng(0)
    images = random.integers(0, 100, (count, 3, 2)).astype(np.int32)
    amounts = random.integers(1, 100, count).astype(np.int32)
    mask = random.random(count) < fraction
    out = apply_jit(add, mask, images, amounts)
    np.testing.assert_array_equal(out, images + (mask * amounts)[:, None, None])


def test_work_is_proportional_to_the_number_of_masked_images():
    calls = []

    def watched(image):
        jax.debug.callback(lambda _: calls.append(1), image)
        return image + 1

    images = jnp.zeros((10 * CHUNKS, 2), jnp.int32)
    for number in (0, 1, 10, 11, 80):
        calls.clear()
        jax.block_until_ready(apply_jit(watched, jnp.arange(len(images)) < number, images))
        jax.effects_barrier()
        assert len(calls) == -(-number // 10) * 10
