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
from structinit_jax.attention_init.published import draw_pseudo_input
from structinit_jax.attention_init.sites import layer_norm
from structinit_jax.attention_init.targets import filter_maps

# Few steps and small models leave the papers' targets out of reach.
pytestmark = pytest.mark.filterwarnings("ignore:only .* of the attention rows")

# For a program of so many steps that XLA's optimizations are worth their time.
OPTIMIZED = {"xla_backend_optimization_level": 3, "xla_cpu_use_fusion_emitters": True}


SITE = AttentionSite((6, 6), 32, 4, 8, 3, 8**-0.5, positions=sincos_positions((6, 6), 32))
make_site = functools.partial(dataclasses.replace, SITE)


def optimize_2024(query, key, positions, targets, steps, compiler_options=None):
    """Runs the algorithm on factors as the program stores them: [h, D, d] and [h, d, D]."""
    start = jnp.asarray(query), jnp.asarray(key).swapaxes(1, 2)
    options = dict(qk_scale=query.shape[2] ** -0.5, max_steps=steps)
    run = jax.jit(
        functools.partial(published.optimize_2024, **options),
        compiler_options=compiler_options,
    )
    query, key, report = run(start, jnp.asarray(positions), jnp.asarray(targets))
    return np.moveaxis(query, 1, 0), np.transpose(key, (1, 2, 0)), report


def test_2024_takes_the_programs_steps(library_promotion):
    ref = load("impulse_2024")
    np.testing.assert_allclose(sincos_positions((5, 5), 32), ref["positions"], atol=1e-6)
    start = ref["query/start"], ref["key/start"], ref["positions"], ref["targets"]
    for step in (1, 101):
        _, _, report = optimize_2024(*start, step)
        np.testing.assert_allclose(report.loss, ref["losses"][step], rtol=1e-5)
    query, key, _ = optimize_2024(*start, 300)
    np.testing.assert_allclose(query, ref["query"], atol=1e-5)
    np.testing.assert_allclose(key, ref["key"], atol=1e-5)


def draw_as_torch(heads, width, head_dim):
    """The program's offsets, Q and K after `torch.manual_seed(0)`: NumPy has the same generator."""
    rng = np.random.RandomState(0)

    def raw(*shape):
        return rng.randint(0, 2**32, shape, dtype=np.uint32)

    offsets = raw(heads) % 9
    bound = (head_dim * heads) ** -0.5
    query, key = (
        np.float32(bound * (2 * (raw(*shape) % 2**24) / 2**24 - 1))
        for shape in ((heads, width, head_dim), (heads, head_dim, width))
    )
    return offsets, query, key


@pytest.mark.slow
def test_2024_reaches_the_programs_figures(library_promotion):
    """Those of the authors' program after 3,000 steps, seed 0, width 192, 8 heads on 8×8 tokens."""
    offsets, query, key = draw_as_torch(8, 192, 24)
    targets = filter_maps((8, 8))[offsets]
    positions = sincos_positions((8, 8), 192)
    query, key, report = optimize_2024(query, key, positions, targets, 3000, OPTIMIZED)
    np.testing.assert_allclose(report.loss, 0.00331, rtol=0.01)
    np.testing.assert_allclose(report.target_mass, 0.609, rtol=0.01)
    norms = [np.linalg.norm(f, axis=(1, 2)).mean() for f in (query, key)]
    np.testing.assert_allclose(norms, (3.26, 8.46), rtol=0.01)


