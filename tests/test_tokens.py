import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from structinit_jax.attention_init import (
    AttentionSite,
    impulse,
    impulse_2025,
    mimetic,
    sincos_positions,
    solve,
    tokens,
)
from structinit_jax.attention_init import kernels as kernels_lib
from structinit_jax.attention_init.kernels import layer_norm
from structinit_jax.errors import InputError

GRID, WIDTH, HEADS, DIM, LAYERS = (7, 5), 48, 3, 16, 4


SITE = AttentionSite(
    GRID, WIDTH, HEADS, DIM, LAYERS, DIM**-0.5, positions=sincos_positions(GRID, WIDTH)
)
make_site = functools.partial(dataclasses.replace, SITE)
# The solve in all layers.
EVERYWHERE = dict(mimetic_layers=0.0, target_mass=0.5)


def make(**options):
    options = EVERYWHERE | options
    return impulse(**options)(jax.random.key(0), make_site())


def head_maps(weights):
    x = layer_norm(sincos_positions(GRID, WIDTH))
    logits = np.einsum("nD,LDhd,LEhd,mE->Lhnm", x, weights.query, weights.key, x, optimize=True)
    return np.asarray(jax.nn.softmax(jnp.asarray(logits) * DIM**-0.5, axis=-1))


def target_mass(maps, targets):
    return np.minimum(maps, targets).sum((-1, -2)) / (targets.max(-1) > 0).sum(-1)


@pytest.fixture(scope="module")
def plain():
    return impulse(**EVERYWHERE)(jax.random.key(0), make_site())


def test_the_last_half_of_the_layers_attends_to_similar_tokens(plain):
    weights = impulse()(jax.random.key(0), make_site())
    assert weights.patch_scale is weights.mlp_scale is None
    np.testing.assert_allclose(weights.report.target_mass, 0.2, atol=0.01)
    products = np.einsum("LDhd,LEhd->LhDE", weights.query, weights.key)
    x = layer_norm(sincos_positions(GRID, WIDTH))
    rest = np.eye(WIDTH) - np.linalg.pinv(x) @ x  # projects on what positions do not reach
    assert np.abs(rest @ products[:2]).max() < 1e-4
    # As much of the identity as in mimetic's factors.
    similar = mimetic()(jax.random.key(0), make_site())
    best = np.einsum("LDhd,LEhd->LhDE", similar.query, similar.key)
    for measure in (lambda p: np.trace(p, axis1=2, axis2=3).mean(), np.linalg.norm):
        assert 0.93 < measure(products[2:]) / measure(best[2:]) < 1.02
    sizes = [np.linalg.norm(w[2:], axis=(1, 3)) for w in (weights.query, weights.key)]
    np.testing.assert_allclose(*sizes, rtol=1e-4)
    for share, first in ((0.25, 3), (0.5, 2), (1.0, 0)):  # only the first layers have filters
        draw = functools.partial(impulse(mimetic_layers=share), site=make_site())
        weights = jax.eval_shape(draw, jax.random.key(0))
        assert weights.filter_index.shape == (first, HEADS)
        assert len(weights.query) == LAYERS


@pytest.mark.parametrize(("heads", "dim"), [(1, WIDTH), (2, WIDTH + 16)])
def test_heads_as_wide_as_the_model_attend_to_similar_tokens(heads, dim):
    site = make_site(num_heads=heads, head_dim=dim, qk_scale=dim**-0.5)
    weights = impulse(mimetic_layers=1.0)(jax.random.key(0), site)
    products = np.einsum("LDhd,LEhd->LhDE", weights.query, weights.key)
    noise = products - 0.7 * np.eye(WIDTH)  # all of 0.7 U + 0.7 I, where U is uniform
    np.testing.assert_allclose(np.abs(noise).max(), 0.7 * (3 / WIDTH) ** 0.5, rtol=0.01)


@pytest.mark.parametrize(("width", "heads"), [(768, 3), (96, 12)])
def test_maps_are_equally_sharp_in_narrow_and_wide_models(width, heads):
    dim = width // heads
    positions = sincos_positions(GRID, width)
    site = make_site(
        width=width, num_heads=heads, head_dim=dim, qk_scale=dim**-0.5, positions=positions
    )
    report = impulse(**EVERYWHERE)(jax.random.key(0), site).report
    np.testing.assert_allclose(report.target_mass, 0.5, atol=0.01)
    assert report.hit_rate > 0.98


