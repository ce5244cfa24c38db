import inspect

import numpy as np
import pytest

from structinit_jax.attention_init.positions import is_sincos, sincos_positions
from structinit_jax.errors import InputError


def test_sincos_channels_of_the_big_vision_convention_are_sin_x_cos_x_sin_y_cos_y():
    encoding = sincos_positions((3, 5), 16, convention="big_vision")
    y, x = 2, 4
    frequencies = 10_000.0 ** -(np.arange(4) / 3)
    expected = [f(v * frequencies) for v in (x, y) for f in (np.sin, np.cos)]
    np.testing.assert_allclose(encoding[y * 5 + x], np.concatenate(expected), atol=1e-6)
    with pytest.raises(InputError, match="convention='mae'"):
        sincos_positions((3, 5), 16, convention="mae")


@pytest.mark.parametrize("width", [4, 18, 8.0])
def test_widths_that_sincos_cannot_encode_are_refused(width):
    with pytest.raises(InputError, match=rf"width={width} .*learned"):
        inspect.unwrap(sincos_positions)((4, 4), width)  # without the tests' type checker


@pytest.mark.parametrize("convention", ["timm", "big_vision"])
def test_a_sincos_encoding_is_recognized(convention):
    encoding = sincos_positions((3, 5), 16, convention)
    assert is_sincos(encoding, (3, 5))
    assert not is_sincos(encoding, (5, 3))
    assert not is_sincos(2 * encoding, (3, 5))
    assert not is_sincos(encoding[:, :6], (3, 5))