def test_2024_layers_are_equal_or_fresh_and_take_their_pseudo_inputs(
    library_promotion, monkeypatch
):
    same = attention_init.impulse_2024(max_steps=2)(jax.random.key(0), SITE)
    assert np.array_equal(same.query[0], same.query[2])
    # Columns of Q and rows of K are as long as those of a uniform draw up to (h d)^-1/2.
    np.testing.assert_allclose(np.linalg.norm(same.query, axis=1), 3**-0.5, rtol=0.03)
    np.testing.assert_allclose(np.linalg.norm(same.key, axis=3), 3**-0.5, rtol=0.03)
    fresh = attention_init.impulse_2024(max_steps=2, same_layers=False)(jax.random.key(0), SITE)
    assert np.abs(fresh.query[0] - fresh.query[2]).max() > 0.1  # from other starts
    names, keys = [], set()

    def draw(rng, name, positions):
        names.append(name)
        keys.add(tuple(np.asarray(jax.random.key_data(rng))))
        return draw_pseudo_input(rng, name, positions)

    monkeypatch.setattr(published, "draw_pseudo_input", draw)
    mixed = attention_init.impulse_2024(max_steps=2, following_input="gaussian")(
        jax.random.key(0), SITE
    )
    assert names == ["positions", "gaussian"]
    assert len(keys) == 2
    assert np.array_equal(mixed.query[1], mixed.query[2])
    assert not np.array_equal(mixed.filter_index[0], mixed.filter_index[1])
    replaced = attention_init.impulse_2024(max_steps=2)(jax.random.key(0), LEARNED)
    np.testing.assert_array_equal(replaced.query, same.query)


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


def adam_in_float64(query, key, x, targets, qk_scale, steps):
    """Algorithm 1 as printed: Adam on the mean squared error, and nothing else."""
    factors = [np.array(query, np.float64), np.array(key, np.float64)]
    moments = [(0, 0), (0, 0)]
    for step in range(1, steps + 1):
        q, k = (x @ factor for factor in factors)
        maps = softmax(qk_scale * q @ k.swapaxes(1, 2), axis=-1)
        error = 2 * (maps - targets) / maps.size
        logits = qk_scale * maps * (error - (error * maps).sum(-1, keepdims=True))
        gradients = x.T @ logits @ k, x.T @ logits.swapaxes(1, 2) @ q
        for i, gradient in enumerate(gradients):
            m, v = moments[i]
            moments[i] = m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
            m, v = m / (1 - 0.9**step), v / (1 - 0.999**step)
            factors[i] = factors[i] - 1e-4 * m / (np.sqrt(v) + 1e-8)
    return factors


def test_2024_without_rescaling_is_algorithm_1_as_printed(library_promotion):
    rng = np.random.default_rng(0)
    start = rng.uniform(-0.25, 0.25, (2, 2, 16, 8)).astype(np.float32)
    positions = sincos_positions((4, 4), 16)
    targets = filter_maps((4, 4))[[1, 5]]
    expected = adam_in_float64(*start, layer_norm(positions, 1e-5), targets, 8**-0.5, steps=3)
    solve = functools.partial(
        published.optimize_2024,
        tuple(jnp.asarray(start)),
        jnp.asarray(positions),
        jnp.asarray(targets),
    )
    query, key, _ = solve(qk_scale=8**-0.5, max_steps=3, rescale=False)
    for factor, wanted in zip((query, key), expected, strict=True):
        np.testing.assert_allclose(jnp.moveaxis(factor, 1, 0), wanted, atol=3e-6)
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


def test_2025_target_scale_noise_and_norms_are_options():
    options = dict(target_scale=40.0, target_noise=1.0, query_key_norm=2.0, value_scale=0.5)
    weights = attention_init.impulse_2025(**options)(jax.random.key(0), LEARNED)
    base = attention_init.impulse_2025()(jax.random.key(0), LEARNED)
    np.testing.assert_array_equal(weights.value, 0.5 * base.value)
    np.testing.assert_array_equal(weights.out, 0.5 * base.out)
    noise_rng = jax.random.split(jax.random.split(jax.random.key(0), 3)[0], 12)[0]
    noise = 0.6 * jax.random.truncated_normal(noise_rng, -2 / 0.6, 2 / 0.6, (36, 36))
    target = filter_maps(LEARNED.grid)[4]
    logits = 40.0 * target + np.asarray(noise, np.float64) * (target == 0)
    x = layer_norm(18 * np.asarray(LEARNED.positions), 1e-5)
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    inverse = vt[:8].T @ np.diag(1 / s[:8]) @ u[:, :8].T
    u, s, vt = np.linalg.svd(inverse @ logits @ inverse.T)
    # Both factors of norm Σ s^1/2 are scaled to a norm of 2.
    expected = 4 * (u[:, :8] * s[:8]) @ vt[:8] / s[:8].sum()
    product = weights.query[0, :, 0] @ weights.key[0, :, 0].T
    np.testing.assert_allclose(product, expected, atol=2e-3 * np.abs(expected).max())


