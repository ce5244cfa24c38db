import jax
import jax.numpy as jnp
import numpy as np
import pytest

from structinit_jax.attention_init import AttentionSite, impulse, sincos_positions
from structinit_jax.attention_init import kernels as kernels_lib
from structinit_jax.attention_init.pseudo_input import layer_norm
from structinit_jax.errors import InputError

GRID, WIDTH, HEADS, DIM, LAYERS = (7, 5), 48, 3, 16, 4


def make_site(**changes):
    fields = dict(
        grid=GRID,
        width=WIDTH,
        num_heads=HEADS,
        head_dim=DIM,
        num_layers=LAYERS,
        qk_scale=DIM**-0.5,
        positions=sincos_positions(GRID, WIDTH),
    )
    return AttentionSite(**(fields | changes))


def make(**options):
    return impulse(vo_init="default", **options)(jax.random.key(0), make_site())


def head_maps(weights):
    x = layer_norm(sincos_positions(GRID, WIDTH))
    logits = np.einsum("nD,LDhd,LEhd,mE->Lhnm", x, weights.query, weights.key, x, optimize=True)
    return np.asarray(jax.nn.softmax(jnp.asarray(logits) * DIM**-0.5, axis=-1))


def shares(maps, targets):
    return np.minimum(maps, targets).sum((-1, -2)) / (targets.max(-1) > 0).sum(-1)


def test_every_head_has_the_filter_that_the_weights_name():
    weights = make(target_mass=0.5)
    targets = kernels_lib.convolution_maps(kernels_lib.impulse_kernels(3), GRID)[
        weights.filter_index
    ]
    np.testing.assert_allclose(shares(head_maps(weights), targets), 0.5, atol=0.01)
    assert weights.report.hit_rate > 0.99


@pytest.mark.parametrize("name", ["gaussian", "difference_of_gaussians", "box"])
def test_other_filters_are_approached(name):
    weights = make(filters=name, target_mass=0.6)
    np.testing.assert_allclose(weights.report.target_mass, 0.6, atol=0.01)
    if name == "box":
        assert not np.any(weights.filter_index)


def test_kernel_size_and_dilation_may_differ_by_layer():
    weights = make(kernel_size=(1, 3, 3, 5), target_mass=0.4)
    assert not np.any(weights.filter_index[0])
    assert np.all((weights.filter_index[1:3] >= 1) & (weights.filter_index[1:3] < 10))
    assert np.all((weights.filter_index[3] >= 10) & (weights.filter_index[3] < 35))
    assert len(np.unique(weights.filter_index[1:3])) == 6  # covered evenly over the two layers
    dilated = make(dilation=(1, 1, 2, 2), target_mass=0.4)
    targets = kernels_lib.convolution_maps(kernels_lib.impulse_kernels(3, dilation=2), GRID)
    chosen = targets[np.asarray(dilated.filter_index[2:]) - 9]
    np.testing.assert_allclose(shares(head_maps(dilated)[2:], chosen), 0.4, atol=0.01)


def test_given_kernels_and_maps_are_solved_alike():
    kernels = kernels_lib.impulse_kernels(3)[[1, 5]]
    by_kernel = make(filters=kernels, norm=1.0)
    by_map = make(filters=kernels_lib.convolution_maps(kernels, GRID), norm=1.0)
    np.testing.assert_allclose(by_kernel.query, by_map.query, atol=1e-6)


def test_layers_are_equal_on_request():
    weights = make(same_layers=True)
    assert np.array_equal(weights.query[0], weights.query[3])
    assert np.array_equal(weights.filter_index[0], weights.filter_index[3])
    assert not np.array_equal(*make().query[:2])


@pytest.mark.parametrize("vo_init", ["balanced", "mimetic"])
def test_value_and_projection_leave_the_encoding_alone(vo_init):
    x = layer_norm(sincos_positions(GRID, WIDTH))
    kept, plain = (
        impulse(vo_init=vo_init, keep_positions=keep)(jax.random.key(0), make_site())
        for keep in (True, False)
    )
    for name, letters in (("value", "nD,LDhd->Lnhd"), ("out", "nD,LhdD->Lnhd")):
        in_row_space = [
            np.abs(np.einsum(letters, x, getattr(w, name))).max() for w in (kept, plain)
        ]
        assert in_row_space[0] < 1e-2
        assert in_row_space[1] > 1
    np.testing.assert_array_equal(kept.query, plain.query)


