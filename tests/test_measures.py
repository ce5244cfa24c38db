import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import entropy, special_ortho_group

from structinit_jax.analysis import measures
from structinit_jax.attention_init import AttentionSite, impulse, kernels, sincos_positions
from structinit_jax.attention_init.kernels import layer_norm

GRID = (4, 5)
RNG = np.random.default_rng(0)


def random_maps(*shape):
    logits = RNG.normal(size=(*shape, 20, 20))
    return np.asarray(jax.nn.softmax(jnp.asarray(2 * logits, jnp.float32), axis=-1))


def impulse_target(index):
    return kernels.convolution_maps(kernels.impulse_kernels(3), GRID)[index]


def impulse_map(index):
    """The map of one impulse; rows without the neighbor attend evenly."""
    target = impulse_target(index)
    return jnp.asarray(np.where(target.sum(-1, keepdims=True), target, np.float32(1 / 20)))


def test_measures_of_mean_maps_are_the_sums_over_pairs_of_tokens():
    maps = random_maps(2)
    found = measures.measure_mean_maps(jnp.asarray(maps), GRID)
    for head, weights in enumerate(maps):
        distance = near = 0.0
        masses, counts = np.zeros((5, 5)), np.zeros((5, 5))  # offsets of up to half of 4 and 5
        for query, key in np.ndindex(20, 20):
            dy, dx = key // 5 - query // 5, key % 5 - query % 5
            distance += weights[query, key] * (dy**2 + dx**2) ** 0.5 / 20
            if max(abs(dy), abs(dx)) <= 1:
                near += weights[query, key] / 20
            if max(abs(dy), abs(dx)) <= 2:
                masses[dy + 2, dx + 2] += weights[query, key]
                counts[dy + 2, dx + 2] += 1
        strongest = (masses / counts).max()
        row, column = np.argwhere(masses / counts == strongest)[0] - 2
        np.testing.assert_allclose(found["distance"][head], distance, rtol=1e-5)
        np.testing.assert_allclose(found["neighborhood_mass"][head], near, rtol=1e-5)
        np.testing.assert_allclose(found["neighbor_mass"][head], strongest, rtol=1e-5)
        assert float(found["neighbor_row"][head]) == row
        assert float(found["neighbor_column"][head]) == column


def test_entropy_is_that_of_scipy():
    maps = random_maps(3, 2)
    expected = entropy(maps, axis=-1).mean(axis=(0, 2))
    np.testing.assert_allclose(measures.mean_entropy(jnp.asarray(maps)), expected, rtol=1e-5)
    uniform = jnp.full((1, 20, 20), 1 / 20)
    np.testing.assert_allclose(measures.mean_entropy(uniform), np.log(20), rtol=1e-5)


@pytest.mark.parametrize("index", [0, 4, 5])
def test_an_impulse_is_recognized(index):
    maps = impulse_map(index)
    found = measures.measure_mean_maps(maps, GRID)
    offset = [float(found["neighbor_row"]), float(found["neighbor_column"])]
    assert offset == kernels.kernel_offsets(3)[index].tolist()
    np.testing.assert_allclose(found["neighbor_mass"], 1, rtol=1e-6)
    targets = jnp.asarray(np.stack([impulse_target(index), impulse_target(8)]))
    against = measures.measure_against_targets(jnp.stack([maps, maps])[None], targets)
    np.testing.assert_allclose(against["target_mass"][0], 1, rtol=1e-6)
    np.testing.assert_allclose(against["hit_rate"][0], 1, rtol=1e-6)
    assert against["target_mass"][1] < 0.1
    assert against["hit_rate"][1] < 0.1


def test_a_soft_target_is_overlapped():
    target = jnp.asarray([[0.5, 0.5, 0.0], [0.0, 0.0, 0.0], [0.25, 0.5, 0.25]])
    maps = jnp.asarray([[0.8, 0.2, 0.0], [1.0, 0.0, 0.0], [0.4, 0.3, 0.3]])
    found = measures.measure_against_targets(maps[None], target)
    np.testing.assert_allclose(found["target_mass"], (0.7 + 0.8) / 2, rtol=1e-6)
    np.testing.assert_allclose(found["hit_rate"], 1 / 2)  # of the two rows that have a target


