import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from flax import nnx

from structinit_jax.attention_init.targets import relative_index
from structinit_jax.models.swin import SwinTransformer, shift_mask, spread_bias
from structinit_jax.models.timm import from_timm, to_timm
from structinit_jax.training.state import split_model

REFERENCES = references.load("swin")
SMALL = dict(channels=2, num_classes=5, width=8, num_heads=(2, 4), mlp_ratio=2.0)
CASES = {
    "shifted": dict(image_size=32, depths=(4, 2), window_size=4),
    "padded": dict(image_size=(28, 44), depths=(2, 3), window_size=4),
    "single": dict(image_size=30, depths=(2, 1), window_size=8),
}
WITH_GRADIENT = "padded"  # shifted too


def make(name, **options):
    return SwinTransformer(**SMALL, **(CASES[name] | options), rngs=nnx.Rngs(0))


@functools.cache
def outcome(name):
    """Logits, intermediates and, in timm's layout, the gradient of sum(cotangent · logits)."""
    model = nnx.eval_shape(lambda: make(name))
    from_timm(model, references.part(REFERENCES, f"{name}/weights"))
    graphdef, params, _ = split_model(model)
    images, cotangent = (jnp.asarray(REFERENCES[f"{name}/{k}"]) for k in ("images", "cotangent"))

    def loss(params):
        logits, out = nnx.merge(graphdef, params)(images, with_maps=True)
        return jnp.sum(logits * cotangent), (logits, out)

    if name != WITH_GRADIENT:
        return *jax.device_get(jax.jit(loss)(params)[1]), None
    gradient, (logits, out) = jax.device_get(jax.jit(jax.grad(loss, has_aux=True))(params))
    return logits, out, to_timm(nnx.merge(graphdef, gradient))


@pytest.mark.parametrize("name", CASES)
def test_every_block_and_the_logits_equal_timm(name):
    logits, out, _ = outcome(name)
    expected = references.part(REFERENCES, f"{name}/blocks")
    assert len(expected) == sum(CASES[name]["depths"])
    for block, value in expected.items():
        _, stage, _, layer = block.split(".")
        ours = out["stages"][int(stage)]["blocks"]["output"][int(layer)]
        np.testing.assert_allclose(ours, value, atol=1e-4, err_msg=block)
    np.testing.assert_allclose(logits, REFERENCES[f"{name}/logits"], atol=1e-4)


def test_gradients_equal_timm():
    gradient = outcome(WITH_GRADIENT)[2]
    expected = references.part(REFERENCES, f"{WITH_GRADIENT}/gradients")
    assert gradient.keys() == expected.keys()
    for key, value in expected.items():
        scale = np.abs(value).max()
        np.testing.assert_allclose(gradient[key], value, atol=1e-3 * scale, err_msg=key)


def test_maps_are_zero_where_the_mask_of_their_window_says():
    maps = outcome("shifted")[1]["stages"][0]["blocks"]["attention_maps"]
    masked = shift_mask((8, 8), (4, 4), (2, 2))[:, None] < 0
    np.testing.assert_array_equal(maps[1] < 1e-9, np.broadcast_to(masked, maps[1].shape))
    assert np.all(maps[0] > 1e-9)


def test_the_position_bias_is_read_without_a_scatter_in_the_gradient():
    window, table = (2, 3), jax.random.normal(jax.random.key(0), (15, 4))
    expected = np.moveaxis(np.asarray(table)[relative_index(window)], -1, 0)
    np.testing.assert_array_equal(spread_bias(table, window), expected)
    graphdef, params, _ = split_model(nnx.eval_shape(lambda: make("shifted", depths=(2, 2))))

    def loss(params):
        return nnx.merge(graphdef, params)(jnp.ones((1, 32, 32, 2)))[0].sum()

    assert "scatter" not in str(jax.make_jaxpr(jax.grad(loss))(params))
