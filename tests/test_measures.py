import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import entropy

from structinit_jax.analysis import measures
from structinit_jax.errors import InputError

GRID = (4, 5)
RNG = np.random.default_rng(0)


def random_maps(*shape):
    logits = RNG.normal(size=(*shape, 20, 20))
    return np.asarray(jax.nn.softmax(jnp.asarray(2 * logits, jnp.float32), axis=-1))


def test_measures_of_mean_maps_are_the_sums_over_pairs_of_tokens():
    maps = random_maps(2)
    found = measures.measure_mean_maps(jnp.asarray(maps), GRID)
    for head, weights in enumerate(maps):
        expected = {"distance": 0.0, "neighborhood_mass": 0.0}
        masses, counts = np.zeros((5, 5)), np.zeros((5, 5))  # offsets of up to half of 4 and 5
        for query, key in np.ndindex(20, 20):
            dy, dx = key // 5 - query // 5, key % 5 - query % 5
            expected["distance"] += weights[query, key] * (dy**2 + dx**2) ** 0.5 / 20
            if max(abs(dy), abs(dx)) <= 1:
                expected["neighborhood_mass"] += weights[query, key] / 20
            if max(abs(dy), abs(dx)) <= 2:
                masses[dy + 2, dx + 2] += weights[query, key]
                counts[dy + 2, dx + 2] += 1
        expected["neighbor_mass"] = (masses / counts).max()
        for name, value in expected.items():
            np.testing.assert_allclose(found[name][head], value, rtol=1e-5, err_msg=name)
        dy, dx = measures.strongest_offsets(maps, GRID)[head]
        assert (masses / counts)[dy + 2, dx + 2] == (masses / counts).max()
    with pytest.raises(InputError, match="leave out class and register tokens"):
        measures.attention_by_offset(maps, (4, 4))


def test_entropy_is_that_of_scipy():
    maps = random_maps(3, 2)
    expected = entropy(maps, axis=-1).mean(axis=(0, 2))
    np.testing.assert_allclose(measures.mean_entropy(jnp.asarray(maps)), expected, rtol=1e-5)


def test_a_soft_target_is_overlapped():
    target = jnp.asarray([[0.5, 0.5, 0.0], [0.0, 0.0, 0.0], [0.25, 0.5, 0.25]])
    maps = jnp.asarray([[0.8, 0.2, 0.0], [1.0, 0.0, 0.0], [0.4, 0.3, 0.3]])
    found = measures.measure_against_targets(jnp.stack([maps, target]), target)
    np.testing.assert_allclose(found["target_mass"], ((0.7 + 0.8) / 2 + 1) / 2, rtol=1e-6)
    np.testing.assert_allclose(found["hit_rate"], (1 / 2 + 1) / 2)  # two rows have a target
