import jax
import jax.numpy as jnp
import numpy as np
import pytest

from structinit_jax import attention_init
from structinit_jax.attention_init import TokenMixingSite
from structinit_jax.attention_init.targets import convolution_maps, impulse_kernels
from structinit_jax.models import layers

RNG = jax.random.key(7)
GRID, TOKENS = (4, 6), 24


def make_site(hidden=48, num_layers=2):
    return TokenMixingSite(grid=GRID, hidden=hidden, num_layers=num_layers)


@jax.jit
def spatial_maps(weights):
    """Derivative of each layer's MLP by its N inputs, at a random input."""
    u = jax.random.normal(jax.random.key(3), (TOKENS,))

    def jacobian(fc1, fc2):
        return jax.jacobian(lambda u: jax.nn.gelu(u @ fc1, approximate=False) @ fc2)(u)

    return jax.vmap(jacobian)(weights.fc1, weights.fc2)


@pytest.mark.parametrize("hidden", [48, 73, 8, 9])
def test_the_map_is_the_filter_or_its_closest_map_of_the_possible_rank(hidden):
    weights = attention_init.impulse()(RNG, make_site(hidden))
    assert weights.filter_index[0] != weights.filter_index[1]
    targets = convolution_maps(impulse_kernels(3), GRID)[weights.filter_index]
    for target, found in zip(targets, np.asarray(spatial_maps(weights)), strict=True):
        pairs = hidden // 2
        if pairs >= TOKENS:
            np.testing.assert_allclose(found, target, atol=1e-5)
            continue
        # No map of so low a rank is closer in mean square over tokens of this covariance.
        y, x = np.divmod(np.arange(TOKENS), 6)
        covariance = 0.9 ** (np.abs(y[:, None] - y) + np.abs(x[:, None] - x))
        root = np.linalg.cholesky(covariance)
        singular = np.linalg.svd(target @ root, compute_uv=False)
        error = np.linalg.norm((target - found) @ root) ** 2
        assert np.linalg.matrix_rank(found, tol=1e-4) == pairs
        assert error == pytest.approx((singular[pairs:] ** 2).sum(), rel=1e-3)
        assert error < 0.4 * (singular**2).sum()


def test_both_units_of_a_pair_learn_and_not_the_same():
    fc1, fc2 = (w[0] for w in attention_init.impulse()(RNG, make_site())[:2])
    u = jax.random.normal(jax.random.key(3), (5, TOKENS))
    gradient = jax.grad(lambda fc1: jnp.square(layers.gelu(u @ fc1) @ fc2).sum())(fc1)
    halves = np.split(np.asarray(gradient), 2, axis=-1)
    assert min(np.abs(half).max() for half in halves) > 0.1
    assert np.abs(halves[0] - halves[1]).max() > 0.1


def test_layers_of_equal_filters_are_independent():
    weights = attention_init.impulse(filters=np.ones((1, 3, 3)))(RNG, make_site())
    first, second = np.asarray(weights.fc1)
    assert np.abs(first - second).max() > 0.1


def test_mimetic_maps_are_near_the_identity():
    noise = np.asarray(spatial_maps(attention_init.mimetic()(RNG, make_site())))
    noise = noise - 0.7 * np.eye(TOKENS)
    assert np.std(noise) == pytest.approx(0.7 * TOKENS**-0.5, rel=0.1)
    assert np.abs(noise).max() <= 0.7 * (3 / TOKENS) ** 0.5 + 1e-5
    assert attention_init.mimetic()(RNG, make_site(hidden=8)).fc1.shape == (2, TOKENS, 8)
