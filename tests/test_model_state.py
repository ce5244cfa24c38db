"""Training a model that has more than parameters: running statistics and fixed filters."""

import shutil

import jax
import numpy as np
import pytest
from conftest import assert_close, make_batch, make_tiny_config, place, read_metrics, set_up

from structinit_jax.config import base_config
from structinit_jax.errors import InputError
from structinit_jax.training import checkpoint, evaluation, train

pytestmark = pytest.mark.usefixtures("library_promotion")


@pytest.fixture(scope="module")
def shared_config():
    config = make_tiny_config()
    config.update(learning_rate=1e-2, weight_decay=0.5, checkpoint_every_steps=100)
    base = base_config("convmixer")
    config.model, config.attention_init = base.model, base.attention_init
    config.model.update(num_classes=10, width=16, depth=2, kernel_size=4, spatial_filters="fixed")
    return config


def without_times(workdir):
    times = ("second", "seconds", "wait")
    lines = read_metrics(workdir)
    return [{name: v for name, v in line.items() if not name.endswith(times)} for line in lines]


def test_one_and_eight_devices_normalize_by_the_global_batch(config, setup, first_state):
    single = set_up(config, jax.devices()[:1])
    assert (setup.model.mesh.size, single.model.mesh.size) == (8, 1)
    state, single_state = place(first_state, setup), place(first_state, single)
    batch = make_batch()
    batch["image"] = np.sort(batch["image"], axis=0)  # so that each device sees a different mean
    for _ in range(3):
        state, metrics = setup.train_step(state, batch, np.uint32(0))
        single_state, single_metrics = single.train_step(single_state, batch, np.uint32(0))
        np.testing.assert_allclose(metrics["loss"], single_metrics["loss"], rtol=1e-5)
    assert_close(state.model_state, single_state.model_state, rtol=1e-3, atol=1e-5)


def test_runs_update_only_statistics_and_resume(config, setup, first_state, tmp_path):
    results = train.train(config, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    shutil.rmtree(tmp_path / "killed" / "checkpoints" / "12")  # as if killed before it was saved
    train.train(config, tmp_path / "killed")
    whole, resumed = (
        checkpoint.restore(tmp_path / name / "checkpoints", 12, setup.abstract_state)
        for name in ("whole", "killed")
    )
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((whole, resumed)))
    assert without_times(tmp_path / "killed") == without_times(tmp_path / "whole")
    fresh, found = first_state.model_state["blocks"], jax.device_get(whole.model_state)["blocks"]
    assert set(np.unique(fresh["spatial"]["kernel"])) == {0, 1}  # the scheme's impulses
    assert fresh["spatial"].keys() == {"kernel", "bias"}
    jax.tree.map(np.testing.assert_array_equal, found["spatial"], fresh["spatial"])
    for name in ("mean", "variance"):
        assert np.abs(found["norm1"][name] - fresh["norm1"][name]).min() > 1e-4
    evaluated = evaluation.evaluate_checkpoint(config, tmp_path / "whole")
    assert evaluated == pytest.approx(results, rel=1e-6)
    config.model.spatial_filters = "trained"
    with pytest.raises(InputError, match=r"as in step 12 .*\n  model.spatial_filters: 'fixed' -> "):
        evaluation.evaluate_checkpoint(config, tmp_path / "whole")
    with pytest.raises(InputError, match=r"blocks/spatial/.* missing in the model"):
        evaluation.restore_model(config, tmp_path / "whole", level=0)
