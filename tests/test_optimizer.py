import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from structinit_jax.config import base_config
from structinit_jax.errors import InputError
from structinit_jax.models.vit import VisionTransformer
from structinit_jax.training.optimizer import (
    adamw,
    decay_mask,
    find_loss,
    find_optimizer,
    layer_rates,
    make_schedule,
)
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
    ours = adamw(config, lambda step: 0.1)
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
    ours = adamw(config, lambda step: 1.0)
    update, _ = ours.update(params, ours.init(params), params)  # Adam's first step is the rate
    np.testing.assert_allclose(update["head"]["kernel"], -1, rtol=1e-5)
    np.testing.assert_allclose(update["norm"]["scale"], -1, rtol=1e-5)
    np.testing.assert_allclose(update["blocks"]["mlp"]["bias"][:, 0], [-0.25, -0.5], rtol=1e-5)
    np.testing.assert_allclose(update["blocks"]["mlp"]["kernel"][1], -0.5, rtol=1e-5)
    np.testing.assert_allclose(update["patch_embedding"]["kernel"], -0.125, rtol=1e-5)


def test_layer_decay_needs_a_stack():
    with pytest.raises(InputError, match=r"config\.layer_decay=0\.5"):
        layer_rates({"stages": {"kernel": jnp.ones(2)}}, 0.5)


@pytest.mark.parametrize(
    ("num_examples", "fields", "steps", "evaluations"),
    [
        (384, {}, 12, {6, 12}),
        (100, {"num_epochs": 4.0}, 6, {2, 3, 5, 6}),
        (384, {"num_steps": 7}, 7, {6, 7}),
        (384, {"eval_every_epochs": 100.0}, 12, {12}),
        (10, {"num_epochs": 1.0}, 1, {1}),
    ],
)
def test_epochs_become_steps(num_examples, fields, steps, evaluations):
    config = base_config()
    config.update(dict(batch_size=64, num_epochs=2.0, eval_every_epochs=1.0) | fields)
    schedule = make_schedule(config, num_examples)
    assert schedule.num_steps == steps
    assert schedule.eval_steps == evaluations
    assert schedule.steps_per_epoch == num_examples / 64


def test_more_steps_than_can_be_counted_are_refused():
    config = base_config()
    config.num_epochs = 1e9
    with pytest.raises(InputError, match=r"config\.num_epochs=1000000000\.0"):
        make_schedule(config, 10_000)


def test_losses_and_optimizers_are_found_by_name():
    assert find_loss("softmax_cross_entropy") is optax.softmax_cross_entropy
    assert find_optimizer("adamw") is adamw
    assert find_optimizer("optax:sgd") is optax.sgd
    for find, field in ((find_loss, "loss"), (find_optimizer, "optimizer")):
        with pytest.raises(InputError, match=rf"config\.{field}='other' is unknown"):
            find("other")


def make_rate(num_steps=100, steps_per_epoch=10.0, **fields):
    config = base_config()
    config.update(
        learning_rate=1.0, final_learning_rate=0.1, warmup_epochs=2.0, warmup_learning_rate=0.2
    )
    config.update(**fields)
    config.update(batch_size=10, num_steps=num_steps)
    return make_schedule(config, round(10 * steps_per_epoch)).learning_rate


def test_warm_up_is_linear_and_the_rest_a_cosine():
    schedule = make_rate()
    np.testing.assert_allclose(schedule(10), 0.6, rtol=1e-6)
    np.testing.assert_allclose(schedule(20), 1.0, rtol=1e-6)
    expected = 0.1 + 0.9 * (1 + np.cos(np.pi * 0.25)) / 2
    np.testing.assert_allclose(schedule(40), expected, rtol=1e-6)
    np.testing.assert_allclose(schedule(100), 0.1, rtol=1e-6)


def test_cool_down_stays_at_the_final_rate():
    schedule = make_rate(cooldown_epochs=3.0)
    np.testing.assert_allclose(schedule(70), 0.1, rtol=1e-6)
    np.testing.assert_allclose(schedule(95), 0.1, rtol=1e-6)
    assert schedule(69) > 0.1


@pytest.mark.parametrize("num_steps", [1, 2, 15])
def test_runs_shorter_than_the_warm_up_have_finite_rates(num_steps):
    rates = [float(make_rate(num_steps=num_steps)(step)) for step in range(num_steps)]
    assert np.all(np.isfinite(rates))
    assert max(rates) <= 1


def test_no_warm_up_starts_at_the_peak():
    np.testing.assert_allclose(make_rate(warmup_epochs=0.0)(0), 1.0)
