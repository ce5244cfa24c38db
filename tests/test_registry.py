"""Schemes by name: dispatch by site, refused options, and what all schemes have in common."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from structinit_jax import attention_init
from structinit_jax.attention_init import (
    SCHEMES,
    AttentionSite,
    ConvSite,
    RotarySite,
    TokenMixingSite,
    WindowSite,
    mimetic,
    rotary_angles,
    sincos_positions,
)
from structinit_jax.errors import InputError

RNG = jax.random.key(0)
SITES = {
    AttentionSite: AttentionSite((5, 6), 32, 4, 8, 3, 8**-0.5, sincos_positions((5, 6), 32)),
    RotarySite: RotarySite((3, 4), 32, 4, 8, 3, 8**-0.5, angles=rotary_angles((3, 4), 8)),
    WindowSite: WindowSite((3, 4), 32, 4, 8, 3, 8**-0.5),
    TokenMixingSite: TokenMixingSite((3, 4), 10, 3, 16),
    ConvSite: ConvSite(3, 16, 3),
}
SHAPES = {
    AttentionSite: dict(
        query=(3, 32, 4, 8), key=(3, 32, 4, 8), value=(3, 32, 4, 8), out=(3, 4, 8, 32)
    ),
    RotarySite: dict(
        query=(3, 32, 4, 8), key=(3, 32, 4, 8), value=(3, 32, 4, 8), out=(3, 4, 8, 32)
    ),
    WindowSite: dict(
        query=(3, 32, 4, 8), key=(3, 32, 4, 8), value=(3, 32, 4, 8), out=(3, 4, 8, 32)
    ),
    TokenMixingSite: dict(fc1=(3, 12, 10), fc2=(3, 10, 12)),
    ConvSite: dict(kernel=(3, 3, 3, 16)),
}
EMPTY = {
    ("impulse_2024", AttentionSite): ("value", "out"),
    ("default", TokenMixingSite): ("fc1", "fc2"),
}
OPTIONS = {("impulse_2024", AttentionSite): {"max_steps": 20}}
# The pseudo-inverse amplifies rounding: positions that differ in their last bit already change the
# weights by 1e-4.
TOLERANCES = {"impulse_2025": 1e-3}


@pytest.mark.filterwarnings("ignore:only .* of the attention rows")
@pytest.mark.parametrize(
    ("name", "site_type"), [(name, site_type) for name in SCHEMES for site_type in SCHEMES[name]]
)
def test_every_scheme_has_the_documented_shapes_and_can_be_traced(name, site_type, request):
    if name == "impulse_2024":  # Adam relies on promotion
        request.getfixturevalue("library_promotion")
    scheme = attention_init.by_name(name, **OPTIONS.get((name, site_type), {}))
    site = SITES[site_type]
    eager = scheme(RNG, site)
    for field, shape in SHAPES[site_type].items():
        array = getattr(eager, field)
        if field in EMPTY.get((name, site_type), ()):
            assert array is None
            continue
        assert (array.shape, array.dtype) == (shape, jnp.float32)
        assert np.all(np.isfinite(array))
    if (index := getattr(eager, "filter_index", None)) is not None:
        assert eager.targets.shape[1:] == (site.num_tokens,) * 2
        assert index.max() < len(eager.targets)
    abstract = jax.eval_shape(lambda rng: scheme(rng, site), RNG)
    assert jax.tree.map(jnp.shape, eager) == jax.tree.map(jnp.shape, abstract)
    jitted = jax.jit(lambda rng: scheme(rng, site))(RNG)
    tolerance = TOLERANCES.get(name, 1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=tolerance), eager, jitted)
    drawn = jax.tree.leaves(eager)
    other = jax.tree.leaves(scheme(jax.random.key(1), site))
    assert not drawn or any(np.abs(a - b).max() > 1e-3 for a, b in zip(drawn, other, strict=True))


@pytest.mark.parametrize("name", sorted(SCHEMES))
def test_public_functions_show_the_options_that_they_take(name):
    function = getattr(attention_init, name)
    options = attention_init.scheme_options(name)
    assert tuple(inspect.signature(function).parameters) == options
    for site_type in SCHEMES[name]:
        assert site_type.__name__ in function.__doc__
    for option in options:
        assert f"  {option}: " in function.__doc__


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("impuls", {}, "name='impuls'.*did you mean 'impulse'"),
        ("xyz", {}, "name='xyz'.*default, impulse, impulse_2024"),
        ("impulse", {"kernel": 3}, "kernel=3.*did you mean 'kernel_size'"),
        ("default", {"kernel_size": 3}, "kernel_size=3.*takes position_scale"),
        ("impulse_2025", {"query_key_norm": 0.0}, "query_key_norm=0.0: must be a positive number"),
        ("impulse", {"kernel_size": 4}, "kernel_size=4: .*odd"),
        ("impulse", {"offsets": "all"}, "offsets='all': must be one of even"),
        ("impulse", {"vo_init": "x"}, "vo_init='x': must be one of balanced"),
        (
            "impulse",
            {"filters": "sobel"},
            "filters='sobel': must be an array, or one of impulse",
        ),
        ("impulse", {"filters": np.ones((3, 3))}, r"filters has shape \(3, 3\)"),
        ("impulse", {"norm": 0.0}, "norm=0.0"),
        ("impulse", {"sigma": -1.0}, "sigma=-1.0"),
        ("impulse", {"dilation": (1, 0)}, r"dilation=\(1, 0\)"),
        ("impulse", {"max_steps": 0}, "max_steps=0"),
        ("impulse", {"target_mass": 0.0}, "target_mass=0.0"),
        ("impulse", {"target_mass": 1.5}, "target_mass=1.5"),
        (
            "impulse",
            {"target_mass": (0.5, 0.4)},
            "target_mass=.*: must be a number between",
        ),
        ("impulse", {"patch_scale": (0.3, 0.4)}, "patch_scale=.*: must be a positive number"),
        ("impulse", {"optimizer": "sdg"}, "optimizer='sdg'"),
        ("impulse", {"optimizer": "chain"}, "optimizer='chain': not an optimizer of optax"),
        ("impulse", {"kernel_size": 3.0}, "kernel_size=3.0: .*whole number"),
        ("impulse", {"kernel_size": "3"}, "kernel_size='3': .*whole number"),
        ("impulse", {"dilation": 1.5}, "dilation=1.5: must be a positive whole number"),
        ("impulse", {"max_steps": 1e4}, "max_steps=10000.0: must be a positive whole number"),
        ("impulse", {"norm": "big"}, "norm='big': must be a positive number"),
        ("impulse", {"norm": np.inf}, "norm=inf: must be a positive number"),
        ("impulse", {"mlp_scale": "0"}, "mlp_scale='0': must be a number, 0 or more"),
        ("impulse", {"same_layers": "no"}, "same_layers='no': must be True or False"),
        ("impulse", {"vo_init": 1}, "vo_init=1: must be one of balanced"),
        ("impulse", {"filters": np.full((1, 3, 3), np.nan)}, "filters .* of finite numbers"),
        ("impulse", {"filters": np.ones((0, 3, 3))}, r"filters has shape \(0, 3, 3\)"),
        ("impulse", {"filters": np.ones((1, 3, 3)), "sigma": 1.0}, "sigma=1.0 .*filters=an array"),
        ("impulse", {"filters": "box", "dilation": 2}, "dilation=2 has no effect .*'box'"),
        ("impulse", {"filters": "box", "dilation": np.array([2, 1])}, "dilation=.* has no effect"),
        ("impulse", {"sigma": 1.0}, "sigma=1.0 has no effect with filters='impulse', only with ga"),
        ("impulse_2024", {"taps": "2"}, "taps='2': must be a positive whole number"),
        ("impulse_2024", {"first_input": "noise"}, "first_input='noise': must be one of positions"),
    ],
)
def test_wrong_names_options_and_values_are_refused_without_a_site(name, options, message):
    with pytest.raises(InputError, match=message):
        attention_init.by_name(name, **options)


def test_a_misspelled_scheme_is_refused_as_a_function_too():
    with pytest.raises(InputError, match=r"name='impuls'.*did you mean 'impulse'"):
        attention_init.scheme("impuls")


def test_arrays_without_axes_are_numbers():
    site, options = SITES[AttentionSite], dict(max_steps=3, norm=1.0, same_layers=True)
    given = attention_init.impulse(
        max_steps=jnp.asarray(3), norm=np.float64(1.0), same_layers=np.bool_(True)
    )
    expected = attention_init.impulse(**options)(RNG, site)
    np.testing.assert_array_equal(given(RNG, site).query, expected.query)


@pytest.mark.parametrize(
    ("site_type", "option", "value"),
    [
        (WindowSite, "norm", 1.0),
        (WindowSite, "keep_positions", False),
        (WindowSite, "max_steps", 10),
        (TokenMixingSite, "keep_positions", True),
        (TokenMixingSite, "vo_init", "mimetic"),
        (TokenMixingSite, "target_mass", 0.5),
        (ConvSite, "kernel_size", 3),
        (ConvSite, "dilation", 2),
        (ConvSite, "target_mass", 0.5),
    ],
)
def test_options_without_meaning_for_a_site_are_refused(site_type, option, value):
    scheme = attention_init.impulse(**{option: value})
    with pytest.raises(InputError, match=f"{option}=.*{site_type.__name__}"):
        scheme(RNG, SITES[site_type])


def test_convolutions_take_no_options_of_the_2024_paper():
    with pytest.raises(InputError, match=r"same_layers=True.*ConvSite"):
        attention_init.impulse_2024(same_layers=True)(RNG, SITES[ConvSite])


def test_none_stands_for_the_default():
    site = SITES[WindowSite]
    given = attention_init.impulse(target_mass=None, norm=None)(RNG, site)
    np.testing.assert_array_equal(given.bias, attention_init.impulse()(RNG, site).bias)


@pytest.mark.parametrize(
    ("name", "site_type"),
    [(n, t) for n in SCHEMES for t in SITES if t not in SCHEMES[n]],
)
def test_sites_without_an_implementation_are_refused(name, site_type):
    with pytest.raises(InputError, match=f"name='{name}'.*{site_type.__name__}.*default"):
        attention_init.by_name(name)(RNG, SITES[site_type])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda site: mimetic(RNG, site), r"by name, .* call mimetic\(\)\(rng, site\)"),
        (lambda site: mimetic()(site, RNG), r"not a site: call it as \(rng, site\), with"),
        (lambda site: mimetic()(0, site), r"rng=0: needs .* jax\.random\.key\(0\)"),
    ],
)
def test_calls_with_other_arguments_are_explained(call, message):
    with pytest.raises(InputError, match=message):
        call(SITES[AttentionSite])


def my_scheme(strength=1.0):
    """A user's own scheme: takes the options and returns the initializer."""

    def init(rng, site):
        return attention_init.ConvWeights(strength * attention_init.default()(rng, site).kernel)

    return init


