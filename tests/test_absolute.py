import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import structinit_jax as si
from structinit_jax.attention_init import absolute, solve
from structinit_jax.attention_init.positions import layer_norm
from structinit_jax.attention_init.targets import target_maps
from structinit_jax.errors import InputError

GRID, WIDTH, HEADS, DIM, LAYERS = (7, 5), 48, 3, 16, 4
RNG = jax.random.key(0)
SITE = si.AttentionSite(
    GRID, WIDTH, HEADS, DIM, LAYERS, DIM**-0.5, positions=si.sincos_positions(GRID, WIDTH)
)
make_site = functools.partial(dataclasses.replace, SITE)


def head_maps(weights, positions=SITE.positions):
    x = layer_norm(np.asarray(positions))
    logits = np.einsum("nD,LDhd,LEhd,mE->Lhnm", x, weights.query, weights.key, x, optimize=True)
    return np.asarray(jax.nn.softmax(jnp.asarray(logits) * DIM**-0.5, axis=-1))


def mass_and_hits(maps, targets):
    rows = targets.max(-1) > 0
    mass = np.minimum(maps, targets).sum((-1, -2)) / rows.sum(-1)
    return mass, (maps.argmax(-1) == targets.argmax(-1))[rows].mean()


@pytest.fixture(scope="module")
def plain():
    return si.impulse()(RNG, SITE)


def test_every_head_of_every_layer_attends_to_its_neighbor(plain):
    assert plain.filter_index.shape == (LAYERS, HEADS)
    assert set(np.ravel(plain.filter_index)) == set(range(9))
    targets = target_maps(GRID)[plain.filter_index]
    mass, hits = mass_and_hits(head_maps(plain), targets)
    np.testing.assert_allclose(mass, 0.3, atol=0.01)
    assert hits == 1
    np.testing.assert_allclose(plain.report.target_mass, 0.3, atol=0.01)
    assert plain.report.hit_rate == 1


@pytest.mark.parametrize(
    ("grid", "width", "heads", "mass"), [((14, 14), 768, 12, 0.3), ((16, 16), 192, 8, 0.9)]
)
def test_the_target_mass_is_reached_in_the_papers_models(grid, width, heads, mass):
    dim = width // heads
    positions = si.sincos_positions(grid, width)
    site = si.AttentionSite(grid, width, heads, dim, 1, dim**-0.5, positions)
    report = si.impulse(target_mass=mass)(RNG, site).report
    np.testing.assert_allclose(report.target_mass, mass, atol=0.01)
    assert report.hit_rate == 1


def test_learned_positions_are_kept_on_request_and_scaled(monkeypatch):
    """The solve starts from the closed form of 2025 and ends nearer to the targets, in all rows."""
    monkeypatch.setattr(solve, "MAX_ROWS", 24)
    positions = 0.02 * jax.random.truncated_normal(jax.random.key(5), -2, 2, (35, WIDTH))
    site = make_site(positions=positions, positions_trainable=True)
    scheme = si.impulse(replace_positions=False)

    def init(positions):
        return scheme(RNG, dataclasses.replace(site, positions=positions))

    weights = init(positions)
    assert jax.eval_shape(init, positions).query.shape == weights.query.shape  # traced positions
    assert weights.positions is None
    assert weights.position_scale == 18
    maps = head_maps(weights, 18 * np.asarray(positions))
    targets = target_maps(GRID)[weights.filter_index]
    mass, hits = mass_and_hits(maps, targets)
    np.testing.assert_allclose(mass, 0.3, atol=0.01)
    assert hits > 0.95
    np.testing.assert_allclose(weights.report.loss, np.mean((maps - targets) ** 2), rtol=0.05)

    published_report = si.impulse_2025()(RNG, site).report
    z, _ = solve.full_row_space(layer_norm(18 * positions))
    targets = target_maps(GRID)[[4, 1, 5]]
    options = dict(head_dim=DIM, qk_scale=DIM**-0.5, **absolute.NOISE_SOLVE)
    start = solve.start_factors(z, targets, DIM)
    ours = solve.solve(start, z, targets, 7 / DIM**0.5, **options)[2]
    assert ours.loss < 0.8 * published_report.loss
    assert ours.target_mass > published_report.target_mass


