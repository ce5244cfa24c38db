"""Training a model with more than parameters: running statistics and fixed filters."""

import functools
import shutil

import jax
import numpy as np
import pytest
from conftest import library_promotion_rules, make_batch, make_tiny_config, place

from structinit_jax import evaluate, train
from structinit_jax.config import base_config
from structinit_jax.errors import InputError
from structinit_jax.run import set_up
from structinit_jax.training import checkpoint

pytestmark = pytest.mark.usefixtures("library_promotion")


def make_config():
    config = make_tiny_config()
    config.update(learning_rate=1e-2, weight_decay=0.5, ema_decay=0.75)
    base = base_config("convmixer")
    config.model, config.attention_init = base.model, base.attention_init
    config.model.update(num_classes=10, width=16, depth=2, kernel_size=4, spatial_filters="fixed")
    return config


@pytest.fixture
def config():
    return make_config()


@pytest.fixture(scope="module")
def setup():
    with library_promotion_rules():
        return set_up(make_config(), 384)


@pytest.fixture(scope="module")
def first_state(setup):
    with library_promotion_rules():
        return jax.device_get(setup.initialize()[0])


def test_steps_update_statistics_and_their_average_but_not_fixed_filters(
    config, setup, first_state
):
    def averaged_parts(tree):
        return tree["model_state"]["blocks"]["norm1"], tree["params"]["head"]

    state, batch, losses = place(first_state, setup), make_batch(), []
    average = averaged_parts(first_state._asdict())
    for _ in range(12):
        state, metrics = setup.train_step(state, batch)
        losses.append(float(metrics["loss"]))
        now = averaged_parts(jax.device_get(state)._asdict())
        average = jax.tree.map(lambda a, b: 0.75 * a + 0.25 * b, average, now)
    assert losses[-1] < losses[0] - 0.1
    state = jax.device_get(state)
    before, after, averaged = (
        model_state["blocks"]["spatial"]["kernel"]
        for model_state in (first_state.model_state, state.model_state, state.ema["model_state"])
    )
    assert set(np.unique(before)) == {0, 1}  # the scheme's impulses
    np.testing.assert_array_equal(before, after)
    np.testing.assert_array_equal(before, averaged)
    old, new = (s.model_state["blocks"]["norm1"] for s in (first_state, state))
    for name in ("mean", "variance"):
        assert np.abs(new[name] - old[name]).min() > 1e-4
    # As timm's ModelEmaV2, which averages the buffers of a model too.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, averaged_parts(state.ema), average)
    for found, new in zip(*map(jax.tree.leaves, (average, now)), strict=True):
        assert np.abs(found - new).max() > 1e-4


def test_one_and_eight_devices_normalize_by_the_global_batch(
    config, setup, first_state, monkeypatch
):
    one_device = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda: one_device)
    single = set_up(config, 384)
    assert (setup.model.mesh.size, single.model.mesh.size) == (8, 1)
    state, single_state = place(first_state, setup), place(first_state, single)
    batch = make_batch()
    batch["image"] = np.sort(batch["image"], axis=0)  # so that each device sees another mean
    for _ in range(3):
        state, metrics = setup.train_step(state, batch)
        single_state, single_metrics = single.train_step(single_state, batch)
        np.testing.assert_allclose(metrics["loss"], single_metrics["loss"], rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5),
        *jax.device_get((state.model_state, single_state.model_state)),
    )


def test_a_resumed_run_has_the_same_model_state(config, setup, first_state, tmp_path):
    results = train.train(config, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    shutil.rmtree(tmp_path / "killed" / "checkpoints" / "12")  # as if killed before it was saved
    train.train(config, tmp_path / "killed")
    whole, resumed = (
        checkpoint.restore(tmp_path / name / "checkpoints", 12, setup.abstract_state)
        for name in ("whole", "killed")
    )
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((whole, resumed)))
    fresh, found = first_state.model_state["blocks"], jax.device_get(whole.model_state)["blocks"]
    np.testing.assert_array_equal(found["spatial"]["kernel"], fresh["spatial"]["kernel"])
    assert np.abs(found["norm1"]["mean"] - fresh["norm1"]["mean"]).max() > 1e-3
    evaluated = evaluate.evaluate_checkpoint(config, tmp_path / "whole")
    assert evaluated == pytest.approx(results, rel=1e-6)
    config.model.spatial_filters = "trained"
    with pytest.raises(InputError, match=r"blocks/spatial/.* missing in the model"):
        evaluate.evaluate_checkpoint(config, tmp_path / "whole")
