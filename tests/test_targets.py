import jax
import numpy as np
import pytest
from scipy.ndimage import correlate

from structinit_jax.attention_init.targets import assign, target_maps


@pytest.mark.parametrize("dilation", [1, 2, 4])
@pytest.mark.parametrize("grid", [(5, 5), (4, 7)])
def test_maps_filter_images_as_scipy_does(grid, dilation):
    rng = np.random.default_rng(0)
    kernels = rng.uniform(size=(3, 3, 3)).astype(np.float32)
    image = rng.normal(size=grid)
    maps = target_maps(grid, filters=kernels, dilation=dilation)
    for kernel, target in zip(kernels, maps, strict=True):
        wide = np.zeros((2 * dilation + 1, 2 * dilation + 1))
        wide[::dilation, ::dilation] = kernel
        total = correlate(np.ones(grid), wide, mode="constant")
        expected = correlate(image, wide, mode="constant") / total
        np.testing.assert_allclose((target @ image.ravel()).reshape(grid), expected, atol=1e-6)


@pytest.mark.parametrize("grid", [(1, 7), (7, 1)])
def test_impulses_on_a_row_of_tokens_are_those_along_it(grid):
    maps = target_maps(grid)
    np.testing.assert_array_equal(maps, [np.eye(7, k=offset) for offset in (-1, 0, 1)])


def test_heads_use_all_filters_evenly():
    filter_index = assign(jax.random.key(0), (4, 9), 9)
    assert np.all(np.sort(filter_index, axis=1) == np.arange(9))
    filter_index = assign(jax.random.key(1), (12, 3), 9)
    assert np.all(np.bincount(np.ravel(filter_index), minlength=9) == 4)
