import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import softmax

from structinit_jax.attention_init import solve
from structinit_jax.attention_init.positions import layer_norm, sincos_positions
from structinit_jax.attention_init.sites import SolveReport
from structinit_jax.attention_init.targets import target_maps

GRID, WIDTH, HEAD_DIM, NORM = (8, 8), 48, 16, 1.0
SCALE = HEAD_DIM**-0.5


def solve_bank(z, targets, norm=None, head_dim=HEAD_DIM, width=WIDTH, **options):
    start = solve.start_factors(np.asarray(z), targets, head_dim)
    rows, targets = solve.sample_rows(targets)
    sizes = dict(head_dim=head_dim, qk_scale=head_dim**-0.5)
    norm = norm or solve.start_norm(**sizes, width=width)
    return solve.solve(start, z, targets, norm, rows=rows, **sizes, **options)


def attention_maps(x, query, key):
    logits = np.einsum("nD,fDk,fEk,mE->fnm", x, query, key, x, optimize=True)
    return softmax(SCALE * logits, axis=-1)


@pytest.fixture(scope="module")
def solved():
    x = layer_norm(sincos_positions(GRID, WIDTH))
    z, basis = map(jnp.asarray, solve.row_space(x))
    targets = target_maps(GRID)
    bank = solve_bank(z, targets, norm=NORM)
    return x, z, basis, targets, bank


def test_row_space_is_small_and_exact(solved):
    x, z, basis, _, _ = solved
    assert z.shape[1] < 24
    np.testing.assert_allclose(z @ basis.T, x, atol=2e-3)
    np.testing.assert_allclose(basis.T @ basis, np.eye(basis.shape[1]), atol=1e-5)


def test_a_soft_target_mass_is_reached_for_every_filter(solved):
    """Soft maps peak where sharp ones do."""
    _, z, _, targets, _ = solved
    *factors, report = solve_bank(z, targets, target_mass=0.05)
    maps = jnp.asarray(attention_maps(z, *factors))
    np.testing.assert_allclose(solve.overlap(jnp.asarray(targets), maps), 0.05, atol=1e-3)
    assert report.hit_rate == 1


def test_heads_of_few_channels_reach_a_target_mass():
    """Heads attend to wrong tokens if the norm grows faster than the directions turn."""
    z, _ = solve.row_space(layer_norm(sincos_positions((16, 16), 64)))
    targets = target_maps((16, 16))[:2]
    *_, report = solve_bank(z, targets, head_dim=8, width=64, target_mass=0.5)
    np.testing.assert_allclose(report.target_mass, 0.5, atol=0.01)
    assert report.hit_rate > 0.99


def test_part_of_the_rows_determines_the_solution(solved, monkeypatch):
    _, z, _, targets, bank = solved
    monkeypatch.setattr(solve, "MAX_ROWS", 32)
    *factors, _ = solve_bank(z, targets, norm=NORM)
    loss = np.mean((targets - attention_maps(z, *factors)) ** 2)
    np.testing.assert_allclose(loss, bank[2].loss, rtol=0.15)


def test_a_warning_says_what_helps():
    assert "larger target_mass" in solve.reach_warning(SolveReport(0.1, 0.3, 0.3, 0.5))
    assert "smaller target_mass" in solve.reach_warning(SolveReport(0.1, 0.7, 0.9999, 1.0))
