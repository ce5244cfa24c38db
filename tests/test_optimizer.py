import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import references
from flax import nnx
from tiny_models import SIZES

from structinit_jax.config import base_config
from structinit_jax.errors import InputError
from structinit_jax.models import create_model, default_config
from structinit_jax.models.model import Model
from structinit_jax.models.timm import to_timm
from structinit_jax.training import build
from structinit_jax.training.sharding import make_mesh
from structinit_jax.training.state import AbstractModel, abstract_model

REFERENCE = references.load("train_script")


@pytest.mark.parametrize("family", SIZES)
def test_weight_decay_applies_to_the_same_weights_as_in_timm(family):
    options = default_config(family) | SIZES[family] | dict(image_size=8)
    if family == "vit":  # has every kind of parameter
        options |= dict(positions="learned", pool="class_token", layer_scale=0.1)

    def create(rng):
        return create_model(options, channels=3, rngs=nnx.Rngs(params=rng))

    model = abstract_model(create, make_mesh())
    fill = {True: jnp.ones, False: jnp.zeros}
    marks = jax.tree.map(lambda leaf, decay: fill[decay](leaf.shape), model.params, model.decayed)
    rest = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), model.model_state)
    ours = to_timm(nnx.merge(model.graphdef, marks, rest))
    names, decayed = (REFERENCE[f"{key}/{family}"] for key in ("names", "decayed"))
    for name, expected in zip(names, decayed, strict=True):
        np.testing.assert_array_equal(ours[str(name)], float(expected), err_msg=name)


class Scaled(Model):
    """A user-defined model that chooses which weights decay."""

    def __init__(self):
        self.matrix = nnx.Param(jnp.ones((2, 2)))
        self.norm = nnx.Param(jnp.ones(2))

    def decays(self, path):
        return path == ["matrix"]


def test_a_model_may_say_what_decays():
    model = abstract_model(lambda rng: Scaled(), make_mesh())
    assert model.decayed == {"matrix": True, "norm": False}


def make_optimizer(learning_rate, decayed=None, stacks=(), **fields):
    """The optimizer for a config with these fields and a model with this decay mask and stacks."""
    config = base_config()
    config.update(**fields)
    model = AbstractModel(*[None] * 5, stacks=stacks, decayed=decayed)
    return build.make_optimizer(config, learning_rate, model)


def test_a_function_that_takes_no_learning_rate_is_refused():
    with pytest.raises(InputError, match=r"^config\.optimizer='optax:l2_loss' must be a function"):
        make_optimizer(lambda step: 0.1, optimizer="optax:l2_loss")
    with pytest.raises(InputError, match=r"=.* must be a function that returns an opt"):
        make_optimizer(lambda step: 0.1, optimizer=f"{__name__}:returns_nothing")


def returns_nothing(learning_rate): ...


def test_updates_are_clipped_adamw(library_promotion):
    fields = dict(clip_norm=0.5, weight_decay=0.1, adam_b2=0.9, adam_epsilon=1e-3)
    params = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}
    grads = jax.tree.map(lambda x: 3 * x, params)
    decayed = {"kernel": True, "bias": False}
    ours = make_optimizer(lambda step: 0.1 * (1 + step), decayed=decayed, **fields)
    run = jax.jit(ours.update)
    update, state = run(grads, ours.init(params), params)
    clip = 0.5 / optax.tree.norm(grads)
    # In Adam's first step, the bias-corrected moments are the gradient and its square.
    gradient = 3 * np.asarray(clip)
    step = -0.1 * gradient / (gradient + 1e-3)
    np.testing.assert_allclose(update["bias"], np.full(2, step), rtol=1e-5)
    np.testing.assert_allclose(update["kernel"], np.full((2, 2), step - 0.1 * 0.1), rtol=1e-5)
    # With the same gradient again, the corrected moments do not change, and the rate is step 1's.
    second, state = run(grads, state, params)
    np.testing.assert_allclose(second["bias"], 2 * update["bias"], rtol=1e-5)
    nu = optax.tree.get(state, "nu")["bias"]
    np.testing.assert_allclose(nu, np.full(2, (1 - 0.9**2) * gradient**2), rtol=1e-5)