def my_initializer(rng, site):
    """What a scheme should return."""


def test_users_name_their_own_schemes():
    name = f"{__name__}:my_scheme"
    assert attention_init.scheme_options(name) == ("strength",)
    doubled, plain = (
        attention_init.by_name(name, **options)(RNG, SITES[ConvSite]).kernel
        for options in ({"strength": 2.0}, {})
    )
    np.testing.assert_array_equal(doubled, 2 * plain)
    with pytest.raises(InputError, match=r"my_scheme.*weight"):
        attention_init.by_name(name, weight=2.0)
    with pytest.raises(
        InputError, match=r"'rng'\. It is called with the options alone, and returns"
    ):
        attention_init.by_name(f"{__name__}:my_initializer")
    with pytest.raises(InputError, match=r"TOLERANCES' is a dict: name a func"):
        attention_init.by_name(f"{__name__}:TOLERANCES")
    with pytest.raises(InputError, match=r"attention_init.name='no_such_module:f'"):
        attention_init.by_name("no_such_module:f")


def test_registered_functions_become_schemes(monkeypatch):
    monkeypatch.setattr(attention_init.registry, "SCHEMES", dict(SCHEMES))

    @attention_init.register("ones", ConvSite)
    def ones(rng, site, *, height=1.0):  # without a docstring
        shape = (site.num_layers, site.kernel_size, site.kernel_size, site.width)
        return attention_init.ConvWeights(jnp.full(shape, height))

    weights = attention_init.by_name("ones", height=3.0)(RNG, SITES[ConvSite])
    np.testing.assert_array_equal(weights.kernel, 3)
    assert attention_init.scheme("ones")(height=2.0)(RNG, SITES[ConvSite]).kernel[0, 0, 0, 0] == 2
