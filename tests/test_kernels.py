import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.ndimage import correlate

from structinit_jax.attention_init import kernels as kernels_lib
from structinit_jax.attention_init.kernels import layer_norm, sincos_positions
from structinit_jax.errors import InputError


@pytest.mark.parametrize("grid", [(5, 5), (4, 7)])
@pytest.mark.parametrize("size", [1, 3])
def test_maps_filter_images_as_scipy_does(grid, size):
    rng = np.random.default_rng(0)
    kernels = rng.normal(size=(3, size, size)).astype(np.float32)
    image = rng.normal(size=grid)
    for kernel, target in zip(kernels, kernels_lib.convolution_maps(kernels, grid), strict=True):
        expected = correlate(image, kernel, mode="constant")
        np.testing.assert_allclose((target @ image.ravel()).reshape(grid), expected, atol=1e-6)


def test_dilation_moves_offsets_apart():
    kernels = kernels_lib.impulse_kernels(3, dilation=2)
    assert kernels.shape == (9, 5, 5)
    assert np.argwhere(kernels[0]).tolist() == [[0, 0]]
    assert np.argwhere(kernels[5]).tolist() == [[2, 4]]


def test_heads_use_all_filters_evenly():
    filter_index = kernels_lib.assign(jax.random.key(0), (4, 9), 9)
    assert np.all(np.sort(filter_index, axis=1) == np.arange(9))
    filter_index = kernels_lib.assign(jax.random.key(1), (12, 3), 9)
    assert np.all(np.bincount(np.ravel(filter_index), minlength=9) == 4)


def test_sincos_channels_of_the_big_vision_convention_are_sin_x_cos_x_sin_y_cos_y():
    encoding = sincos_positions((3, 5), 16, convention="big_vision")
    y, x = 2, 4
    frequencies = 10_000.0 ** -(np.arange(4) / 3)
    expected = [f(v * frequencies) for v in (x, y) for f in (np.sin, np.cos)]
    np.testing.assert_allclose(encoding[y * 5 + x], np.concatenate(expected), atol=1e-6)
    with pytest.raises(InputError, match="convention='mae'"):
        sincos_positions((3, 5), 16, convention="mae")


@pytest.mark.parametrize("width", [4, 18])
def test_widths_that_sincos_cannot_encode_are_refused(width):
    with pytest.raises(InputError, match=rf"width={width}: .*learned"):
        sincos_positions((4, 4), width)


def test_layer_norm_is_the_same_in_numpy_and_jax():
    x = np.random.default_rng(0).normal(2, 3, (6, 8)).astype(np.float32)
    ours = layer_norm(x)
    np.testing.assert_allclose(ours, layer_norm(jnp.asarray(x)), atol=1e-5)
    np.testing.assert_allclose(ours.mean(1), 0, atol=1e-7)
    np.testing.assert_allclose(ours.std(1), 1, atol=1e-5)
    assert layer_norm(jnp.asarray(x, jnp.bfloat16)).dtype == jnp.float32