@pytest.mark.parametrize(
    ("num_examples", "fields", "steps", "evaluations"),
    [
        (384, {}, 12, {6, 12}),
        (100, {"num_epochs": 4.4}, 7, {2, 3, 5, 6, 7}),
        (384, {"num_steps": 7}, 7, {6, 7}),
        (384, {"eval_every_epochs": 100.0}, 12, {12}),
        (10, {"num_epochs": 1.0}, 1, {1}),
        (120, {"num_epochs": 4.0, "data.drop_remainder": True}, 4, {1, 2, 3, 4}),
    ],
)
def test_epochs_become_steps(num_examples, fields, steps, evaluations):
    config = base_config()
    config.update(batch_size=64, num_epochs=2.0, eval_every_epochs=1.0)
    config.update_from_flattened_dict(fields)
    schedule = build.make_schedule(config, num_examples)
    assert schedule.num_steps == steps
    assert schedule.eval_steps == evaluations
    whole = config.data.drop_remainder
    assert schedule.steps_per_epoch == (num_examples // 64 if whole else num_examples / 64)


def test_an_epoch_without_a_whole_batch_is_refused():
    config = base_config()
    config.data.drop_remainder = True
    with pytest.raises(InputError, match=r"^config\.batch_size=.* 127.*drop_remainder"):
        build.make_schedule(config, 127)


PER_LAYER = {  # these use each array's norm, rank or shape; Prodigy also uses all arrays together
    "optax:lamb": optax.lamb(0.1, weight_decay=0.1),
    "optax.contrib:muon": optax.contrib.muon(0.1, weight_decay=0.1),
    "optax.contrib:prodigy": optax.contrib.prodigy(0.1, weight_decay=0.1),
}


@pytest.mark.parametrize("name", PER_LAYER)
def test_an_optimizer_of_optax_sees_one_layer_at_a_time(name, library_promotion):
    def draw(seed):
        rng = np.random.default_rng(seed)
        blocks = {"kernel": (2, 128, 130), "bias": (2, 130), "out": {"kernel": (2, 2, 65, 128)}}
        sizes = {"heads": {0: (130, 10)}, "stage1": {"norm": (5,), "blocks": blocks}}
        normal = functools.partial(rng.standard_normal, dtype=np.float32)
        return jax.tree.map(normal, sizes, is_leaf=lambda x: isinstance(x, tuple))

    def listed(tree):
        """The tree with each stack replaced by a list of layers."""
        blocks = tree["stage1"]["blocks"]
        layers = [jax.tree.map(lambda x, i=i: x[i], blocks) for i in range(2)]
        return tree | {"stage1": tree["stage1"] | {"blocks": layers}}

    params = draw(0)
    options = dict(stacks=["stage1/blocks"], optimizer=name, weight_decay=0.1)
    ours = make_optimizer(lambda step: 0.1, **options)
    reference = PER_LAYER[name]
    update, update_reference = jax.jit(ours.update), jax.jit(reference.update)
    state = jax.jit(ours.init)(params)
    expected_params = listed(params)
    expected_state = jax.jit(reference.init)(expected_params)
    for step in range(2):
        grads = draw(1 + step)
        updates, state = jax.device_get(update(grads, state, params))
        expected = update_reference(listed(grads), expected_state, expected_params)
        expected, expected_state = jax.device_get(expected)
        jax.tree.map(np.testing.assert_array_equal, listed(updates), expected)
        params = jax.tree.map(np.add, params, updates)
        expected_params = jax.tree.map(np.add, expected_params, expected)


def make_rate(num_steps=100, steps_per_epoch=10.0, **fields):
    config = base_config()
    config.update(learning_rate=1.0, final_learning_rate=0.1)
    config.update(warmup_epochs=2.0, warmup_learning_rate=0.2)
    config.update(**fields, batch_size=10, num_steps=num_steps)
    num_examples = round(10 * steps_per_epoch)
    return build.make_schedule(config, num_examples).learning_rate


def test_warm_up_is_linear_then_a_cosine_and_the_cool_down_constant():
    later = 0.1 + 0.9 * (1 + np.cos(np.pi * 0.25)) / 2
    for fields, expected in (
        ({}, {10: 0.6, 20: 1.0, 40: later, 100: 0.1}),
        ({"cooldown_epochs": 3.0}, {20: 1.0, 45: 0.55, 70: 0.1, 95: 0.1}),
    ):
        rates = [make_rate(**fields)(step) for step in expected]
        np.testing.assert_allclose(rates, list(expected.values()), rtol=1e-6)


@pytest.mark.parametrize("num_steps", [1, 2, 15])
def test_runs_shorter_than_the_warm_up_have_finite_rates(num_steps):
    rates = [float(make_rate(num_steps=num_steps)(step)) for step in range(num_steps)]
    assert np.all(np.isfinite(rates))
    assert max(rates) <= 1


RATE_FIELDS = [
    *("num_epochs", "learning_rate", "warmup_epochs", "warmup_learning_rate"),
    *("final_learning_rate", "cooldown_epochs"),
]
RECIPES = ["2024_small", "2024_imagenet", "2024_convmixer", "2025_small", "2025_imagenet"]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("num_examples", "drop"), [(320, False), (337, False), (337, True)])
def test_timm_cosine_equals_timm_in_every_step_of_every_epoch(recipe, num_examples, drop):
    config = base_config()
    config.update(dict(zip(RATE_FIELDS, REFERENCE[f"settings/{recipe}"].tolist(), strict=True)))
    config.num_epochs += config.cooldown_epochs
    config.update(schedule="timm_cosine", batch_size=32)
    epoch_length = num_examples - drop * num_examples % 32
    config.data.drop_remainder = drop
    schedule = build.make_schedule(config, num_examples)
    steps = np.arange(schedule.num_steps, dtype=np.int32)
    ours = jax.jit(jax.vmap(schedule.learning_rate))(steps)
    expected = REFERENCE[f"rates/{recipe}"][steps * 32 // epoch_length]
    np.testing.assert_allclose(ours, expected, rtol=1e-6)
    assert schedule.learning_rate(0) == np.float32(config.warmup_learning_rate)


@pytest.mark.parametrize("num_steps", [1, 15, 40])
def test_timm_cosine_fits_the_given_number_of_steps(num_steps):
    fields = dict(schedule="timm_cosine", cooldown_epochs=1.0, warmup_epochs=1.0)
    schedule = make_rate(num_steps=num_steps, **fields)
    later = 0.1 + 0.9 * (1 + np.cos(np.pi * np.array([1, 2]) / 3)) / 2
    expected = np.repeat([0.2, *later, 0.1], 10)
    if num_steps == 15:  # the cosine ends after half an epoch
        expected[10:] = 0.1
    ours = [schedule(step) for step in range(num_steps)]
    np.testing.assert_allclose(ours, expected[:num_steps], rtol=1e-6)
