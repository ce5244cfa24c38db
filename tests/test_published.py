import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from references import load
from scipy.special import softmax

from structinit_jax import attention_init
from structinit_jax.attention_init import AttentionSite, published, sincos_positions
from structinit_jax.attention_init.positions import layer_norm
from structinit_jax.attention_init.published import draw_pseudo_input
from structinit_jax.attention_init.targets import target_maps

# With few steps and small models, the papers' targets are not reached.
pytestmark = pytest.mark.filterwarnings("ignore:only .* of the attention rows")

SITE = AttentionSite((6, 6), 32, 4, 8, 3, 8**-0.5, positions=sincos_positions((6, 6), 32))
make_site = functools.partial(dataclasses.replace, SITE)


def test_2024_takes_the_programs_steps(library_promotion):
    ref = load("impulse_2024")
    np.testing.assert_allclose(sincos_positions((5, 5), 32), ref["positions"], atol=1e-6)
    # The program stores Q as [h, D, d] and K as [h, d, D].
    start = jnp.asarray(ref["query/start"]), jnp.asarray(ref["key/start"]).swapaxes(1, 2)
    inputs = start, jnp.asarray(ref["positions"]), jnp.asarray(ref["targets"])
    solve = jax.jit(
        functools.partial(published.optimize_2024, qk_scale=start[0].shape[2] ** -0.5),
        static_argnames="max_steps",
    )
    for step in (1, 101):
        report = solve(*inputs, max_steps=step)[2]
        np.testing.assert_allclose(report.loss, ref["losses"][step], rtol=1e-5)
    query, key, _ = solve(*inputs, max_steps=300)
    np.testing.assert_allclose(np.moveaxis(query, 1, 0), ref["query"], atol=1e-5)
    np.testing.assert_allclose(np.transpose(key, (1, 2, 0)), ref["key"], atol=1e-5)


def test_2024_layers_are_equal_or_fresh_and_take_their_inputs(library_promotion, monkeypatch):
    same = attention_init.impulse_2024(max_steps=2)(jax.random.key(0), SITE)
    assert np.array_equal(same.query[0], same.query[2])
    # Columns of Q and rows of K have the norm of a uniform draw between ±(h d)^-1/2.
    np.testing.assert_allclose(np.linalg.norm(same.query, axis=1), 3**-0.5, rtol=0.03)
    np.testing.assert_allclose(np.linalg.norm(same.key, axis=3), 3**-0.5, rtol=0.03)
    fresh = attention_init.impulse_2024(max_steps=2, same_layers=False)(jax.random.key(0), SITE)
    assert np.abs(fresh.query[0] - fresh.query[2]).max() > 0.1  # from different starting points
    names, keys = [], set()

    def draw(rng, name, positions):
        names.append(name)
        keys.add(tuple(np.asarray(jax.random.key_data(rng))))
        return draw_pseudo_input(rng, name, positions)

    monkeypatch.setattr(published, "draw_pseudo_input", draw)
    scheme = attention_init.impulse_2024(max_steps=2, following_input="gaussian")
    mixed = scheme(jax.random.key(0), SITE)
    assert names == ["positions", "gaussian"]
    assert len(keys) == 2
    assert np.array_equal(mixed.query[1], mixed.query[2])
    assert not np.array_equal(mixed.filter_index[0], mixed.filter_index[1])


def test_pseudo_inputs_have_the_papers_distributions():
    positions = jnp.asarray(sincos_positions((16, 16), 64))
    uniform, gaussian, summed = (
        draw_pseudo_input(jax.random.key(0), name, positions)
        for name in ("uniform", "gaussian", "positions+gaussian")
    )
    assert np.abs(uniform).max() <= 1
    np.testing.assert_allclose(np.std(uniform), 3**-0.5, rtol=0.02)
    np.testing.assert_allclose(np.std(gaussian), 0.5**0.5, rtol=0.03)
    np.testing.assert_allclose(summed - positions, gaussian, atol=1e-6)


def test_2024_without_rescaling_is_algorithm_1_as_printed(library_promotion):
    site = make_site(num_layers=1)
    weights, rescaled = (
        attention_init.impulse_2024(max_steps=1, rescale=rescale)(jax.random.key(0), site)
        for rescale in (False, True)
    )
    columns = [np.linalg.norm(w.query, axis=1) for w in (weights, rescaled)]
    assert np.std(columns[0]) > 0.01
    np.testing.assert_allclose(columns[1], columns[1].mean(), atol=1e-3)


LEARNED = make_site(
    positions=0.02 * jax.random.normal(jax.random.key(5), (36, 32)), positions_trainable=True
)


