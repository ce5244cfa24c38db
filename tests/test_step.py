import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import assert_close, make_batch, make_tiny_config, place, set_up
from flax import nnx
from scipy.special import log_softmax

from structinit_jax import augment
from structinit_jax.errors import InputError
from structinit_jax.models import default_config, layers
from structinit_jax.models.model import Model
from structinit_jax.rngs import split_seed, step_rngs
from structinit_jax.training.evaluation import make_eval_step
from structinit_jax.training.state import split_model
from structinit_jax.training.step import _move_average

pytestmark = pytest.mark.usefixtures("library_promotion")


@pytest.fixture(scope="module")
def shared_config():
    config = make_tiny_config()
    config.learning_rate = 1e-2
    config.model.drop_path = 0.0
    config.attention_init = dict(name="default")
    return config


@pytest.fixture
def state(setup, first_state):
    """A state that the step may consume."""
    return place(first_state, setup)


def mean_loss(logits, targets):
    return -jnp.mean(targets * jax.nn.log_softmax(logits))


def loss_and_more(logits, targets):
    return -jnp.sum(targets * jax.nn.log_softmax(logits), axis=-1), {}


class OneLogit(Model):
    """A model whose logits would be broadcast to all classes."""

    def __init__(self, *, image_size, channels, num_classes, rngs):
        self.head = nnx.Linear(channels, 1, rngs=rngs)

    def __call__(self, images, *, rng=None, with_maps=False):
        return self.head(images.mean(axis=(1, 2))), {}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("loss", "test_step:mean_loss", ""),
        ("loss", "test_step:loss_and_more", ""),
        (
            "model",
            dict(name="test_step:OneLogit", num_classes=10),
            r": logits\.shape=\(64, 1\) must be \(64, 10\)",
        ),
    ],
)
def test_every_example_needs_a_loss_and_every_class_a_logit(config, field, value, message):
    config[field] = value
    setup = set_up(config)
    with pytest.raises(InputError, match=rf"^config\.{field}{message}"):
        setup.train_step.lower(*setup.arguments)


def test_a_function_of_other_arguments_is_no_loss(config):
    config.loss = "os:getcwd"
    with pytest.raises(InputError, match=r"^config\.loss=getcwd must be a function of \(logits, t"):
        set_up(config)


def test_losses_agree_with_scipy(setup, state):
    batch = make_batch()
    images = (batch["image"] / 255 - 0.3) / 0.4
    model = nnx.merge(setup.model.graphdef, state.params, state.model_state)
    logits, _ = jax.jit(model)(jnp.asarray(images, jnp.float32))
    log_p = log_softmax(np.asarray(logits), axis=-1)
    eval_step = make_eval_step(setup.model, (0.3,), (0.4,))
    results = jax.jit(eval_step)(state.params, state.model_state, batch)
    np.testing.assert_array_equal(results["label"], batch["label"])
    np.testing.assert_array_equal(results["predicted"], log_p.argmax(-1))
    expected = -log_p[np.arange(64), batch["label"]]
    np.testing.assert_allclose(results["loss"], expected, rtol=1e-5)
    smoothed = 0.9 * np.eye(10)[batch["label"]] + 0.1 / 10

    def smoothed_loss(params):
        model = nnx.merge(setup.model.graphdef, params, state.model_state)
        logits, _ = model(jnp.asarray(images, jnp.float32))
        return -(smoothed * jax.nn.log_softmax(logits)).sum(-1).mean()

    norm = jax.jit(lambda params: optax.tree.norm(jax.grad(smoothed_loss)(params)))(state.params)
    metrics = setup.train_step(state, batch, np.uint32(0))[1]
    np.testing.assert_allclose(metrics["gradient_norm"], norm, rtol=1e-4)
    np.testing.assert_allclose(metrics["loss"], -(smoothed * log_p).sum(-1).mean(), rtol=1e-5)
    correct = np.mean(log_p.argmax(-1) == batch["label"])
    np.testing.assert_allclose(metrics["accuracy"], correct, rtol=1e-6)
    assert metrics["learning_rate"] == setup.schedule.learning_rate(0)


def test_fixed_weights_and_counters_are_their_own_average():
    weight = jnp.float32(0.1) + jnp.arange(100) / 7
    average = jax.jit(functools.partial(_move_average, 0.9999))
    np.testing.assert_array_equal(average(weight, weight), weight)
    assert average(jnp.int32(1), jnp.int32(2)) == 2


def test_seeds_share_a_program(config):
    config.model.drop_path = 0.1  # a step without random numbers does not use the seed
    programs = []
    for config.seed in (0, 1):
        setup = set_up(config)
        programs.append(setup.train_step.lower(*setup.arguments).as_text())
    assert programs[0] == programs[1]


