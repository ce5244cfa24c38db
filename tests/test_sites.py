"""Sites refuse sizes and arrays that no layer has."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from structinit_jax.attention_init import (
    AttentionSite,
    ConvSite,
    RotarySite,
    TokenMixingSite,
    WindowSite,
    rotary_angles,
)
from structinit_jax.errors import InputError

FIELDS = {
    AttentionSite: dict(
        grid=(3, 4), width=32, num_heads=4, head_dim=8, num_layers=2, qk_scale=8**-0.5
    ),
    TokenMixingSite: dict(grid=(3, 4), hidden=8, num_layers=2, width=32),
    ConvSite: dict(kernel_size=3, width=32, num_layers=2),
}
FIELDS[WindowSite] = FIELDS[AttentionSite]
FIELDS[RotarySite] = FIELDS[AttentionSite] | dict(angles=rotary_angles((3, 4), 8))


def check(site_type, **change):
    """Makes a site without the type checks of the tests, which come first otherwise."""
    fields = dataclasses.asdict(site_type(**FIELDS[site_type]))
    site = object.__new__(site_type)
    vars(site).update(fields | change)
    site.__post_init__()


@pytest.mark.parametrize(
    ("site_type", "change", "message"),
    [
        (AttentionSite, dict(grid=[3, 4]), r"AttentionSite\.grid=\[3, 4\]: needs a tuple \(rows"),
        (WindowSite, dict(grid=(3, 0)), r"WindowSite\.grid=\(3, 0\)"),
        (RotarySite, dict(grid=(12,)), r"RotarySite\.grid=\(12,\)"),
        (TokenMixingSite, dict(grid=12), r"TokenMixingSite\.grid=12"),
        (AttentionSite, dict(num_heads=0), r"AttentionSite\.num_heads=0: needs a positive whole"),
        (AttentionSite, dict(head_dim=8.0), r"AttentionSite\.head_dim=8\.0"),
        (RotarySite, dict(num_layers=0), r"RotarySite\.num_layers=0"),
        (ConvSite, dict(kernel_size=-1), r"ConvSite\.kernel_size=-1"),
        (AttentionSite, dict(qk_scale=jnp.ones(())), r"AttentionSite\.qk_scale=.*Python number"),
        (AttentionSite, dict(base_init="torch"), r"base_init='torch': choose one of timm, pytorch"),
        (AttentionSite, dict(positions=[[1.0]]), "positions is a list: pass a NumPy or JAX array"),
    ],
)
def test_sizes_that_no_layer_has_are_refused(site_type, change, message):
    with pytest.raises(InputError, match=message):
        check(site_type, **change)


def test_sizes_may_be_numbers_of_numpy():
    check(ConvSite, kernel_size=np.int64(3))
    check(AttentionSite, qk_scale=np.float32(0.5))
