"""Every model with every scheme that fits it: traced, sharded, in bfloat16, and able to learn."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from structinit_jax import attention_init
from structinit_jax.errors import InputError
from structinit_jax.models.registry import FAMILIES, VARIANTS, create_model, default_options
from structinit_jax.training.state import split_model

SIZES = {
    "vit": dict(width=16, depth=2, num_heads=2, patch_size=2),
    "swin": dict(width=16, depths=(2, 1), num_heads=(2, 4), patch_size=1, window_size=4),
    "mixer": dict(width=16, depth=2, patch_size=2, token_mlp_ratio=2.0),
    "convmixer": dict(width=16, depth=2, patch_size=2, kernel_size=3),
}
SCHEMES = {
    "vit": sorted(attention_init.SCHEMES),
    "swin": ["default", "impulse", "kaiming_uniform", "mimetic"],
    "mixer": ["default", "impulse", "kaiming_uniform", "mimetic"],
    "convmixer": ["default", "impulse", "impulse_2024", "kaiming_uniform"],
}
OPTIONS = {"impulse_2024": dict(max_steps=3)}
pytestmark = pytest.mark.usefixtures("library_promotion")


def make(family, **changes):
    options = default_options(family) | SIZES[family] | dict(num_classes=4, dtype="bfloat16")
    options.pop("image_size", None)
    return create_model(options | changes, image_size=8, channels=1, rngs=nnx.Rngs(params=0))


def scheme_of(family, name):
    options = dict(OPTIONS.get(name, {})) if family == "vit" else {}
    return attention_init.by_name(name, **options)


@pytest.mark.parametrize(
    ("family", "name"), [(family, name) for family in SCHEMES for name in SCHEMES[family]]
)
def test_every_model_learns_from_every_scheme(family, name):
    graphdef, *start = split_model(make(family))
    scheme = scheme_of(family, name)
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("data",))
    everywhere, split = (
        NamedSharding(mesh, spec) for spec in (PartitionSpec(), PartitionSpec("data"))
    )

    def init(params, state, key):
        model = nnx.merge(graphdef, params, state)
        model.initialize_attention(scheme, key)
        return split_model(model)[1:]

    key = jax.random.key(0)
    shapes = jax.eval_shape(init, *start, key)
    params, state = jax.jit(init, out_shardings=everywhere)(*start, key)
    assert jax.tree.map(jnp.shape, (params, state)) == jax.tree.map(jnp.shape, shapes)
    assert {leaf.dtype.name for leaf in jax.tree.leaves((params, state))} == {"float32"}

    images = jax.device_put(jax.random.normal(jax.random.key(1), (8, 8, 8, 1)), split)
    labels = jax.device_put(jnp.arange(8) % 4, split)

    @jax.jit
    def loss_and_grads(params):
        def loss(params):
            logits, _ = nnx.merge(graphdef, params, state)(images, key=key)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean()

        return jax.value_and_grad(loss)(params)

    before, grads = loss_and_grads(params)
    assert all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(grads))
    norm = optax.tree.norm(grads)
    after, _ = loss_and_grads(jax.tree.map(lambda p, g: p - 0.02 * g / norm, params, grads))
    assert after < before


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("swin", "impulse_2024"),
        ("swin", "impulse_2025"),
        ("mixer", "impulse_2024"),
        ("mixer", "impulse_2025"),
        ("convmixer", "impulse_2025"),
        ("convmixer", "mimetic"),
    ],
)
def test_schemes_that_do_not_fit_a_model_say_so(family, name):
    with pytest.raises(InputError, match=rf"attention_init\.name='{name}'.* use 'impulse'"):
        make(family).initialize_attention(scheme_of(family, name), jax.random.key(0))


def test_names_are_found_and_wrong_ones_answered_with_near_ones():
    assert set(FAMILIES) == set(SIZES)
    for name, (family, sizes) in VARIANTS.items():
        options = default_options(name)
        assert options["name"] == family
        assert sizes.items() <= options.items()
    with pytest.raises(InputError, match=r"'swin_tiny_224' is no model: near ones are swin_tiny_p"):
        default_options("swin_tiny_224")
    with pytest.raises(InputError, match=r"variant of 'vit': start the config from base_config\("):
        make("vit", name="vit_tiny_patch16_224")
