import jax
import jax.numpy as jnp
import numpy as np
import pytest

from structinit_jax.analysis.measures import attention_by_offset, measure_maps
from structinit_jax.attention_init import AttentionSite, impulse, kernels, sincos_positions
from structinit_jax.attention_init.solve import layer_norm

GRID = (4, 5)


def uniform(layers=1, images=2, heads=1):
    return jnp.full((layers, images, heads, 20, 20), 1 / 20)


def impulse_maps(index):
    """The map of one impulse; rows without the neighbor attend evenly."""
    target = kernels.convolution_maps(kernels.impulse_kernels(3), GRID)[index]
    return jnp.asarray(np.where(target.sum(-1, keepdims=True), target, 1 / 20))[None, None, None]


def test_uniform_attention_has_the_documented_values():
    measures = measure_maps(uniform(), GRID)
    np.testing.assert_allclose(measures.target_mass, 1 / 20, rtol=1e-5)
    np.testing.assert_allclose(measures.entropy, np.log(20), rtol=1e-5)
    y, x = np.divmod(np.arange(20), 5)
    mean = np.hypot(y[:, None] - y, x[:, None] - x).mean()
    np.testing.assert_allclose(measures.distance, mean, rtol=1e-5)


@pytest.mark.parametrize("index", [0, 4, 5])
def test_an_impulse_is_recognized(index):
    measures = measure_maps(impulse_maps(index), GRID)
    assert measures.filter_index.tolist() == [[index]]
    np.testing.assert_allclose(measures.target_mass, 1, rtol=1e-6)
    np.testing.assert_allclose(measures.rank, 1, rtol=1e-6)
    asked = measure_maps(impulse_maps(index), GRID, filter_index=jnp.array([[8]]))
    assert float(asked.target_mass[0, 0]) < 0.1
    assert float(asked.rank[0, 0]) > 1


def test_class_tokens_are_left_out():
    maps = impulse_maps(5)
    with_token = jnp.pad(0.7 * maps, [(0, 0)] * 3 + [(1, 0), (1, 0)], constant_values=0.3)
    measures = measure_maps(with_token, GRID)
    np.testing.assert_allclose(measures.target_mass, 1, rtol=1e-6)


def test_attention_by_offset_is_the_kernel():
    kernel = attention_by_offset(impulse_maps(5)[0, 0, 0] * 1.0, GRID)
    assert kernel.shape == (7, 9)
    assert np.unravel_index(np.argmax(kernel), kernel.shape) == (3, 5)  # one right of the center
    np.testing.assert_allclose(kernel[3, 5], 1)


def test_the_filters_of_solved_heads_are_found():
    positions = sincos_positions((8, 8), 32)
    site = AttentionSite((8, 8), 32, 2, 16, 2, 0.25, positions)
    weights = impulse(target_mass=0.8, vo_init="default")(jax.random.key(0), site)
    x = layer_norm(positions)
    logits = np.einsum("nD,LDhd,LEhd,mE->Lhnm", x, weights.query, weights.key, x, optimize=True)
    maps = jax.nn.softmax(jnp.asarray(0.25 * logits, jnp.float32), axis=-1)
    measures = measure_maps(maps[:, None], site.grid)
    np.testing.assert_array_equal(measures.filter_index, weights.filter_index)
    np.testing.assert_allclose(measures.target_mass, 0.8, atol=0.02)
