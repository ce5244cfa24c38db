"""Every model family: sites, every scheme, and what is refused."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tiny_models import EVERYWHERE, SIZES, make, train_fn

from structinit_jax import attention_init
from structinit_jax.errors import InputError
from structinit_jax.models import FAMILIES, create_model, default_config
from structinit_jax.training.state import split_model

SITES = {
    "vit": {"blocks": attention_init.AttentionSite},
    "swin": {"stage1": attention_init.WindowSite, "stage2": attention_init.WindowSite},
    "mixer": {"blocks": attention_init.TokenMixingSite},
    "convmixer": {"blocks": attention_init.ConvSite},
}
SCHEMES = {
    "vit": sorted(attention_init.SCHEMES),
    "swin": ["default", "impulse", "kaiming_uniform", "mimetic"],
    "mixer": ["default", "impulse", "kaiming_uniform", "mimetic"],
    "convmixer": ["default", "impulse", "impulse_2024", "kaiming_uniform"],
}
OPTIONS = {"impulse_2024": dict(max_steps=3)}
pytestmark = pytest.mark.usefixtures("library_promotion")


def scheme_of(family, name):
    return attention_init.SCHEMES[name](**(OPTIONS.get(name, {}) if family == "vit" else {}))


@jax.jit
def descend(params, grads):
    norm = optax.tree.norm(grads)
    return jax.tree.map(lambda p, g: p - 0.02 * g / norm, params, grads)


@pytest.mark.parametrize(
    ("family", "name"), [(family, name) for family in SCHEMES for name in SCHEMES[family]]
)
def test_every_model_learns_from_every_scheme(family, name):
    graphdef, *start = split_model(make(family, dtype="bfloat16"))
    scheme, rng = scheme_of(family, name), jax.random.key(0)

    def init(params, state, rng):
        model = nnx.merge(graphdef, params, state)
        model.initialize_attention(scheme, rng)
        return split_model(model)[1:]

    params, state = jax.jit(init, out_shardings=EVERYWHERE)(*start, rng)
    assert jax.tree.map(jnp.shape, [params, state]) == jax.tree.map(jnp.shape, start)
    loss_and_grads = train_fn(family, dtype="bfloat16")
    (before, (_, _, after)), grads = loss_and_grads(params, state, rng)
    assert {leaf.dtype.name for leaf in jax.tree.leaves((params, after, grads))} == {"float32"}
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
    assert loss_and_grads(descend(params, grads), state, rng)[0][0] < before


@pytest.mark.parametrize(
    ("family", "weights", "message"),
    [
        ("vit", attention_init.AttentionWeights(np.ones((16, 2, 8))), r"query .*\(16, 2, 8\)"),
        ("vit", attention_init.AttentionWeights(patch_bias=np.ones(1)), r"patch_bias .*\(1,\)"),
        ("swin", attention_init.AttentionWeights(bias=np.ones((49, 1))), r"bias .*\(49, 1\)"),
        ("mixer", attention_init.TokenMixingWeights(fc1=np.ones((16, 1))), r"fc1 .*\(16, 1\)"),
        ("convmixer", attention_init.ConvWeights(np.ones((3, 3, 16))), r"kernel .*\(3, 3, 16\)"),
    ],
)
def test_weights_that_would_be_broadcast_are_refused(family, weights, message):
    with pytest.raises(InputError, match=rf"weights\.{message}, but the model needs"):
        make(family).initialize_attention(lambda rng, site: weights, jax.random.key(0))


def test_an_initialized_model_has_the_tree_of_a_new_one():
    new, initialized = make("vit"), nnx.clone(make("vit"))
    scales = attention_init.AttentionWeights(patch_scale=0.3, mlp_scale=0.0)
    initialized.initialize_attention(lambda rng, site: scales, jax.random.key(0))
    difference = jax.tree.map(jnp.subtract, initialized, new)
    assert difference.patch_embedding.kernel[...].any()


def test_a_decorated_scheme_is_one():
    def with_option(rng, site, option):
        return attention_init.default()(rng, site)

    @functools.wraps(with_option)
    def scheme(rng, site):
        return with_option(rng, site, option=1)

    make("vit").start_weights(scheme, jax.random.key(0))


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("vit", "depth", 0),
        ("vit", "num_heads", 0),
        ("vit", "width", -16),
        ("vit", "drop_path", 1.0),
        ("vit", "layer_scale", -1.0),
        ("vit", "num_registers", -1),
        ("swin", "depths", (2, 0)),
        ("swin", "num_heads", (2, 0)),
        ("mixer", "mlp_mean", float("nan")),
        ("convmixer", "unroll", -1),
        *((family, "patch_size", 0) for family in SIZES),
    ],
)
def test_constructors_refuse_fields_out_of_range(family, field, value):
    with pytest.raises(InputError, match=rf"^config\.model\.{field}={re.escape(repr(value))} must"):
        make(family, **{field: value})


@pytest.mark.parametrize("image_size", [0, (8, 0)])
def test_constructors_refuse_images_without_two_sides(image_size):
    with pytest.raises(InputError, match=r"config\.data\.image_size="):
        create_model(
            default_config("mixer") | SIZES["mixer"] | dict(image_size=image_size),
            channels=1,
            rngs=nnx.Rngs(0),
        )


@pytest.mark.parametrize(
    ("family", "shape", "message"),
    [
        ("vit", (1, 4, 16, 1), "images have 2x8 patches, but the model was built for 4x4"),
        ("mixer", (1, 4, 16, 1), "images have 2x8 patches, but the model was built for 4x4"),
        ("vit", (1, 8, 8, 3), r"images have shape \(1, 8, 8, 3\), .*\[B, H, W, 1\]"),
        ("convmixer", (1, 9, 8, 1), r"images have shape \(1, 9, 8, 1\), .*patch size 2"),
    ],
)
def test_images_that_the_model_was_not_built_for_are_refused(family, shape, message):
    with pytest.raises(InputError, match=message):
        make(family)(jnp.zeros(shape))


@pytest.mark.parametrize("family", FAMILIES)
def test_sites_name_the_stacks(family):
    sites = make(family).sites()
    assert {name: type(site) for name, site in sites.items()} == SITES[family]
    abstract = nnx.eval_shape(lambda: make.__wrapped__(family)).sites()
    assert [s.num_layers for s in abstract.values()] == [s.num_layers for s in sites.values()]
