import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from structinit_jax import program as program_lib
from structinit_jax import train
from structinit_jax.data.info import CATALOG
from structinit_jax.data.loader import DeviceLoader
from structinit_jax.errors import StoppedError
from structinit_jax.program import build_program, initialize, make_plan

pytestmark = pytest.mark.usefixtures("library_promotion")


@pytest.fixture
def bad_labels_give_nan(monkeypatch):
    """Any loss can be made to diverge: here a label of -1 does it."""
    original = program_lib.make_augment

    def make_augment(options, mesh):
        augment = original(options, mesh)

        def with_nan(key, images, labels):
            images, targets = augment(key, images, labels)
            return images, targets * jnp.where(labels < 0, jnp.nan, 1.0)[:, None]

        return with_nan

    monkeypatch.setattr(program_lib, "make_augment", make_augment)


@pytest.fixture
def bad_step_5(bad_labels_give_nan, monkeypatch):
    original = DeviceLoader.train_batches
    spoil = jax.jit(lambda labels: jnp.where(jnp.arange(len(labels)) == 3, -1, labels))

    def with_a_bad_one(self, *, start_step, **options):
        batches = original(self, start_step=start_step, **options)
        for step, batch in enumerate(batches, start=start_step + 1):
            yield batch | {"label": spoil(batch["label"])} if step == 5 else batch

    monkeypatch.setattr(DeviceLoader, "train_batches", with_a_bad_one)


def test_a_step_that_is_not_finite_changes_nothing_but_the_step(tiny_config, bad_labels_give_nan):
    program = build_program(tiny_config, make_plan(tiny_config, CATALOG["digits"], 384))
    state = initialize(tiny_config, program)
    rng = np.random.default_rng(0)
    batch = {
        "image": rng.integers(0, 256, (64, 8, 8, 1), dtype=np.uint8),
        "label": rng.integers(0, 10, 64, dtype=np.int32),
    }
    state, metrics = program.train_step(state, batch)
    assert float(metrics["nonfinite"]) == 0
    before = jax.tree.map(np.asarray, state)
    batch["label"][7] = -1
    state, metrics = program.train_step(state, batch)
    assert np.isnan(float(metrics["loss"]))
    assert float(metrics["nonfinite"]) == 1
    assert int(state.step) == 2
    jax.tree.map(np.testing.assert_array_equal, state._replace(step=before.step), before)
    batch["label"][7] = 0
    state, metrics = program.train_step(state, batch)
    assert float(metrics["nonfinite"]) == 0
    assert np.any(np.asarray(state.params["head"]["kernel"]) != before.params["head"]["kernel"])


def test_stop_names_the_step_and_keeps_the_checkpoint_before(tiny_config, tmp_path, bad_step_5):
    tiny_config.update(log_every_steps=100, checkpoint_every_steps=2)
    message = (
        r"^step 5: loss nan, gradient norm nan\. The run stops .* = \(0, 4\): the same command "
        r"starts from the checkpoint of step 4 "
    )
    for _ in range(2):  # the second time replays it
        with pytest.raises(StoppedError, match=message) as caught:
            train.train(tiny_config, tmp_path)
        assert caught.value.exit_code == 1


def test_skip_goes_on_and_counts(tiny_config, tmp_path, bad_step_5, capsys):
    tiny_config.on_nonfinite = "skip"
    tiny_config.num_steps = 8
    results = train.train(tiny_config, tmp_path)
    assert np.isfinite(results["test/loss"])
    assert capsys.readouterr().out.count("step 5: loss nan, gradient norm nan: skipped") == 1
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    counts = {m["step"]: m["train/nonfinite_steps"] for m in lines if "train/loss" in m}
    assert counts == {2: 0, 4: 0, 6: 1, 8: 0}
    assert all(np.isfinite(m["train/loss"]) for m in lines if "train/loss" in m)
