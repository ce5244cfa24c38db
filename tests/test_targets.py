import jax
import numpy as np
import pytest
from scipy.ndimage import correlate

from structinit_jax.attention_init import targets as targets_lib


@pytest.mark.parametrize("grid", [(5, 5), (4, 7)])
@pytest.mark.parametrize("size", [1, 3])
def test_maps_filter_images_as_scipy_does(grid, size):
    rng = np.random.default_rng(0)
    kernels = rng.normal(size=(3, size, size)).astype(np.float32)
    image = rng.normal(size=grid)
    for kernel, target in zip(kernels, targets_lib.convolution_maps(kernels, grid), strict=True):
        expected = correlate(image, kernel, mode="constant")
        np.testing.assert_allclose((target @ image.ravel()).reshape(grid), expected, atol=1e-6)


def test_dilation_moves_taps_apart():
    kernels = targets_lib.dilate(targets_lib.impulse_kernels(3), 2)
    assert kernels.shape == (9, 5, 5)
    assert np.argwhere(kernels[0]).tolist() == [[0, 0]]
    assert np.argwhere(kernels[5]).tolist() == [[2, 4]]


@pytest.mark.parametrize("grid", [(1, 7), (7, 1)])
def test_impulses_on_a_row_of_tokens_are_those_along_it(grid):
    maps = targets_lib.filter_maps(grid)
    np.testing.assert_array_equal(maps, [np.eye(7, k=offset) for offset in (-1, 0, 1)])


def test_heads_use_all_filters_evenly():
    filter_index = targets_lib.assign(jax.random.key(0), (4, 9), 9)
    assert np.all(np.sort(filter_index, axis=1) == np.arange(9))
    filter_index = targets_lib.assign(jax.random.key(1), (12, 3), 9)
    assert np.all(np.bincount(np.ravel(filter_index), minlength=9) == 4)
