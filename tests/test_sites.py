import jax.numpy as jnp
import numpy as np
import pytest

from structinit_jax.attention_init.sites import layer_norm, sincos_positions
from structinit_jax.errors import InputError


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