@pytest.mark.parametrize(
    "options", [{}, dict(target_scale=40.0, target_noise=1.0, query_key_norm=2.0)]
)
def test_2025_target_scale_noise_and_norms_are_options(options):
    defaults = dict(target_scale=1000.0, target_noise=3.0, query_key_norm=7.0)
    scale, factor, norm = (defaults | options).values()
    weights = attention_init.impulse_2025(**options)(jax.random.key(0), LEARNED)
    noise_rng = jax.random.split(jax.random.split(jax.random.key(0))[0], 12)[0]
    noise = 0.6 * factor * jax.random.truncated_normal(noise_rng, -2 / 0.6, 2 / 0.6, (36, 36))
    target = target_maps(LEARNED.grid)[4]
    logits = scale * target + np.asarray(noise, np.float64) * (target == 0)
    x = layer_norm(18 * np.asarray(LEARNED.positions), 1e-5)
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    inverse = vt[:8].T @ np.diag(1 / s[:8]) @ u[:, :8].T
    u, s, vt = np.linalg.svd(inverse @ logits @ inverse.T)
    # Both factors, of norm (Σ s)^1/2, are scaled to the norm.
    expected = norm**2 * (u[:, :8] * s[:8]) @ vt[:8] / s[:8].sum()
    product = weights.query[0, :, 0] @ weights.key[0, :, 0].T
    np.testing.assert_allclose(product, expected, atol=2e-3 * np.abs(expected).max())


def test_2025_weights_are_those_of_its_parts():
    weights = attention_init.impulse_2025()(jax.random.key(0), LEARNED)
    assert (weights.positions, weights.position_scale) == (None, 18)
    assert weights.filter_index.tolist() == [[4, 1, 5, 3]] * 3
    for factor in (weights.query, weights.key):
        np.testing.assert_allclose(np.linalg.norm(factor, axis=(1, 3)), 7, rtol=1e-4)
    x = layer_norm(18 * np.asarray(LEARNED.positions), 1e-5)
    logits = np.einsum("nD,LDhd,LEhd,mE->Lhnm", x, weights.query, weights.key, x, optimize=True)
    maps = softmax(8**-0.5 * logits, axis=-1)
    targets = target_maps(LEARNED.grid)[weights.filter_index]
    mass = np.mean(np.sum(maps * targets, axis=(2, 3)) / np.sum(targets, axis=(2, 3)))
    np.testing.assert_allclose(weights.report.target_mass, mass, rtol=1e-3)
    np.testing.assert_allclose(weights.report.loss, np.mean((maps - targets) ** 2), rtol=1e-3)
    assert not np.array_equal(weights.query[0], weights.query[1])
    assert attention_init.impulse_2025()(jax.random.key(0), SITE).position_scale is None


def test_2025_fills_heads_that_are_wider_than_the_rank_of_few_tokens():
    positions = jax.random.normal(jax.random.key(1), (6, 32))
    site = make_site(grid=(2, 3), positions=positions, positions_trainable=True)
    weights = attention_init.impulse_2025()(jax.random.key(0), site)
    for factor in (weights.query, weights.key):
        assert factor.shape == (3, 32, 4, 8)
        np.testing.assert_allclose(np.linalg.norm(factor, axis=(1, 3)), 7, rtol=1e-4)


def head_norms(weights):
    """‖V‖ and ‖Proj‖ of each head."""
    axes = ((1, 3), (2, 3))
    return [np.linalg.norm(w, axis=a)[0] for w, a in zip(weights[2:4], axes, strict=True)]


def test_value_and_projection_of_vit_tiny_have_the_programs_norms():
    """V Proj is transposed in the 2025 impulse, but not in `mimetic`."""
    sizes = dict(grid=(4, 4), width=192, num_heads=3, head_dim=64, num_layers=1)
    positions = 0.02 * jax.random.normal(jax.random.key(5), (16, 192))
    site = make_site(**sizes, positions=positions, positions_trainable=True)
    impulse = attention_init.impulse_2025()(jax.random.key(0), site)
    np.testing.assert_allclose(head_norms(impulse), [(7.17, 5.65, 3.57)] * 2, rtol=0.02)
    mimetic = attention_init.mimetic()(jax.random.key(0), site)
    np.testing.assert_allclose(head_norms(mimetic), [(5.65, 5.67, 5.65)] * 2, rtol=0.02)


def test_2025_has_the_offsets_of_a_single_row():
    positions = jax.random.normal(jax.random.key(1), (12, 32))
    site = make_site(grid=(1, 12), positions=positions, positions_trainable=True)
    weights = attention_init.impulse_2025()(jax.random.key(0), site)
    np.testing.assert_array_equal(weights.filter_index, [[1, 0, 2, 1]] * 3)  # center first