def test_the_targets_of_solved_heads_are_reached():
    positions = sincos_positions((8, 8), 32)
    site = AttentionSite((8, 8), 32, 2, 16, 2, 0.25, positions)
    weights = impulse(target_mass=0.8, vo_init="default")(jax.random.key(0), site)
    x = layer_norm(positions)
    logits = np.einsum("nD,LDhd,LEhd,mE->Lhnm", x, weights.query, weights.key, x, optimize=True)
    maps = jax.nn.softmax(jnp.asarray(0.25 * logits, jnp.float32), axis=-1)
    targets = jnp.asarray(weights.targets)[weights.filter_index]
    found = measures.measure_against_targets(maps[None], targets)
    np.testing.assert_allclose(found["target_mass"], 0.8, atol=0.02)
    assert np.all(found["hit_rate"] > 0.95)


def test_attention_by_offset_is_the_kernel():
    kernel = measures.attention_by_offset(impulse_map(5), GRID)
    assert kernel.shape == (7, 9)
    assert np.unravel_index(np.argmax(kernel), kernel.shape) == (3, 5)  # one right of the center
    np.testing.assert_allclose(kernel[3, 5], 1)


@pytest.mark.parametrize("shape", [(3, 6, 4), (3, 4, 6)])
def test_stable_rank_is_that_of_the_singular_values(shape):
    x = RNG.normal(size=shape).astype(np.float32)
    values = np.linalg.svd(x, compute_uv=False)
    expected = (values**2).sum(axis=-1) / values.max(axis=-1) ** 2
    np.testing.assert_allclose(measures.stable_rank(x), expected, rtol=1e-4)
    np.testing.assert_allclose(measures.stable_rank(np.eye(5)), 5, rtol=1e-5)


def nguyen_hsic(x, y):
    """Equation 3 of Nguyen et al. 2021 in float64."""
    n = len(x)
    k, m = (np.float64(a) @ np.float64(a).T for a in (x, y))
    for gram in (k, m):
        np.fill_diagonal(gram, 0)
    sums = k.sum() * m.sum() / ((n - 1) * (n - 2)) - 2 / (n - 2) * (k @ m).sum()
    return (np.trace(k @ m) + sums) / (n * (n - 3))


def cka(x, y):
    grams = [measures.centered_gram(jnp.asarray(a))[None] for a in (x, y)]
    return float(measures.cka(*grams)[0, 0])


def test_cka_is_the_formula_of_the_paper():
    x = RNG.normal(size=(16, 30)).astype(np.float32) + 3
    y = x[:, :20] + RNG.normal(size=(16, 20)).astype(np.float32)
    expected = nguyen_hsic(x, y) / (nguyen_hsic(x, x) * nguyen_hsic(y, y)) ** 0.5
    assert 0.2 < expected < 0.95
    np.testing.assert_allclose(cka(x, y), expected, rtol=1e-4)


def test_cka_ignores_rotation_scale_and_shift_but_not_more():
    x = RNG.normal(size=(32, 6)).astype(np.float32)
    rotation = special_ortho_group.rvs(6, random_state=0).astype(np.float32)
    np.testing.assert_allclose(cka(x, 3 * x @ rotation + 5), 1, rtol=1e-5)
    many = RNG.normal(size=(32, 2000)).astype(np.float32)
    assert abs(cka(x, many)) < 0.2  # the biased estimator gives 0.4
    assert cka(x, np.ones_like(x)) == 0


def test_filter_cosine_is_of_each_channel():
    a = RNG.normal(size=(3, 3, 2)).astype(np.float32)
    b = np.stack([-2 * a[..., 0], np.zeros((3, 3), np.float32)], axis=-1)
    b[0, 0, 1] = 1
    expected = [-1, a[0, 0, 1] / np.linalg.norm(a[..., 1])]
    np.testing.assert_allclose(measures.filter_cosine(a, b), expected, rtol=1e-6)
