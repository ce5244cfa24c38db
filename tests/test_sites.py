import inspect

import jax
import numpy as np
import pytest

import structinit_jax as si
from structinit_jax.attention_init.sites import check_weights, draw_stacks
from structinit_jax.errors import InputError


@pytest.mark.parametrize("head_dim", [0, -4, 4.0, 6])
def test_head_dimensions_that_rotary_angles_cannot_have_are_refused(head_dim):
    with pytest.raises(InputError, match=rf"^head_dim={head_dim} "):
        inspect.unwrap(si.rotary_angles)((4, 4), head_dim)


def test_sites_of_the_users_own_take_weights_of_their_own():
    check_weights((1.0,), object())
    with pytest.raises(InputError, match=r"^weights\.position_scale"):
        check_weights(si.AttentionWeights(position_scale=2.0), object())
    relative = type("RelativeSite", (si.AttentionSite,), {})((2, 3), 8, 2, 4, 1, 0.5)
    check_weights(si.AttentionWeights(bias=np.zeros((1, 15, 2))), relative)


@pytest.mark.parametrize("scheme", [si.impulse, "impulse"])
def test_a_scheme_is_a_function_of_rng_and_site(scheme):
    with pytest.raises(InputError, match=r"^attention_init="):
        inspect.unwrap(draw_stacks)(scheme, [], jax.random.key(0))  # as initialize and models do
    with pytest.raises(InputError, match=r"^rng=0 must be a random key"):
        inspect.unwrap(draw_stacks)(si.impulse(), [], 0)