def test_balanced_heads_are_equally_strong_and_their_product_near_minus_identity():
    weights = impulse(keep_positions=False)(jax.random.key(0), make_site())
    mimetic = impulse(keep_positions=False, vo_init="mimetic")(jax.random.key(0), make_site())
    for w in (weights, mimetic):
        noise = np.einsum("LDhd,LhdE->LDE", w.value, w.out) + 0.4 * np.eye(WIDTH)
        np.testing.assert_allclose(noise.std(), 0.4 * WIDTH**-0.5, rtol=0.3)
        assert abs(noise.mean()) < 0.01
    strengths = [
        np.linalg.norm(np.einsum("LDhd,LhdE->LhDE", w.value, w.out), axis=(2, 3))
        for w in (weights, mimetic)
    ]
    assert strengths[0].max() / strengths[0].min() < 1.3
    assert strengths[1].max() / strengths[1].min() > 2  # sorted by singular values


@pytest.mark.parametrize("order", ["random", "centre_first"])
def test_offsets_follow_the_order(order):
    weights = make(offsets=order)
    if order == "centre_first":
        assert weights.filter_index.tolist() == [[4, 1, 5]] * LAYERS
    assert weights.filter_index.shape == (LAYERS, HEADS)


def test_sharded_and_single_device_solves_agree():
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    replicated = NamedSharding(mesh, PartitionSpec())
    site = make_site()
    init = jax.jit(lambda key: impulse()(key, site), out_shardings=replicated)
    weights = init(jax.device_put(jax.random.key(0), replicated))
    alone = impulse()(jax.random.key(0), site)
    np.testing.assert_allclose(weights.query, alone.query, atol=1e-4)


def test_learned_random_positions_are_solved_at_full_rank():
    rng = np.random.default_rng(0)
    positions = rng.normal(size=(35, WIDTH)).astype(np.float32)
    site = make_site(positions=positions)
    weights = impulse(target_mass=0.5, vo_init="default")(jax.random.key(0), site)
    np.testing.assert_allclose(weights.report.target_mass, 0.5, atol=0.01)


def test_targets_out_of_reach_are_told():
    site = make_site(num_heads=24, head_dim=2, qk_scale=2**-0.5)
    with pytest.warns(UserWarning, match=r"of the attention rows peak .* head_dim=2"):
        impulse(kernel_size=5, vo_init="default")(jax.random.key(0), site)


@pytest.mark.slow
def test_4096_tokens_are_solved_from_part_of_their_rows():
    grid = (64, 64)
    site = AttentionSite(grid, 64, 2, 32, 2, 32**-0.5, sincos_positions(grid, 64))
    with pytest.warns(UserWarning, match="of the attention rows peak"):  # 30 steps are few
        weights = impulse(norm=2.0, vo_init="default", max_steps=30)(jax.random.key(0), site)
    assert weights.report.target_mass > 0.02  # a uniform map has 0.0002
    assert np.all(np.isfinite(weights.query))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(target_mass=0.0), r"attention_init\.target_mass=0\.0"),
        (dict(target_mass=1.5), r"attention_init\.target_mass=1\.5"),
        (dict(filters="sobel"), r"attention_init\.filters='sobel': choose one of impulse, gauss"),
        (dict(filters=np.ones((3, 3))), r"shape \(3, 3\): it needs kernels \[F, f, f\]"),
        (dict(filters=np.ones((1, 4, 4))), r"shape \(1, 4, 4\).* f odd, or maps \[F, 35, 35\]"),
        (dict(filters=-np.ones((1, 3, 3))), r"negative values"),
        (dict(sigma=0.0, filters="gaussian"), r"attention_init\.sigma=0\.0"),
        (dict(optimizer="sdg"), r"attention_init\.optimizer='sdg'"),
        (dict(kernel_size=(3, 3)), r"kernel_size=\(3, 3\) has 2 values for 4 layers"),
        (dict(kernel_size=7), r"kernel_size=7 is larger than the token grid 7x5"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        make(**options)
