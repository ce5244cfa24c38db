import dataclasses

import numpy as np
import pytest

from structinit_jax.attention_init import AttentionSite, RotarySite, WindowSite, rotary_angles
from structinit_jax.errors import InputError

ATTENTION = dict(grid=(3, 4), width=32, num_heads=4, head_dim=8, num_layers=2, qk_scale=8**-0.5)
FIELDS = {
    AttentionSite: ATTENTION,
    WindowSite: ATTENTION,
    RotarySite: ATTENTION | dict(angles=rotary_angles((3, 4), 8)),
}


@pytest.mark.parametrize(
    ("site_type", "field", "value"),
    [
        (WindowSite, "grid", (3, 0)),
        (AttentionSite, "base_init", "torch"),
        (AttentionSite, "positions", np.zeros((13, 32), np.float32)),
        (RotarySite, "angles", np.zeros((1, 1, 13, 4), np.float32)),
    ],
)
def test_sizes_that_no_layer_has_are_refused(site_type, field, value):
    fields = dataclasses.asdict(site_type(**FIELDS[site_type]))
    site = object.__new__(site_type)  # without the type checks of the tests, which come first
    vars(site).update(fields | {field: value})
    with pytest.raises(InputError, match=rf"{site_type.__name__}\.{field}"):
        site.__post_init__()
