import numpy as np
import pytest

from structinit_jax.attention_init.kernels import convolution_maps, impulse_kernels
from structinit_jax.errors import InputError
from structinit_jax.interop import hit_rates


def test_flat_maps_hit_without_mass_on_the_target():
    maps = np.asarray(convolution_maps(impulse_kernels(3), (3, 5)))[None]
    hits = hit_rates(maps + 1e-3, (3, 5))  # border rows without a target are uniform
    assert hits.offset.tolist() == [[y, x] for y in (-1, 0, 1) for x in (-1, 0, 1)]
    np.testing.assert_array_equal(hits.hit_rate, 1)
    np.testing.assert_allclose(hits.target_mass, 1.001, rtol=1e-6)
    flat = hit_rates(0.1 * maps + 0.05, (3, 5))
    np.testing.assert_array_equal(flat.hit_rate, 1)
    np.testing.assert_allclose(flat.target_mass, 0.15, rtol=1e-6)


def test_heads_that_attend_to_one_token_are_no_convolutions():
    for token in (0, 7):
        maps = np.zeros((2, 1, 12, 12), np.float32)
        maps[..., token] = 1
        hits = hit_rates(maps, (3, 4))
        assert hits.offset.tolist() == [[0, 0]]
        np.testing.assert_allclose(hits.hit_rate, 1 / 12)


@pytest.mark.parametrize("maps", [np.ones((1, 1, 13, 13)), np.full((1, 1, 12, 12), np.nan)])
def test_maps_that_have_no_hits_are_refused(maps):
    with pytest.raises(InputError, match=r"^maps"):
        hit_rates(maps, (3, 4))
