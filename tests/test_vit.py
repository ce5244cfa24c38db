import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import references
from flax import nnx
from references.vit_cases import CASES, SMALL

from structinit_jax.attention_init import AttentionWeights
from structinit_jax.attention_init.sites import AttentionSizes
from structinit_jax.models.layers import drop_path
from structinit_jax.models.timm import from_timm, select_weights, to_timm
from structinit_jax.models.vit import VisionTransformer
from structinit_jax.training.state import split_model

WITH_GRADIENTS = ("class_token", "layer_scale", "rope_class_token")
SIZES = dict(image_size=8, patch_size=2, channels=1, num_classes=10, width=16, depth=3, num_heads=2)
IMAGES = jnp.asarray(np.random.default_rng(1).standard_normal((2, 8, 8, 1), np.float32))


def make(**options):
    return VisionTransformer(**(SIZES | options), rngs=nnx.Rngs(0))


def make_timm(**options):
    return make(**(SMALL | dict(positions="learned") | options))


@functools.cache
def recorded(case):
    """timm's arrays, from references/make_vit.py."""
    return references.part(references.load("vit"), case)


@functools.cache
def outcome(case):
    """Logits, block outputs, and the gradients for weights (in timm's layout) and images."""
    arrays = recorded(case)
    model = nnx.eval_shape(lambda: make_timm(**CASES[case]))
    from_timm(model, references.part(arrays, "state"))
    graphdef, params, _ = split_model(model)

    def loss_fn(params, images):
        logits, out = nnx.merge(graphdef, params)(images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.array([1, 3]))
        return losses.mean(), (logits, out["blocks"]["output"])

    images = jnp.asarray(arrays["images"])
    if case not in WITH_GRADIENTS:
        return *jax.jit(loss_fn)(params, images)[1], None, None
    grad_fn = jax.jit(jax.grad(loss_fn, argnums=(0, 1), has_aux=True))
    (param_grads, image_grads), (logits, blocks) = grad_fn(params, images)
    return logits, blocks, to_timm(nnx.merge(graphdef, param_grads)), image_grads


@pytest.mark.parametrize("case", CASES)
def test_logits_and_blocks_equal_timm(case):
    logits, blocks, *_ = outcome(case)
    np.testing.assert_allclose(blocks, recorded(case)["blocks"], atol=1e-4)
    np.testing.assert_allclose(logits, recorded(case)["logits"], atol=1e-4)


@pytest.mark.parametrize("case", WITH_GRADIENTS)
def test_gradients_equal_timm(case):
    *_, param_grads, image_grads = outcome(case)
    image_gradient = recorded(case)["image_gradient"]
    np.testing.assert_allclose(image_grads, image_gradient, atol=1e-5, rtol=1e-3)
    gradients = references.part(recorded(case), "gradient")
    assert param_grads.keys() == gradients.keys()
    for name, expected in gradients.items():
        # Gradients that cancel out exactly (key biases) are rounding errors in both.
        tolerance = 1e-3 * np.abs(expected).max() + 1e-6
        np.testing.assert_allclose(param_grads[name], expected, atol=tolerance, err_msg=name)


def test_weights_are_loaded_at_another_resolution_as_timm_does_it():
    state_dict = references.part(recorded("layer_scale"), "state")
    student = make_timm(**CASES["layer_scale"] | dict(image_size=12, num_classes=7))
    model = select_weights(state_dict, student)
    pooled = jax.jit(model)(jnp.asarray(recorded("larger_images")["images"]))[1]["pooled"]
    np.testing.assert_allclose(pooled, recorded("larger_images")["pooled"], atol=1e-4)
    np.testing.assert_array_equal(model.head.kernel[...], student.head.kernel[...])


def test_a_block_drops_what_its_branches_add():
    x, rng = jax.random.normal(jax.random.key(2), (8, 16, 16)), jax.random.key(0)
    block = jax.tree.map(lambda leaf: leaf[0], make().blocks)
    run = jax.jit(lambda x, rate, rng: block(x, drop_path_rate=rate, rng=rng)[0])
    np.testing.assert_array_equal(run(x, jnp.float32(0.9999), rng), x)


def test_drop_path_keeps_expectation_and_drops_whole_examples():
    y = drop_path(jnp.ones((4000, 3, 2)), jnp.float32(0.25), jax.random.key(0))
    per_example = np.asarray(y).reshape(4000, -1)
    assert np.all(per_example == per_example[:, :1])
    assert set(np.unique(per_example.round(4))) == {0, np.float32(1.3333)}
    assert abs(per_example.mean() - 1) < 0.03


def test_class_token_gets_no_sincos_position():
    model = make(pool="class_token", depth=1)
    embedded = jax.jit(lambda model: model(IMAGES)[1]["embedded"])(model)
    np.testing.assert_allclose(embedded[0, 0], model.class_token[...], atol=1e-7)


@pytest.mark.parametrize(("pool", "num_prefix"), [("mean", 0), ("class_token", 1)])
def test_attention_init_is_asked_once_and_put_in_place(pool, num_prefix):
    calls = []

    def init(rng, site):
        calls.append(site)
        shape = (site.num_layers, site.width, site.num_heads, site.head_dim)
        positions = jnp.full((site.num_tokens, site.width), 3.0, jnp.float32)
        return AttentionWeights(jnp.full(shape, 2.0), positions=positions, position_scale=18.0)

    options = dict(pool=pool, positions="learned")
    own = make(**options)
    model = make(**options, attention_init=init)
    (site,) = calls
    assert site.sizes == AttentionSizes((4, 4), 16, 2, 8, num_layers=3, qk_scale=8**-0.5)
    np.testing.assert_array_equal(site.positions, own.positions[...][num_prefix:])
    assert np.all(model.blocks.attention.query.kernel[...] == 2)
    key = own.blocks.attention.key.kernel[...]
    np.testing.assert_array_equal(model.blocks.attention.key.kernel[...], key)
    # A class token's own position is scaled too.
    expected = np.concatenate([own.positions[...][:num_prefix], np.full((16, 16), 3.0)])
    np.testing.assert_allclose(model.positions[...], 18 * expected, rtol=1e-6)
    half = jax.tree.map(lambda array: array.astype(jnp.bfloat16), own)
    half.initialize_attention(init, jax.random.key(0))
    assert half.positions.dtype == jnp.bfloat16
    np.testing.assert_allclose(half.positions[...].astype(float), 18 * expected, rtol=1e-2)
