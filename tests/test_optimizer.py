import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from structinit_jax.config import base_config
from structinit_jax.errors import InputError
from structinit_jax.models.vit import VisionTransformer
from structinit_jax.training.optimizer import decay_mask, layer_rates, make_optimizer
from structinit_jax.training.state import split_model


def test_decay_reaches_kernels_and_nothing_else():
    model = nnx.eval_shape(
        lambda: VisionTransformer(
            image_size=8,
            patch_size=2,
            channels=1,
            num_classes=10,
            width=16,
            depth=2,
            num_heads=2,
            positions="learned",
            pool="class_token",
            rngs=nnx.Rngs(0),
        )
    )
    mask = decay_mask(split_model(model)[1])
    names = {
        jax.tree_util.keystr(path, simple=True, separator="/"): decayed
        for path, decayed in jax.tree_util.tree_leaves_with_path(mask)
    }
    decayed = {name for name, value in names.items() if value}
    layers = ("attention/query", "attention/key", "attention/value", "attention/out")
    layers += ("mlp/fc1", "mlp/fc2")
    expected = {f"blocks/{layer}/kernel" for layer in layers}
    assert decayed == expected | {"patch_embedding/kernel", "head/kernel"}
    assert {"positions", "class_token", "blocks/norm1/scale", "head/bias"} <= names.keys()


def test_updates_are_clipped_adamw(library_promotion):
    config = base_config()
    config.update(clip_norm=0.5, weight_decay=0.1, adam_epsilon=1e-3)
    params = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}
    grads = jax.tree.map(lambda x: 3 * x, params)
    ours = make_optimizer(config, lambda step: 0.1)
    update, _ = ours.update(grads, ours.init(params), params)
    clip = 0.5 / optax.tree.norm(grads)
    # The first step of Adam: both moments, bias-corrected, are the gradient and its square.
    gradient = 3 * np.asarray(clip)
    step = -0.1 * gradient / (gradient + 1e-3)
    np.testing.assert_allclose(update["bias"], np.full(2, step), rtol=1e-5)
    np.testing.assert_allclose(update["kernel"], np.full((2, 2), step - 0.1 * 0.1), rtol=1e-5)


def test_layers_far_from_the_head_move_less(library_promotion):
    config = base_config()
    config.update(clip_norm=0.0, weight_decay=0.0, layer_decay=0.5)
    params = {
        "patch_embedding": {"kernel": jnp.ones((4, 3))},
        "blocks": {"mlp": {"kernel": jnp.ones((2, 3, 3)), "bias": jnp.ones((2, 3))}},
        "norm": {"scale": jnp.ones(3)},
        "head": {"kernel": jnp.ones((3, 2))},
    }
    ours = make_optimizer(config, lambda step: 1.0)
    update, _ = ours.update(params, ours.init(params), params)  # Adam's first step is the rate
    np.testing.assert_allclose(update["head"]["kernel"], -1, rtol=1e-5)
    np.testing.assert_allclose(update["norm"]["scale"], -1, rtol=1e-5)
    np.testing.assert_allclose(update["blocks"]["mlp"]["bias"][:, 0], [-0.25, -0.5], rtol=1e-5)
    np.testing.assert_allclose(update["blocks"]["mlp"]["kernel"][1], -0.5, rtol=1e-5)
    np.testing.assert_allclose(update["patch_embedding"]["kernel"], -0.125, rtol=1e-5)


def test_layer_decay_needs_a_stack():
    with pytest.raises(InputError, match=r"layer_decay=0\.5: the model has no stack 'blocks'"):
        layer_rates({"stages": {"kernel": jnp.ones(2)}}, 0.5)
