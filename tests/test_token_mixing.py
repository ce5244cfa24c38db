import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references

from structinit_jax import attention_init
from structinit_jax.attention_init import ConvSite, TokenMixingSite
from structinit_jax.attention_init.targets import target_maps
from structinit_jax.errors import InputError
from structinit_jax.models import layers

RNG = jax.random.key(7)
GRID, TOKENS = (4, 6), 24


def make_site(hidden=48):
    return TokenMixingSite(grid=GRID, hidden=hidden, num_layers=2)


@jax.jit
def spatial_maps(weights):
    """Jacobian of each layer's MLP with respect to its N inputs, at a random input."""
    u = jax.random.normal(jax.random.key(3), (TOKENS,))

    def jacobian(fc1, fc2):
        return jax.jacobian(lambda u: jax.nn.gelu(u @ fc1, approximate=False) @ fc2)(u)

    return jax.vmap(jacobian)(weights.fc1, weights.fc2)


@pytest.mark.parametrize("hidden", [48, 73, 8, 9])
def test_the_map_is_the_filter_or_its_closest_map_of_the_possible_rank(hidden):
    kernel = np.eye(9)[1].reshape(1, 3, 3)
    weights = attention_init.impulse(filters=kernel)(RNG, make_site(hidden))
    (target,) = target_maps(GRID, filters=kernel)
    pairs = hidden // 2
    for found in np.asarray(spatial_maps(weights)):
        if pairs >= TOKENS:
            np.testing.assert_allclose(found, target, atol=1e-5)
            continue
        # No map of this rank is closer in mean square over tokens with this covariance.
        y, x = np.divmod(np.arange(TOKENS), 6)
        covariance = 0.9 ** (np.abs(y[:, None] - y) + np.abs(x[:, None] - x))
        root = np.linalg.cholesky(covariance)
        singular = np.linalg.svd(target @ root, compute_uv=False)
        error = np.linalg.norm((target - found) @ root) ** 2
        assert np.linalg.matrix_rank(found, tol=1e-4) == pairs
        assert error == pytest.approx((singular[pairs:] ** 2).sum(), rel=1e-3)
        assert error < 0.4 * (singular**2).sum()


def test_layers_have_filters_and_weights_of_their_own():
    maps = np.asarray(spatial_maps(attention_init.impulse()(RNG, make_site())))
    targets = target_maps(GRID)
    found = [np.abs(targets - layer).max(axis=(1, 2)).argmin() for layer in maps]
    np.testing.assert_allclose(maps, targets[found], atol=1e-5)
    assert found[0] != found[1]
    weights = attention_init.impulse(filters=np.ones((1, 3, 3)))(RNG, make_site())
    first, second = np.asarray(weights.fc1)
    assert np.abs(first - second).max() > 0.1


def test_both_units_of_a_pair_learn_and_not_the_same():
    fc1, fc2 = (w[0] for w in attention_init.impulse()(RNG, make_site())[:2])
    u = jax.random.normal(jax.random.key(3), (5, TOKENS))
    gradient = jax.jit(jax.grad(lambda fc1: jnp.square(layers.gelu(u @ fc1) @ fc2).sum()))(fc1)
    halves = np.split(np.asarray(gradient), 2, axis=-1)
    assert min(np.abs(half).max() for half in halves) > 0.1
    assert np.abs(halves[0] - halves[1]).max() > 0.1


def test_mimetic_maps_are_near_the_identity():
    noise = np.asarray(spatial_maps(attention_init.mimetic()(RNG, make_site())))
    noise = noise - 0.7 * np.eye(TOKENS)
    assert np.std(noise) == pytest.approx(0.7 * TOKENS**-0.5, rel=0.1)
    assert np.abs(noise).max() <= 0.7 * (3 / TOKENS) ** 0.5 + 1e-5
    assert attention_init.mimetic()(RNG, make_site(hidden=8)).fc1.shape == (2, TOKENS, 8)


# Recorded by references/make_convmixer_filters.py from the 2024 paper's program.
PROGRAM = json.loads((references.HERE / "convmixer_filters.json").read_text())


def kernels(scheme, kernel_size=3, width=36, num_layers=2, seed=0):
    site = ConvSite(kernel_size=kernel_size, width=width, num_layers=num_layers)
    return np.asarray(scheme(jax.random.key(seed), site).kernel)


def test_impulses_stand_at_every_place_equally_often():
    values = kernels(attention_init.impulse(), kernel_size=3, width=36)
    assert set(np.unique(values)) == {0, 1}
    np.testing.assert_array_equal(values.sum(axis=(1, 2)), 1)
    np.testing.assert_array_equal(values.sum(axis=3), 4)


@pytest.mark.parametrize("case", PROGRAM)
def test_filters_of_2024_have_the_moments_of_the_program(case):
    name, size = case.split()
    scheme = attention_init.default()
    if name != "random":
        scheme = attention_init.impulse_2024(taps=1 if name == "impulse" else int(name[3:]))
    filters = kernels(scheme, int(size), width=1000, num_layers=20)
    filters = np.moveaxis(filters, -1, 1).reshape(20_000, int(size) ** 2)
    squares, expected = filters**2, {k: np.asarray(v) for k, v in PROGRAM[case].items()}
    errors = 5 * (2 / len(filters)) ** 0.5  # five standard errors of the difference of two samples
    tolerance = errors * expected["square"] ** 0.5
    assert np.all(np.abs(filters.mean(axis=0) - expected["weight"]) <= tolerance)
    tolerance = tolerance * np.abs(filters).max() + 1e-6
    assert np.all(np.abs(squares.mean(axis=0) - expected["square"]) <= tolerance)
    np.testing.assert_allclose((squares.sum(axis=1) ** 2).mean(), expected["norm4"], rtol=0.02)


def test_given_kernels_are_those_of_the_channels_and_others_refused():
    given = np.arange(18, dtype=np.float32).reshape(2, 3, 3)
    values = kernels(attention_init.impulse(filters=given), width=4)
    for channel in np.moveaxis(values[0], -1, 0):
        assert any(np.array_equal(channel, kernel) for kernel in given)
    with pytest.raises(InputError, match=r"^filters=array of shape \(2, 3, 3\) must be .*5, 5"):
        kernels(attention_init.impulse(filters=given), kernel_size=5)
    with pytest.raises(InputError, match=r"^taps"):
        kernels(attention_init.impulse_2024(taps=10))