def test_impulses_are_softer_on_more_tokens_and_peak_on_their_targets():
    site = make_site(grid=(16, 16), positions=sincos_positions((16, 16), WIDTH))
    report = impulse()(jax.random.key(0), site).report
    np.testing.assert_allclose(report.target_mass, 12.8 / 256, atol=1e-3)
    assert report.hit_rate > 0.9


@pytest.mark.parametrize(("grid", "size"), [((2, 2), 1), ((8, 8), 5)])
def test_wide_filters_have_more_than_uniform_attention_by_default(grid, size):
    site = make_site(grid=grid, positions=sincos_positions(grid, WIDTH))
    weights = impulse(filters=np.ones((1, size, size)))(jax.random.key(0), site)
    uniform = np.minimum(weights.targets, 1 / math.prod(grid)).sum() / math.prod(grid)
    np.testing.assert_allclose(weights.report.target_mass, uniform + 0.3 * (1 - uniform), atol=0.01)


def test_given_filters_are_approached():
    scales = dict(patch_scale=0.3, mlp_scale=0.0)
    weights = make(filters=np.ones((1, 3, 3), np.float32), target_mass=0.6, **scales)
    np.testing.assert_allclose(weights.report.target_mass, 0.6, atol=0.01)
    assert (weights.patch_scale, weights.mlp_scale) == (0.3, 0.0)


def test_dilation_may_differ_by_layer():
    dilated = make(dilation=(1, 1, 2, 2), target_mass=0.4)
    assert len(np.unique(dilated.filter_index[2:])) == 6  # covered evenly over the two layers
    targets = kernels_lib.convolution_maps(kernels_lib.impulse_kernels(3, dilation=2), GRID)
    chosen = targets[np.asarray(dilated.filter_index[2:]) - 9]
    np.testing.assert_allclose(target_mass(head_maps(dilated)[2:], chosen), 0.4, atol=0.01)


def test_dilation_grows_with_depth_on_larger_grids():
    assert kernels_lib.growing_dilation(3, 12, (14, 14)) == (1,) * 4 + (2,) * 8
    assert kernels_lib.growing_dilation(5, 3, (28, 30)) == (1, 2, 2)
    assert kernels_lib.growing_dilation(1, 2, (28, 30)) == (1, 1)
    assert kernels_lib.growing_dilation(3, 6, (13, 40)) == (1,) * 6
    assert kernels_lib.growing_dilation(3, 1, (14, 14)) == (1,)
    site = make_site(grid=(14, 14), positions=sincos_positions((14, 14), WIDTH))
    dilated, filters = (
        len(jax.eval_shape(lambda rng, i=i: i(rng, site), jax.random.key(0)).targets)
        for i in (impulse(), impulse(filters=np.ones((9, 3, 3), np.float32)))
    )
    assert (dilated, filters) == (18, 9)


def test_value_and_projection_leave_the_encoding_alone(plain):
    x = layer_norm(sincos_positions(GRID, WIDTH))
    kept = impulse(**EVERYWHERE, keep_positions=True)(jax.random.key(0), make_site())
    for name, letters in (("value", "nD,LDhd->Lnhd"), ("out", "nD,LhdD->Lnhd")):
        assert np.abs(np.einsum(letters, x, getattr(kept, name))).max() < 1e-2
        assert np.abs(np.einsum(letters, x, getattr(plain, name))).max() > 1
    np.testing.assert_array_equal(kept.query, plain.query)


def test_heads_are_equally_strong_and_their_product_near_minus_identity(plain):
    noise = np.einsum("LDhd,LhdE->LDE", plain.value, plain.out) + 0.4 * np.eye(WIDTH)
    np.testing.assert_allclose(noise.std(), 0.4 * WIDTH**-0.5, rtol=0.3)
    assert abs(noise.mean()) < 0.01
    strengths = np.linalg.norm(np.einsum("LDhd,LhdE->LhDE", plain.value, plain.out), axis=(2, 3))
    assert strengths.max() / strengths.min() < 1.3


def test_targets_out_of_reach_warn(monkeypatch):
    """test_state.py has a model whose heads have too few channels."""
    monkeypatch.setattr(solve, "MIN_HIT_RATE", 1.1)
    with pytest.warns(UserWarning, match="only .* of the attention rows peak .*fewer heads"):
        make()


