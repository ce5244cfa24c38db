import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import structinit_jax as si
from structinit_jax.attention_init.targets import filter_maps
from structinit_jax.errors import InputError

GRID, WIDTH, HEADS, DIM, LAYERS = (5, 7), 48, 3, 16, 4
RNG = jax.random.key(0)
SITE = si.RotarySite(GRID, WIDTH, HEADS, DIM, LAYERS, DIM**-0.5, angles=si.rotary_angles(GRID, DIM))
make_site = functools.partial(dataclasses.replace, SITE)


def mixed_angles():
    """A separate table for each layer and head, with frequencies along random directions."""
    y, x = np.divmod(np.arange(GRID[0] * GRID[1]), GRID[1])
    turn = np.random.default_rng(0).uniform(0, 2 * np.pi, (LAYERS, HEADS, 1, 1))
    turn = turn + np.pi / 2 * np.repeat([0, 1], DIM // 4)
    along = x[:, None] * np.cos(turn) + y[:, None] * np.sin(turn)
    return (along * 10.0 ** -(np.arange(DIM // 2) % 4 / 4)).astype(np.float32)


def head_maps(weights, site):
    """Maps of tokens that hold only the patch embedding's bias."""
    query, key = (
        np.einsum("D,LDhd->Lhd", weights.patch_bias, kernel)[:, :, None]
        for kernel in (weights.query, weights.key)
    )

    def rotate(x):
        """Pairs of channels as complex numbers."""
        a, b = np.split(x, 2, axis=-1) if site.pairs == "halves" else (x[..., ::2], x[..., 1::2])
        return (a + 1j * b) * np.exp(1j * site.angles)

    products = np.einsum("Lhnd,Lhmd->Lhnm", rotate(query), rotate(key).conj())
    logits = site.qk_scale * products.real
    return np.asarray(jax.nn.softmax(jnp.asarray(logits), axis=-1))


@pytest.mark.parametrize("changes", [dict(), dict(angles=mixed_angles(), pairs="halves")])
def test_every_head_attends_to_its_neighbor_with_the_target_mass(changes):
    site = make_site(**changes)
    weights = si.impulse()(RNG, site)
    maps = head_maps(weights, site)
    targets = filter_maps(weights.filters, GRID)[weights.filter_index]
    has_target = targets.max(-1) > 0
    assert np.all((maps.argmax(-1) == targets.argmax(-1))[has_target])
    mass = (maps * targets).sum((-1, -2)) / has_target.sum(-1)
    np.testing.assert_allclose(mass, 0.3, atol=0.02)
    assert weights.report.hit_rate == 1
    np.testing.assert_allclose(weights.report.target_mass, 0.3, atol=0.02)
    np.testing.assert_allclose(weights.report.wanted_mass, 0.3, rtol=1e-6)
    assert len(np.unique(weights.filter_index)) == 9


def test_only_a_vector_that_all_tokens_share_has_weights_that_are_not_the_models_own():
    plain, own = (
        scheme()(RNG, make_site(base_init="pytorch")) for scheme in (si.impulse, si.default)
    )
    common = np.asarray(plain.patch_bias)
    assert sorted(common) == [-1] * (WIDTH // 2) + [1] * (WIDTH // 2)  # of mean zero
    keys = np.einsum("D,LDhd->Lhd", common, plain.key)
    phases = np.arctan2(keys[..., 1::2], keys[..., ::2])
    assert abs(np.exp(1j * phases).mean()) < 0.4
    for drawn, base in ((plain.query, own.query), (plain.key, own.key)):
        rest = drawn - np.einsum("D,LEhd,E->LDhd", common, drawn, common) / WIDTH
        np.testing.assert_allclose(np.std(rest), np.std(base), rtol=0.1)


@pytest.mark.parametrize("angles", [si.rotary_angles(GRID, DIM), mixed_angles()])
def test_the_last_half_of_the_layers_attends_to_similar_tokens(angles):
    site = make_site(angles=angles)
    weights = si.impulse_mimetic()(RNG, site)
    assert weights.filter_index.shape == (LAYERS // 2, HEADS)
    targets = filter_maps(weights.filters, GRID)[weights.filter_index]
    mass = (head_maps(weights, site)[: LAYERS // 2] * targets).sum((-1, -2)) / targets.sum((-1, -2))
    np.testing.assert_allclose(mass, 0.1, atol=0.02)
    products = jnp.einsum("LDhd,LEhd->LhDE", weights.query, weights.key)
    own, others = jnp.trace(products, axis1=2, axis2=3) / WIDTH, products.std(axis=(2, 3))
    assert own[LAYERS // 2 :].min() > 4 * abs(own[: LAYERS // 2]).max()
    assert own[LAYERS // 2 :].min() > 0.2 > others[LAYERS // 2 :].max()


def test_a_target_mass_below_that_of_uniform_attention_is_refused():
    with pytest.raises(InputError, match="target_mass"):
        si.impulse(filters=np.ones((1, 3, 3), np.float32), target_mass=0.1)(RNG, SITE)


def test_filters_of_few_rows_are_solved_on_larger_grids():
    angles = si.rotary_angles((9, 10), DIM)
    site = make_site(grid=(9, 10), angles=angles)
    kernels = np.zeros((2, 17, 17), np.float32)
    kernels[0, 0, 0] = kernels[1, 16, 0] = 1  # from two adjacent tokens each, not evenly spaced
    report = si.impulse(filters=kernels)(RNG, site).report
    np.testing.assert_allclose(report.target_mass, 0.3, atol=0.01)


def test_angles_may_be_traced():
    def init(angles):
        return si.impulse()(RNG, make_site(angles=angles)).query

    assert jax.eval_shape(init, jnp.asarray(mixed_angles())).shape == (LAYERS, WIDTH, HEADS, DIM)
