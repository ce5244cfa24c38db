import jax
import jax.numpy as jnp
import numpy as np
import pytest

from structinit_jax.augment.chosen import CHUNKS, apply_where

apply_jit = jax.jit(apply_where, static_argnums=0)


@pytest.mark.parametrize("count", [1, 7, CHUNKS, 3 * CHUNKS + 5])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.6, 1.0])
def test_the_chosen_are_changed_once_and_the_others_not_at_all(count, share):
    random = np.random.default_rng(0)
    images = random.integers(0, 100, (count, 3, 2)).astype(np.int32)
    amounts = random.integers(1, 100, count).astype(np.int32)
    chosen = random.random(count) < share
    out = apply_jit(lambda x, amount: x + amount[:, None, None], chosen, images, amounts)
    np.testing.assert_array_equal(out, images + (chosen * amounts)[:, None, None])


def test_work_is_in_proportion_to_the_chosen():
    """Counted on the host: how many images the function gets."""
    seen = []

    def watched(images):
        jax.debug.callback(lambda x: seen.append(len(x)), images)
        return images + 1

    images = jnp.zeros((10 * CHUNKS, 2), jnp.int32)
    for number in (0, 1, 10, 11, 80):
        seen.clear()
        jax.block_until_ready(apply_where(watched, jnp.arange(len(images)) < number, images))
        jax.effects_barrier()
        assert sum(seen) == -(-number // 10) * 10
