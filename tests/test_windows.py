import dataclasses

import jax
import numpy as np
import pytest

from structinit_jax.attention_init import WindowSite, impulse
from structinit_jax.attention_init.targets import filter_maps, target_maps
from structinit_jax.errors import InputError

WINDOW = (4, 5)
SITE = WindowSite(WINDOW, 24, 3, 8, num_layers=6, qk_scale=8**-0.5, base_init="pytorch")
RNG = jax.random.key(0)


def maps_of(weights, window=WINDOW):
    """Softmax of the bias, gathered by loops rather than by the index under test."""
    rows, cols = window
    n = rows * cols
    table = np.asarray(weights.bias).reshape(-1, 2 * rows - 1, 2 * cols - 1, weights.bias.shape[-1])
    logits = np.zeros((len(table), table.shape[-1], n, n))
    for i, j in np.ndindex(n, n):
        dy, dx = i // cols - j // cols, i % cols - j % cols
        logits[:, :, i, j] = table[:, dy + rows - 1, dx + cols - 1]
    exponential = np.exp(logits)
    return exponential / exponential.sum(-1, keepdims=True)


@pytest.mark.parametrize("mass", [0.3, 0.9])
def test_impulse_rows_have_exactly_the_mass_and_others_are_uniform(mass):
    weights = impulse(target_mass=mass)(RNG, SITE)
    maps = maps_of(weights)
    targets = target_maps(WINDOW)[weights.filter_index]
    has_target = targets.any(-1)
    np.testing.assert_allclose((maps * targets).sum(-1)[has_target], mass, rtol=1e-5)
    np.testing.assert_allclose(maps[~has_target], 1 / 20, rtol=1e-5)
    assert set(np.unique(weights.filter_index)) == set(range(9))
    np.testing.assert_allclose(weights.bias.max(), np.log(19 * mass / (1 - mass)), rtol=1e-5)
    np.testing.assert_allclose(np.std(weights.query), 0.02, rtol=0.1)  # still timm's


def test_given_kernels_are_mixed_with_a_uniform_floor():
    window, mass = (9, 9), 0.8
    kernels = np.float32([[[0, 1, 3], [0, 0, 0], [0, 0, 0]]])
    scheme = impulse(filters=kernels, target_mass=mass)
    weights = scheme(RNG, dataclasses.replace(SITE, grid=window))
    targets = target_maps(window, filters=kernels)[weights.filter_index]
    target, row = targets[:, :, 40], maps_of(weights, window)[:, :, 40]  # of the center token
    np.testing.assert_allclose(np.minimum(row, target).sum(-1), mass, rtol=1e-4)
    floor = row.min(axis=-1, keepdims=True)
    # Above the floor the row is the kernel.
    shape = (row - floor) / (row - floor).sum(-1, keepdims=True)
    np.testing.assert_allclose(shape, target, atol=1e-5)


def test_windows_in_which_uniform_attention_has_the_target_mass_have_no_bias():
    three = dataclasses.replace(SITE, grid=(1, 3))
    assert not np.any(impulse()(RNG, three).bias)  # uniform attention already gives 1 / 3
    row = impulse(target_mass=0.5)(RNG, three)
    assert set(np.unique(row.filter_index)) == {0, 1, 2}
    assert row.bias.shape == (6, 5, 3)
    assert not np.any(impulse()(RNG, dataclasses.replace(SITE, grid=(1, 1))).bias)


@pytest.mark.parametrize("options", [dict(kernel_size=5), dict(kernel_size=7, dilation=2)])
def test_kernels_that_lead_off_the_window_go_to_no_head(options):
    small = dataclasses.replace(SITE, grid=(2, 2))
    weights = impulse(target_mass=0.9, **options)(RNG, small)
    maps = maps_of(weights, (2, 2))
    targets = filter_maps(weights.filters, (2, 2))[weights.filter_index]
    assert targets.any(axis=(2, 3)).all()
    np.testing.assert_allclose((maps * targets).sum(-1)[targets.any(-1)], 0.9, rtol=1e-5)
    with pytest.raises(InputError, match="filters"):
        impulse(filters=np.eye(25)[:1].reshape(1, 5, 5))(RNG, small)