def test_no_step_repeats_the_keys_of_the_weights():
    params_rng, attention_rng, _ = split_seed(3)
    stream = nnx.Rngs(params=params_rng)
    used = [stream.params() for _ in range(64)] + list(jax.random.split(attention_rng, 64))
    drawn = [rng for step in range(8) for rng in step_rngs(3, step)]
    keys = {tuple(jax.random.key_data(rng).tolist()) for rng in used + drawn}
    assert len(keys) == len(used) + len(drawn)


def test_operations_have_keys_of_their_own_in_each_step_and_part(config, first_state, monkeypatch):
    config.accumulate_steps = 2
    config.model.drop_path = 0.1
    config.augment.update(crop="pad", flip=0.5, rand_augment="rand-m9", erasing=0.25)
    config.augment.mixup = 0.8
    recorded = set()

    def record(rngs):
        data = jax.random.key_data(rngs).reshape(-1, 2)
        jax.debug.callback(lambda data: recorded.update(map(tuple, np.asarray(data))), data)
        return rngs

    image_rngs, mix, drop = augment._image_rngs, augment.mix.mix, layers.drop_path
    monkeypatch.setattr(augment, "_image_rngs", lambda *args: record(image_rngs(*args)))
    monkeypatch.setattr(augment.mix, "mix", lambda rng, *a, **k: mix(record(rng), *a, **k))
    monkeypatch.setattr(layers, "drop_path", lambda x, rate, rng: drop(x, rate, record(rng)))
    # Its keys are recorded, and its program takes long to compile.
    monkeypatch.setattr(augment.rand_augment, "apply_operations", lambda images, *_: images)
    setup = set_up(config, jax.devices()[:1])

    def keys_of(step):
        recorded.clear()
        state = place(first_state._replace(step=np.int32(step)), setup)
        _, metrics = jax.block_until_ready(setup.train_step(state, make_batch(), np.uint32(0)))
        assert "accuracy" not in metrics  # The images of a mixed batch have two classes each.
        jax.effects_barrier()
        return set(recorded)

    first, other, again = map(keys_of, (3, 4, 3))
    drops = 2 * 2 * 2  # in both parts, two in each of two blocks
    assert len(first) == drops + 4 * 64 + 1  # four operations on each image, and mixup
    assert first == again
    assert first.isdisjoint(other)


def test_a_batch_in_parts_takes_the_same_step(config, setup, first_state):
    whole, whole_metrics = setup.train_step(place(first_state, setup), make_batch(), np.uint32(0))
    config.accumulate_steps = 4
    in_parts = set_up(config)
    parts, metrics = in_parts.train_step(place(first_state, in_parts), make_batch(), np.uint32(0))
    for name in ("loss", "accuracy", "gradient_norm"):
        np.testing.assert_allclose(metrics[name], whole_metrics[name], rtol=1e-4)
    assert_close(parts.params, whole.params, atol=1e-5)


def test_averages_follow_the_weights_and_statistics_the_parts_of_a_batch(config):
    sizes = dict(width=8, depth=1, kernel_size=3, patch_size=2, num_classes=10)
    config.model = default_config("convmixer") | sizes
    config.update(accumulate_steps=2, ema_decay=0.75)
    setup = set_up(config)
    start = jax.device_get(setup.initialize())
    start = start._replace(ema=jax.tree.map(lambda x: x + 1, start.ema))
    batch = make_batch()
    images = jnp.asarray((batch["image"] / 255 - 0.3) / 0.4, jnp.float32)
    weights = jax.tree.map(jnp.asarray, (start.params, start.model_state))
    model = nnx.merge(setup.model.graphdef, *weights)
    run = nnx.jit(lambda model, part: model(part, rng=jax.random.key(0))[0])
    for part in (images[::2], images[1::2]):
        run(model, part)
    expected = split_model(model)[2]
    state, metrics = setup.train_step(place(start, setup), batch, np.uint32(0))
    assert_close(state.model_state, expected, rtol=1e-4, atol=1e-6)
    new = jax.device_get({"params": state.params, "model_state": state.model_state})
    averages = jax.tree.map(lambda old, new: 0.75 * old + 0.25 * new, start.ema, new)
    assert_close(state.ema, averages, rtol=1e-4, atol=1e-6)
    assert metrics["finite"]
    infinite = jax.tree.map(lambda x: np.full_like(x, np.inf), start.model_state)
    bad = start._replace(model_state=infinite)
    assert not setup.train_step(place(bad, setup), batch, np.uint32(0))[1]["finite"]


@pytest.mark.parametrize("part", ["params", "opt_state"])
def test_a_state_that_is_not_finite_is_reported(setup, state, part):
    state, metrics = setup.train_step(state, make_batch(), np.uint32(0))
    assert metrics["finite"]
    leaves, structure = jax.tree.flatten(getattr(jax.device_get(state), part))
    large = max(range(len(leaves)), key=lambda i: leaves[i].size)
    leaves[large] = np.full_like(leaves[large], np.inf)
    bad = jax.device_get(state)._replace(**{part: jax.tree.unflatten(structure, leaves)})
    assert not setup.train_step(place(bad, setup), make_batch(), np.uint32(0))[1]["finite"]
