import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import structinit_jax as si
from structinit_jax.attention_init import draws
from structinit_jax.errors import InputError

WIDTH, LAYERS = 48, 4
SITE = si.AttentionSite((7, 5), WIDTH, 3, 16, LAYERS, 0.25, si.sincos_positions((7, 5), WIDTH))
RNG = jax.random.key(0)


def similar_heads(site):
    none = jnp.zeros((0, site.width, site.num_heads, site.head_dim))
    return jax.jit(draws.append_similar_heads, static_argnums=1)(RNG, site.sizes, none, none)


def test_similar_heads_have_as_much_of_the_identity_as_mimetics_factors():
    query, key = similar_heads(SITE)
    products = np.einsum("LDhd,LEhd->LhDE", query, key)
    factors = si.mimetic()(RNG, SITE)
    best = np.einsum("LDhd,LEhd->LhDE", factors.query, factors.key)
    for measure in (lambda p: np.trace(p, axis1=2, axis2=3).mean(), np.linalg.norm):
        assert 0.93 < measure(products) / measure(best) < 1.02
    for each in (products, best):  # every head of every layer has its own noise
        assert min(np.abs(np.diff(each, axis=axis)).max() for axis in (0, 1)) > 0.1
    sizes = [np.linalg.norm(w, axis=(1, 3)) for w in (query, key)]
    np.testing.assert_allclose(*sizes, rtol=1e-4)


def test_heads_almost_as_wide_as_the_model_have_finite_weights():
    site = dataclasses.replace(SITE, width=65, num_heads=1, head_dim=64, positions=None)
    query, key = similar_heads(site)
    products = np.einsum("LDhd,LEhd->LhDE", query, key)
    assert 0.6 < np.trace(products, axis1=2, axis2=3).mean() / 65 < 0.75


@pytest.mark.parametrize(("heads", "dim"), [(1, WIDTH), (2, WIDTH + 16)])
def test_heads_as_wide_as_the_model_attend_to_similar_tokens(heads, dim):
    query, key = similar_heads(dataclasses.replace(SITE, num_heads=heads, head_dim=dim))
    noise = np.einsum("LDhd,LEhd->LhDE", query, key) - 0.7 * np.eye(WIDTH)
    # The full 0.7 U + 0.7 I, where U is uniform.
    np.testing.assert_allclose(np.abs(noise).max(), 0.7 * (3 / WIDTH) ** 0.5, rtol=0.01)


def test_the_product_of_value_and_projection_is_near_minus_the_identity():
    value, out = draws.value_and_projection(RNG, SITE)
    noise = np.einsum("LDhd,LhdE->LDE", value, out) + 0.4 * np.eye(WIDTH)
    np.testing.assert_allclose(noise.std(), 0.4 * WIDTH**-0.5, rtol=0.3)
    assert abs(noise.mean()) < 0.01
    strengths = np.linalg.norm(np.einsum("LDhd,LhdE->LhDE", value, out), axis=(2, 3))
    assert strengths.max() / strengths.min() < 1.3
    assert np.abs(out + np.moveaxis(value, 1, 3)).max() > 0.1  # each has its own noise
    channels = np.abs(value).argmax(axis=1).reshape(LAYERS, WIDTH)
    np.testing.assert_array_equal(np.sort(channels), np.tile(np.arange(WIDTH), (LAYERS, 1)))
    assert len(np.unique(channels, axis=0)) == LAYERS


@pytest.mark.parametrize("heads", [6, 7])
def test_more_heads_do_not_make_the_product_larger(heads):
    value, out = draws.value_and_projection(RNG, dataclasses.replace(SITE, num_heads=heads))
    product = np.einsum("LDhd,LhdE->LDE", value, out)
    np.testing.assert_allclose(np.trace(product, axis1=1, axis2=2) / WIDTH, -0.4, rtol=0.05)


def test_mimetic_weights_are_the_programs_factors_as_stored_by_pytorch():
    weights = si.mimetic()(RNG, dataclasses.replace(SITE, num_heads=1, head_dim=WIDTH))
    qk = np.einsum("LDhd,LEhd->LDE", weights.query, weights.key)
    # In PyTorch's [out, in] layout, with all heads, V is U S^1/2 and Proj is S^1/2 Vᵀ.
    v, out = (np.swapaxes(w, 1, 2) for w in (weights.value[:, :, 0], weights.out[:, 0]))
    v, out = np.asarray(v), np.asarray(out)
    for product, scale, diagonal in ((qk, 0.7, 0.7), (v @ out, 0.4, -0.4)):
        noise = product - diagonal * np.eye(WIDTH)
        assert abs(noise.std() - scale * WIDTH**-0.5) < 0.1 * scale * WIDTH**-0.5
        assert np.abs(noise).max() <= scale * (3 / WIDTH) ** 0.5 + 1e-4
    singular = np.swapaxes(v, 1, 2) @ v
    np.testing.assert_allclose(singular, out @ np.swapaxes(out, 1, 2), atol=1e-4)
    np.testing.assert_allclose(singular, singular * np.eye(WIDTH), atol=1e-4)


@pytest.mark.parametrize("rank", [8, 24])
def test_a_product_is_split_as_by_its_singular_values(rank):
    products = draws.near_identity(RNG, (2, 24), noise=0.7, identity=0.7)
    a, b = draws.split_product(products, rank)
    u, s, vt = np.linalg.svd(products)
    best = np.einsum("LDk,Lk,LkE->LDE", u[..., :rank], s[:, :rank], vt[:, :rank])
    np.testing.assert_allclose(np.einsum("LDk,LEk->LDE", a, b), best, atol=1e-5)
    for factor in (a, b):
        gram = np.einsum("LDk,LDl->Lkl", factor, factor)
        np.testing.assert_allclose(gram, s[:, :rank, None] * np.eye(rank), atol=1e-5)


def test_more_channels_in_heads_than_in_the_model_are_refused():
    wide_heads = dataclasses.replace(SITE, num_heads=2, head_dim=32)
    with pytest.raises(InputError, match=r"num_heads=2 .*48 / 32"):
        jax.eval_shape(lambda rng: si.mimetic()(rng, wide_heads), RNG)
