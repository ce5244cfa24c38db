"""Training a model that holds more than parameters: running statistics and fixed filters."""

import jax
import numpy as np
import optax
import pytest

from structinit_jax import evaluate, train
from structinit_jax.config import base_config
from structinit_jax.data.info import CATALOG
from structinit_jax.data.loader import DeviceLoader
from structinit_jax.errors import InputError
from structinit_jax.program import build_program, initialize, make_plan

pytestmark = pytest.mark.usefixtures("library_promotion")


@pytest.fixture
def config(tiny_config):
    tiny_config.learning_rate = 1e-2
    tiny_config.weight_decay = 0.5
    tiny_config.model = base_config("convmixer").model
    tiny_config.model.update(
        num_classes=10, width=16, depth=2, kernel_size=4, spatial_filters="fixed"
    )
    return tiny_config


def make_batch():
    rng = np.random.default_rng(0)
    return {
        "image": rng.integers(0, 256, (64, 8, 8, 1), dtype=np.uint8),
        "label": rng.integers(0, 10, 64, dtype=np.int32),
    }


def copy(tree):
    return jax.tree.map(np.array, tree)


def paths(tree):
    return {jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(tree)}


def test_steps_lower_the_loss_move_statistics_and_leave_fixed_filters(config):
    program = build_program(config, make_plan(config, CATALOG["digits"], 384))
    state = initialize(config, program)
    start, batch, losses = copy(state), make_batch(), []
    for _ in range(12):
        state, metrics = program.train_step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.1
    assert program.train_step._cache_size() == 1
    state = copy(state)
    before, after = (s.model_state["blocks"]["spatial"]["kernel"] for s in (start, state))
    assert set(np.unique(before)) == {0, 1}  # the scheme's impulses
    np.testing.assert_array_equal(before, after)
    old, new = (s.model_state["blocks"]["norm1"] for s in (start, state))
    for name in ("mean", "variance"):
        assert np.abs(new[name] - old[name]).min() > 1e-4
    batch["mask"] = np.ones(64, np.float32)
    evaluated, stale = (
        program.eval_step(state.params, s.model_state, batch) for s in (state, start)
    )
    assert abs(evaluated["loss"] - stale["loss"]) > 1  # it is the running statistics that count
    changed = jax.tree.map(lambda a, b: np.abs(a - b).max() > 1e-4, start.params, state.params)
    assert all(jax.tree.leaves(changed))


def test_fixed_filters_have_no_optimizer_state_and_trained_ones_do(config):
    def filters_of(spatial_filters):
        config.model.spatial_filters = spatial_filters
        state = build_program(config, make_plan(config, CATALOG["digits"], 384)).abstract_state
        name = "['blocks']['spatial']['kernel']"
        moments = optax.tree.get(state.opt_state, "mu")
        return [name in paths(t) for t in (state.params, moments, state.model_state)]

    assert filters_of("fixed") == [False, False, True]
    assert filters_of("trained") == [True, True, False]


def test_one_and_eight_devices_normalize_by_the_global_batch(config, monkeypatch):
    one_device = jax.devices()[:1]
    program = build_program(config, make_plan(config, CATALOG["digits"], 384))
    state = initialize(config, program)
    monkeypatch.setattr(jax, "devices", lambda: one_device)
    single = build_program(config, make_plan(config, CATALOG["digits"], 384))
    assert (program.mesh.size, single.mesh.size) == (8, 1)
    single_state = initialize(config, single)
    batch = make_batch()
    batch["image"] = np.sort(batch["image"], axis=0)  # so that each device sees another mean
    for _ in range(3):
        state, metrics = program.train_step(state, batch)
        single_state, single_metrics = single.train_step(single_state, batch)
        np.testing.assert_allclose(metrics["loss"], single_metrics["loss"], rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5),
        copy(state.model_state),
        copy(single_state.model_state),
    )


def test_running_statistics_are_averaged_with_the_weights(config):
    """As timm's ModelEmaV2 does with the buffers of a model."""
    config.ema_decay = 0.75
    program = build_program(config, make_plan(config, CATALOG["digits"], 384))
    state = initialize(config, program)
    statistics = copy(state.model_state["blocks"]["norm1"])
    fixed = copy(state.model_state["blocks"]["spatial"]["kernel"])
    for _ in range(3):
        state, _ = program.train_step(state, make_batch())
        now = copy(state.model_state["blocks"]["norm1"])
        statistics = jax.tree.map(lambda a, b: 0.75 * a + 0.25 * b, statistics, now)
    averaged = copy(state.ema["model_state"]["blocks"])
    for name in ("mean", "variance"):
        np.testing.assert_allclose(averaged["norm1"][name], statistics[name], rtol=1e-5)
        assert np.abs(averaged["norm1"][name] - now[name]).min() > 1e-4
    np.testing.assert_array_equal(averaged["spatial"]["kernel"], fixed)

    batch = make_batch() | {"mask": np.ones(64, np.float32)}
    loader = DeviceLoader(batch["image"], batch["label"], program.mesh)
    results = evaluate.evaluate(config, program, state, loader)
    for prefix, weights, model_state in (
        ("test/ema_", state.ema["params"], state.ema["model_state"]),
        ("test/", state.params, state.model_state),
    ):
        loss = program.eval_step(weights, model_state, batch)["loss"] / 64
        assert results[f"{prefix}loss"] == pytest.approx(float(loss), rel=1e-6)
    mixed = program.eval_step(state.ema["params"], state.model_state, batch)["loss"] / 64
    assert abs(results["test/ema_loss"] - float(mixed)) > 1e-4


def test_a_run_interrupted_and_resumed_has_the_same_model_state(config, tmp_path, monkeypatch):
    results = train.train(config, tmp_path / "whole")
    write = train.MetricsLog.write

    def interrupted_write(log, step, values):
        write(log, step, values)
        if step == 10:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(train.MetricsLog, "write", interrupted_write)
        with pytest.raises(KeyboardInterrupt):
            train.train(config, tmp_path / "stopped")
    train.train(config, tmp_path / "stopped")
    program = build_program(config, make_plan(config, CATALOG["digits"], 384))
    (step, whole), (_, resumed) = (
        evaluate.restore_newest(program, tmp_path / name) for name in ("whole", "stopped")
    )
    assert step == 12
    jax.tree.map(np.testing.assert_array_equal, copy(whole), copy(resumed))
    fresh = copy(initialize(config, program)).model_state["blocks"]
    found = copy(whole).model_state["blocks"]
    np.testing.assert_array_equal(found["spatial"]["kernel"], fresh["spatial"]["kernel"])
    assert np.abs(found["norm1"]["mean"] - fresh["norm1"]["mean"]).max() > 1e-3
    assert evaluate.evaluate_checkpoint(config, tmp_path / "whole") == pytest.approx(
        results, rel=1e-6
    )
    config.model.spatial_filters = "trained"
    with pytest.raises(InputError, match=r"weights 'blocks/spatial/kernel', missing in the check"):
        evaluate.evaluate_checkpoint(config, tmp_path / "whole")