def test_impulse_mimetic_has_impulses_in_the_first_half_and_similar_tokens_in_the_second():
    weights = si.impulse_mimetic(target_mass=0.3)(RNG, SITE)
    assert weights.filter_index.shape == (LAYERS // 2, HEADS)
    assert len(weights.query) == LAYERS
    targets = target_maps(GRID)[weights.filter_index]
    mass, hits = mass_and_hits(head_maps(weights)[: LAYERS // 2], targets)
    np.testing.assert_allclose(mass, 0.3, atol=0.01)
    assert hits == 1
    products = np.einsum("LDhd,LEhd->LhDE", weights.query, weights.key)
    own = np.trace(products, axis1=2, axis2=3) / WIDTH
    assert own[LAYERS // 2 :].min() > 0.2
    assert own[LAYERS // 2 :].min() > 2 * abs(own[: LAYERS // 2]).max()


@pytest.mark.parametrize("grid", [(5, 7), (10, 10)])
@pytest.mark.parametrize("kind", ["noise", "rows and columns"])
def test_fixed_positions_of_any_kind_are_solved_for(grid, kind):
    """Encodings other than sin-cos, of full and of low rank, need smaller steps."""
    rng = np.random.default_rng(0)
    y, x = np.divmod(np.arange(grid[0] * grid[1]), grid[1])
    if kind == "noise":
        positions = rng.normal(size=(len(x), 96))
    else:
        positions = rng.normal(size=(grid[0], 96))[y] + rng.normal(size=(grid[1], 96))[x]
    site = make_site(grid=grid, width=96, positions=positions.astype(np.float32))
    assert si.impulse()(RNG, site).report.hit_rate > 0.99


@pytest.mark.parametrize(
    ("grid", "scheme"), [((4, 4), si.impulse_mimetic()), ((3, 3), si.impulse(target_mass=0.2))]
)
def test_soft_maps_on_few_tokens_peak_on_their_targets(grid, scheme):
    site = make_site(grid=grid, positions=si.sincos_positions(grid, WIDTH))
    assert scheme(RNG, site).report.hit_rate > 0.95


def test_given_filters_and_dilated_impulses_are_approached():
    box = si.impulse(filters=np.ones((1, 3, 3), np.float32), target_mass=0.6)(RNG, SITE)
    np.testing.assert_allclose(box.report.target_mass, 0.6, atol=0.01)
    dilated = si.impulse(dilation=2, target_mass=0.4)(RNG, SITE)
    targets = target_maps(GRID, dilation=2)[dilated.filter_index]
    np.testing.assert_allclose(mass_and_hits(head_maps(dilated), targets)[0], 0.4, atol=0.01)


def test_a_target_mass_out_of_reach_warns():
    site = si.AttentionSite((8, 8), 96, 6, 16, 1, 16**-0.5, si.sincos_positions((8, 8), 96))
    scheme = si.impulse(filters=np.eye(3)[None], target_mass=0.5)
    sizes = dict(image_size=8, patch_size=1, channels=1, width=96, depth=1, num_heads=6)
    with pytest.warns(UserWarning, match=r"less than target_mass=0\.5") as caught:
        report = scheme(RNG, site).report
    assert report.target_mass < 0.95 * report.wanted_mass
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match=r"less than target_mass=0\.5") as caught:
        si.VisionTransformer(**sizes, attention_init=scheme, rngs=nnx.Rngs(0))
    assert caught[0].filename == __file__


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


IMPULSE_AND_BOX = np.stack([np.eye(9)[0].reshape(3, 3), np.ones((3, 3))])


@pytest.mark.parametrize(
    ("field", "options"),
    [
        (r"filters=array of shape \(3, 3\)", dict(filters=np.ones((3, 3)))),
        ("filters=.* zero", dict(filters=np.zeros((1, 3, 3)))),
        ("filters=.* finite", dict(filters=np.full((1, 3, 3), np.inf))),
        ("filters", dict(filters=-np.ones((1, 3, 3)))),
        ("filters", dict(filters=np.ones((1, 4, 4)))),
        ("grid=.* dilation", dict(dilation=5)),
        ("grid=.* dilation", dict(dilation=200_000)),
        # Uniform attention puts 9 / 35 on the second filter.
        ("target_mass=0.2", dict(filters=IMPULSE_AND_BOX, target_mass=0.2)),
        ("target_mass=0.3.* a larger grid", dict(filters=np.ones((1, 15, 15)))),
    ],
)
def test_filters_that_do_not_fit_the_site_are_refused(field, options):
    with pytest.raises(InputError, match=f"^{field}"):
        si.impulse(**options)(RNG, SITE)


def test_positions_are_required_and_checked():
    with pytest.raises(InputError, match=r"AttentionSite.positions=None"):
        si.impulse()(RNG, make_site(positions=None))
    one = make_site(grid=(1, 1), positions=np.ones((1, WIDTH)), positions_trainable=True)
    with pytest.raises(InputError, match=r"tokens=1 must be 2 or more.*smaller patches"):
        si.impulse()(RNG, one)
    infinite = np.where(np.eye(35, WIDTH), np.float32(np.inf), np.float32(0))
    for same in (np.ones((35, WIDTH), np.float32), jnp.full((35, WIDTH), jnp.nan), infinite):
        for scheme in (si.impulse_2025(), si.impulse(replace_positions=False)):
            site = make_site(positions=same, positions_trainable=True)
            with pytest.raises(InputError, match=r"^AttentionSite\.positions="):
                scheme(RNG, site)