def test_2025_solves_for_the_encoding_that_replaces_learned_positions():
    fixed = attention_init.impulse_2025()(jax.random.key(0), SITE)
    weights = attention_init.impulse_2025(replace_positions=True)(jax.random.key(0), LEARNED)
    np.testing.assert_array_equal(weights.query, fixed.query)


def test_2025_weights_are_those_of_its_parts():
    weights = attention_init.impulse_2025()(jax.random.key(0), LEARNED)
    assert (weights.positions, weights.position_scale) == (None, 18)
    assert weights.filter_index.tolist() == [[4, 1, 5, 3]] * 3
    for factor in (weights.query, weights.key):
        np.testing.assert_allclose(np.linalg.norm(factor, axis=(1, 3)), 7, rtol=1e-4)
    x = layer_norm(18 * np.asarray(LEARNED.positions), 1e-5)
    maps = softmax(
        8**-0.5
        * np.einsum("nD,LDhd,LEhd,mE->Lhnm", x, weights.query, weights.key, x, optimize=True),
        axis=-1,
    )
    targets = filter_maps(LEARNED.grid)[weights.filter_index]
    mass = np.mean(np.sum(maps * targets, axis=(2, 3)) / np.sum(targets, axis=(2, 3)))
    np.testing.assert_allclose(weights.report.target_mass, mass, rtol=1e-3)
    np.testing.assert_allclose(weights.report.loss, np.mean((maps - targets) ** 2), rtol=1e-3)
    # The noise is small beside the target logits, and drawn for each layer.
    for head, target in enumerate(targets[0]):
        query, key = published.factor_logits(jnp.asarray(x), jnp.asarray(target), 8)
        product = weights.query[0, :, head] @ weights.key[0, :, head].T / 7**2
        assert np.linalg.norm(product - query @ key.T) < 0.05 * np.linalg.norm(product)
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
    site = make_site(
        grid=(4, 4),
        width=192,
        num_heads=3,
        head_dim=64,
        num_layers=1,
        positions=0.02 * jax.random.normal(jax.random.key(5), (16, 192)),
        positions_trainable=True,
    )
    impulse = attention_init.impulse_2025()(jax.random.key(0), site)
    np.testing.assert_allclose(head_norms(impulse), [(7.17, 5.65, 3.57)] * 2, rtol=0.02)
    mimetic = attention_init.mimetic()(jax.random.key(0), site)
    np.testing.assert_allclose(head_norms(mimetic), [(5.65, 5.67, 5.65)] * 2, rtol=0.02)


@pytest.mark.parametrize("grid", [(1, 12), (12, 1)])
def test_2025_has_the_offsets_of_a_single_row_or_column(grid):
    positions = jax.random.normal(jax.random.key(1), (12, 32))
    site = make_site(grid=grid, positions=positions, positions_trainable=True)
    weights = attention_init.impulse_2025()(jax.random.key(0), site)
    np.testing.assert_array_equal(weights.filter_index, [[1, 2, 0, 1]] * 3)  # center first
    x = layer_norm(np.asarray(positions))
    logits = np.einsum("nD,LDhd,LEhd,mE->Lhnm", x, weights.query, weights.key, x, optimize=True)
    targets = np.asarray(weights.targets)[np.asarray(weights.filter_index)]
    has_target = targets.max(axis=-1) > 0
    assert (logits.argmax(axis=-1) == targets.argmax(axis=-1))[has_target].mean() > 0.8
