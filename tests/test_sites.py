import inspect

import jax
import numpy as np
import pytest
from flax import nnx

import structinit_jax as si
from structinit_jax.attention_init.sites import check_weights, draw_stacks
from structinit_jax.errors import InputError


@pytest.mark.parametrize("head_dim", [0, -4, 4.0, 6])
def test_head_dimensions_that_rotary_angles_cannot_have_are_refused(head_dim):
    with pytest.raises(InputError, match=rf"^head_dim={head_dim} "):
        inspect.unwrap(si.rotary_angles)((4, 4), head_dim)


def test_weights_that_a_site_cannot_use_are_refused():
    fixed = si.AttentionSite((2, 3), 8, 2, 4, 1, 0.5)
    for field in ("positions", "position_scale", "bias"):
        with pytest.raises(InputError, match=rf"^weights\.{field}=.*None"):
            check_weights(si.AttentionWeights(**{field: np.zeros(())}), fixed)
    window = si.WindowSite((2, 3), 8, 2, 4, 1, 0.5)
    check_weights(si.AttentionWeights(bias=np.zeros((1, 15, 2))), window)
    with pytest.raises(InputError, match="returned tuple for WindowSite"):
        check_weights((1.0,), window)


@pytest.mark.parametrize("scheme", [si.impulse, "impulse"])
def test_a_scheme_is_a_function_of_rng_and_site(scheme):
    with pytest.raises(InputError, match=r"^attention_init="):
        inspect.unwrap(draw_stacks)(scheme, [], jax.random.key(0))  # as initialize and models do
    for rng in (0, nnx.Rngs(0), np.zeros(2, np.uint32), jax.random.split(jax.random.key(0))):
        with pytest.raises(InputError, match=r"(?s)^rng=.* must be a single random key"):
            inspect.unwrap(draw_stacks)(si.impulse(), [], rng)