def test_equal_filters_have_equal_maps_and_independent_weights(plain):
    heads = LAYERS * HEADS  # 12 heads of 9 filters: three must repeat
    maps = head_maps(plain).reshape(heads, -1)
    query = np.moveaxis(np.asarray(plain.query), 2, 1).reshape(heads, -1)
    distance = np.abs(maps[:, None] - maps[None]).max(-1)
    pairs = [(i, j) for i, j in itertools.combinations(range(heads), 2) if distance[i, j] < 1e-3]
    assert len(pairs) == 3
    for i, j in pairs:
        cosine = query[i] @ query[j] / np.linalg.norm(query[i]) / np.linalg.norm(query[j])
        assert abs(cosine) < 0.6


@pytest.mark.parametrize("scheme", [impulse(**EVERYWHERE), mimetic()])
def test_trainable_positions_start_from_the_sincos_encoding(scheme):
    site = make_site(positions=jnp.zeros((35, WIDTH)), positions_trainable=True)
    weights, fixed = (scheme(jax.random.key(0), s) for s in (site, SITE))
    np.testing.assert_array_equal(weights.positions, sincos_positions(GRID, WIDTH))
    assert fixed.positions is None
    assert mimetic(replace_positions=False)(jax.random.key(0), site).positions is None


def test_mimetic_weights_are_the_programs_factors_as_stored_by_pytorch():
    weights = mimetic()(jax.random.key(0), make_site(num_heads=1, head_dim=WIDTH))
    qk = np.einsum("LDhd,LEhd->LDE", weights.query, weights.key)
    # As PyTorch's [out, in] weights of all heads, V is U S^1/2 and Proj is S^1/2 Vᵀ.
    v, out = (np.swapaxes(w, 1, 2) for w in (weights.value[:, :, 0], weights.out[:, 0]))
    v, out = np.asarray(v), np.asarray(out)
    for product, scale, diagonal in ((qk, 0.7, 0.7), (v @ out, 0.4, -0.4)):
        noise = product - diagonal * np.eye(WIDTH)
        assert abs(noise.std() - scale * WIDTH**-0.5) < 0.1 * scale * WIDTH**-0.5
        assert np.abs(noise).max() <= scale * (3 / WIDTH) ** 0.5 + 1e-4
    singular = np.swapaxes(v, 1, 2) @ v
    np.testing.assert_allclose(singular, out @ np.swapaxes(out, 1, 2), atol=1e-4)
    np.testing.assert_allclose(singular, singular * np.eye(WIDTH), atol=1e-4)


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("filters", dict(filters=-np.ones((1, 3, 3)))),
        ("filters", dict(filters=np.ones((1, 4, 4)))),
        ("kernel_size, dilation or filters", dict(dilation=5)),
        ("dilation", dict(dilation=(1, 2))),
        ("dilation", dict(dilation=())),
        (
            "target_mass=0.2, but uniform attention has 0.2",
            dict(filters=np.ones((1, 3, 3)), target_mass=0.2),
        ),
    ],
)
def test_filters_that_do_not_fit_the_site_are_refused(field, options):
    with pytest.raises(InputError, match=f"^{field}"):
        make(**options)


def test_kept_positions_that_leave_no_room_are_refused_before_the_solve(monkeypatch):
    monkeypatch.setattr(tokens, "solve_bank", None)
    full = np.random.default_rng(0).normal(size=(35, 32)).astype(np.float32)
    with pytest.raises(InputError, match=r"have rank 31, .* width 32.* keep_positions=False"):
        impulse(keep_positions=True)(jax.random.key(0), make_site(width=32, positions=full))


def test_positions_are_required_and_checked():
    with pytest.raises(InputError, match=r"AttentionSite.positions=None"):
        impulse()(jax.random.key(0), make_site(positions=None))
    for same in (np.ones((35, WIDTH), np.float32), jnp.full((35, WIDTH), jnp.nan)):
        with pytest.raises(InputError, match="positions are equal for all tokens or not finite"):
            impulse_2025()(jax.random.key(0), make_site(positions=same))


def test_more_channels_in_heads_than_in_the_model_are_refused():
    wide_heads = make_site(num_heads=2, head_dim=32)
    for scheme in (mimetic(), impulse_2025()):
        with pytest.raises(InputError, match="head_dim=32"):
            jax.eval_shape(lambda rng, scheme=scheme: scheme(rng, wide_heads), jax.random.key(0))
