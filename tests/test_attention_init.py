import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close

import structinit_jax as si
from structinit_jax.attention_init import SCHEMES
from structinit_jax.errors import InputError

RNG = jax.random.key(0)
SITES = {
    si.AttentionSite: si.AttentionSite(
        (5, 6), 32, 4, 8, 3, 8**-0.5, si.sincos_positions((5, 6), 32)
    ),
    si.RotarySite: si.RotarySite((3, 4), 32, 4, 8, 3, 8**-0.5, angles=si.rotary_angles((3, 4), 8)),
    si.WindowSite: si.WindowSite((3, 4), 32, 4, 8, 3, 8**-0.5),
    si.TokenMixingSite: si.TokenMixingSite((3, 4), 10, 3),
    si.ConvSite: si.ConvSite(3, 16, 3),
}
ATTENTION = dict(query=(3, 32, 4, 8), key=(3, 32, 4, 8), value=(3, 32, 4, 8), out=(3, 4, 8, 32))
ATTENTION_SITES = (si.AttentionSite, si.RotarySite, si.WindowSite)
SHAPES = dict.fromkeys(ATTENTION_SITES, ATTENTION) | {
    si.TokenMixingSite: dict(fc1=(3, 12, 10), fc2=(3, 10, 12)),
    si.ConvSite: dict(kernel=(3, 3, 3, 16)),
}
EMPTY = {
    ("impulse_2024", si.AttentionSite): ("value", "out"),
    ("default", si.TokenMixingSite): ("fc1", "fc2"),
}
UNSUPPORTED = [("mimetic", si.ConvSite)] + [
    (name, site_type)
    for name in ("impulse_2024", "impulse_2025", "impulse_mimetic")
    for site_type in SITES
    if site_type is not si.AttentionSite
    and (name, site_type) not in (("impulse_2024", si.ConvSite), ("impulse_mimetic", si.RotarySite))
]
CASES = [(n, t) for n in SCHEMES for t in SITES if (n, t) not in UNSUPPORTED]
OPTIONS = {("impulse_2024", si.AttentionSite): {"max_steps": 20}}
# The pseudo-inverse amplifies rounding: a difference in the last bit of the positions changes the
# weights by 1e-4.
TOLERANCES = {"impulse_2025": 1e-3}


@pytest.mark.filterwarnings("ignore:only .* of the attention rows")
@pytest.mark.parametrize(("name", "site_type"), CASES)
def test_every_scheme_has_the_documented_shapes_and_can_be_traced(name, site_type, request):
    if name == "impulse_2024":  # optax's Adam relies on promotion
        request.getfixturevalue("library_promotion")
    scheme = SCHEMES[name](**OPTIONS.get((name, site_type), {}))
    site = SITES[site_type]
    lowered = jax.jit(lambda rng: scheme(rng, site)).lower(RNG)
    # Devices that decompose batches of matrices at the same time can deadlock.
    batched = r"(@lapack|cholesky|triangular_solve).*tensor<\d+x\d+x\d+x"
    assert not re.search(batched, lowered.as_text())
    compiled = lowered.compile()
    weights, other = (jax.device_get(compiled(rng)) for rng in (RNG, jax.random.key(1)))
    for field, shape in SHAPES[site_type].items():
        array = getattr(weights, field)
        if field in EMPTY.get((name, site_type), ()):
            assert array is None
            continue
        assert (array.shape, array.dtype) == (shape, jnp.float32)
        assert np.all(np.isfinite(array))
        assert np.abs(array - getattr(other, field)).max() > 1e-3
    drawn = [w for w in weights[:3] if w is not None and site_type in ATTENTION_SITES]
    for a, b in itertools.combinations(drawn, 2):  # query, key and value
        assert np.abs(a - b).max() > 1e-3
    if (index := getattr(weights, "filter_index", None)) is not None:
        assert weights.filters.shape[1:] == tuple(2 * side - 1 for side in site.grid)
        assert index.max() < len(weights.filters)
        assert len(index) == (2 if name == "impulse_mimetic" else 3)  # half of three, rounded up
    assert_close(scheme(RNG, site), weights, atol=TOLERANCES.get(name, 1e-4))


