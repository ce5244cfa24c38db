import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from structinit_jax import attention_init
from structinit_jax.attention_init import AttentionSite, sincos_positions
from structinit_jax.attention_init import kernels as kernels_lib
from structinit_jax.attention_init.pseudo_input import layer_norm
from structinit_jax.errors import InputError

GRID, WIDTH, HEADS, DIM, LAYERS = (6, 6), 32, 4, 8, 3
OPTIONS = {"impulse_2024": {"max_steps": 20}}


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


@pytest.fixture(scope="module")
def impulse_weights():
    # Sharper than the default, which such a narrow model leaves soft.
    return attention_init.impulse(vo_init="default", norm=1.5)(jax.random.key(0), make_site())


def head_maps(weights, positions):
    x = layer_norm(np.asarray(positions))
    logits = np.einsum("nD,LDhd,LEhd,mE->Lhnm", x, weights.query, weights.key, x, optimize=True)
    return np.asarray(jax.nn.softmax(jnp.asarray(logits) * DIM**-0.5, axis=-1))


@pytest.mark.parametrize("name", sorted(attention_init.SCHEMES))
def test_every_scheme_has_the_documented_shapes_also_when_traced(name, request):
    if name == "impulse_2024":  # Adam relies on promotion
        request.getfixturevalue("library_promotion")
    scheme = attention_init.by_name(name, **OPTIONS.get(name, {}))
    site = make_site()
    eager = scheme(jax.random.key(0), site)
    for field, shape in (
        ("query", (LAYERS, WIDTH, HEADS, DIM)),
        ("key", (LAYERS, WIDTH, HEADS, DIM)),
        ("value", (LAYERS, WIDTH, HEADS, DIM)),
        ("out", (LAYERS, HEADS, DIM, WIDTH)),
    ):
        if getattr(eager, field) is None:
            assert name == "impulse_2024"
            assert field in ("value", "out")
            continue
        assert getattr(eager, field).shape == shape
        assert getattr(eager, field).dtype == jnp.float32
        assert np.all(np.isfinite(getattr(eager, field)))
    abstract = jax.eval_shape(lambda key: scheme(key, site), jax.random.key(0))
    assert jax.tree.map(jnp.shape, eager) == jax.tree.map(jnp.shape, abstract)
    jitted = jax.jit(lambda key: scheme(key, site))(jax.random.key(0))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), eager, jitted)
    other = scheme(jax.random.key(1), site)
    assert np.abs(other.query - eager.query).max() > 1e-3


def test_each_impulse_head_attends_to_one_neighbour(impulse_weights):
    maps = head_maps(impulse_weights, make_site().positions)
    targets = kernels_lib.convolution_maps(kernels_lib.impulse_kernels(3), GRID)
    for layer, head in itertools.product(range(LAYERS), range(HEADS)):
        peaks = maps[layer, head].argmax(-1)
        hits = [np.mean(peaks[t.sum(-1) > 0] == t.argmax(-1)[t.sum(-1) > 0]) for t in targets]
        assert max(hits) > 0.9
    share = np.max(np.einsum("Lhnm,fnm->Lhf", maps, targets), axis=-1) / 25
    assert share.min() > 0.3  # a uniform map has 1/36


def test_equal_filters_have_equal_maps_and_independent_weights():
    site = make_site(num_heads=4, num_layers=5)  # 20 heads of 9 filters: some must repeat
    weights = attention_init.impulse(vo_init="default")(jax.random.key(0), site)
    maps = head_maps(weights, site.positions).reshape(20, -1)
    query = np.moveaxis(np.asarray(weights.query), 2, 1).reshape(20, -1)
    distance = np.abs(maps[:, None] - maps[None]).max(-1)
    pairs = [(i, j) for i, j in itertools.combinations(range(20), 2) if distance[i, j] < 1e-3]
    assert len(pairs) >= 11
    for i, j in pairs:
        cosine = query[i] @ query[j] / np.linalg.norm(query[i]) / np.linalg.norm(query[j])
        assert abs(cosine) < 0.6


def test_impulse_queries_ignore_what_the_encoding_does_not_span(impulse_weights):
    x = layer_norm(sincos_positions(GRID, WIDTH))
    _, s, vt = np.linalg.svd(x)
    beyond = vt[np.sum(s > 1e-4 * s[0]) :]
    assert len(beyond) > 0
    outside = np.einsum("rD,LDhd->Lrhd", beyond, np.asarray(impulse_weights.query))
    assert np.abs(outside).max() < 1e-5


def test_trainable_positions_start_from_the_encoding_that_was_solved_for():
    site = make_site(positions=jnp.zeros((36, WIDTH)), positions_trainable=True)
    weights = attention_init.impulse(vo_init="default")(jax.random.key(0), site)
    np.testing.assert_array_equal(weights.positions, sincos_positions(GRID, WIDTH))
    assert attention_init.impulse()(jax.random.key(0), make_site()).positions is None


def test_mimetic_products_are_near_the_identity():
    weights = attention_init.mimetic()(jax.random.key(0), make_site(num_heads=1, head_dim=WIDTH))
    qk = np.einsum("LDhd,LEhd->LDE", weights.query, weights.key)
    vo = np.einsum("LDhd,LhdE->LDE", weights.value, weights.out)
    for product, scale, diagonal in ((qk, 0.7, 0.7), (vo, 0.4, -0.4)):
        noise = product - diagonal * np.eye(WIDTH)
        assert abs(noise.std() - scale * WIDTH**-0.5) < 0.1 * scale * WIDTH**-0.5
        assert np.abs(noise).max() <= scale * (3 / WIDTH) ** 0.5 + 1e-4


def test_default_is_a_normal_of_deviation_002():
    weights = attention_init.default()(jax.random.key(0), make_site(num_layers=40))
    for array in weights[:4]:
        assert abs(np.std(array) - 0.02) < 0.001


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("impuls", {}, r"attention_init\.name='impuls' is no scheme: did you mean 'impulse'"),
        ("xyz", {}, r"there are default, kaiming_uniform, mimetic, impulse_2024"),
        ("impulse", {"kernel": 3}, r"attention_init\.kernel: .*did you mean 'kernel_size'"),
        ("default", {"kernel_size": 3}, r"attention_init\.kernel_size: .*takes no options"),
        ("impulse", {"kernel_size": 4}, r"attention_init\.kernel_size=4: .*odd and positive"),
        ("impulse", {"offsets": "all"}, r"attention_init\.offsets='all': choose one of even"),
        ("impulse", {"vo_init": "x"}, r"attention_init\.vo_init='x': choose one of balanced"),
        ("impulse", {"norm": 0.0}, r"attention_init\.norm=0\.0: .* positive"),
        ("impulse", {"max_steps": 0}, r"attention_init\.max_steps=0"),
    ],
)
def test_wrong_names_and_options_are_refused(name, options, message):
    with pytest.raises(InputError, match=message):
        attention_init.by_name(name, **options)


def test_sites_that_cannot_be_solved_are_refused():
    scheme = attention_init.impulse(kernel_size=7)
    with pytest.raises(InputError, match=r"kernel_size=7 is larger than the token grid 6x6"):
        scheme(jax.random.key(0), make_site())
    with pytest.raises(InputError, match=r"needs a model that adds positions"):
        attention_init.impulse()(jax.random.key(0), make_site(positions=None))
    with pytest.raises(InputError, match=r"positions has shape \(37, 32\).* need \(36, 32\)"):
        make_site(positions=np.zeros((37, WIDTH), np.float32))