@pytest.mark.parametrize(("name", "site_type"), CASES)
def test_weights_are_float32_with_x64_too(name, site_type, library_promotion):
    with jax.enable_x64(True):  # a draw of another type has other values
        weights = jax.eval_shape(lambda rng: SCHEMES[name]()(rng, SITES[site_type]), RNG)
    arrays = jax.tree.leaves([getattr(weights, field) for field in SHAPES[site_type]])
    assert all(array.dtype == jnp.float32 for array in arrays)


@pytest.mark.parametrize(("name", "site_type"), UNSUPPORTED)
def test_sites_without_an_implementation_are_refused(name, site_type):
    with pytest.raises(InputError, match=site_type.__name__):
        SCHEMES[name]()(RNG, SITES[site_type])


@pytest.mark.parametrize(
    ("site_type", "field", "value"),
    [
        (si.WindowSite, "grid", (3, 0)),
        (si.TokenMixingSite, "hidden", 1),
        (si.RotarySite, "width", 1),
        (si.RotarySite, "head_dim", 5),
        (si.RotarySite, "angles", np.zeros((1, 5, 12, 4))),  # for 4 heads
        (si.RotarySite, "angles", np.zeros((1, 1, 13, 4))),  # for 12 tokens
        (si.RotarySite, "angles", np.full((1, 1, 12, 4), np.nan)),
    ],
)
def test_fields_that_no_layer_has_are_refused(site_type, field, value):
    with pytest.raises(InputError, match=rf"^{site_type.__name__}\.{field}"):
        dataclasses.replace(SITES[site_type], **{field: value})


@pytest.mark.parametrize("name", ["default", "mimetic"])
@pytest.mark.parametrize("site_type", ATTENTION_SITES)
def test_the_baselines_take_the_factors_of_the_2025_program(name, site_type):
    site = SITES[site_type]
    options = dict(query_key_scale=3.0, value_scale=0.5)
    if site_type is si.AttentionSite:
        site = dataclasses.replace(site, positions_trainable=True)
        options |= dict(position_scale=2.0, replace_positions=False)
    base, weights = SCHEMES[name]()(RNG, site), SCHEMES[name](**options)(RNG, site)
    for field, factor in dict(query=3.0, key=3.0, value=0.5, out=0.5).items():
        np.testing.assert_array_equal(getattr(weights, field), factor * getattr(base, field))
    if site_type is si.AttentionSite:
        assert base.position_scale is None
        assert (weights.positions, weights.position_scale) == (None, 2.0)


@pytest.mark.filterwarnings("ignore:only .* of the attention rows")
@pytest.mark.parametrize("name", SCHEMES)
def test_positions_are_scaled_or_replaced_but_not_both(name, library_promotion):
    site, options = SITES[si.AttentionSite], OPTIONS.get((name, si.AttentionSite), {})
    zeros = np.zeros((30, 32), np.float32)
    trainable = dataclasses.replace(site, positions=zeros, positions_trainable=True)
    if name in ("default", "impulse_2025"):  # these keep learned positions by default
        options = dict(replace_positions=True)
        with pytest.raises(InputError, match=r"^position_scale=2\.0"):
            SCHEMES[name](**options, position_scale=2.0)
    fixed, replaced = (SCHEMES[name](**options)(RNG, s) for s in (site, trainable))
    assert fixed.positions is None
    np.testing.assert_array_equal(replaced.positions, site.positions)
    np.testing.assert_array_equal(replaced.query, fixed.query)
    assert fixed.position_scale is replaced.position_scale is None


@pytest.mark.parametrize(
    ("site_type", "options"),
    [
        (si.WindowSite, dict(replace_positions=False)),
        (si.RotarySite, dict(replace_positions=False)),
        (si.TokenMixingSite, dict(target_mass=0.5)),
        (si.ConvSite, dict(kernel_size=5)),
    ],
)
def test_options_without_meaning_for_a_site_are_refused(site_type, options):
    with pytest.raises(InputError, match=f"{next(iter(options))}.*{site_type.__name__}"):
        si.impulse(**options)(RNG, SITES[site_type])
