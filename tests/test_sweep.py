"""Runs that benchmarks/sweep.py trains together, against the same runs one by one."""

import runpy

import fork_main
import jax
import numpy as np
import pytest
from conftest import assert_close, set_up

from structinit_jax.data.loader import make_loader
from structinit_jax.errors import InputError
from structinit_jax.training import build


@pytest.mark.usefixtures("library_promotion")
def test_runs_that_train_at_once_equal_single_runs(tiny_config, caplog):
    script = runpy.run_path(str(fork_main.ROOT / "benchmarks" / "sweep.py"))
    tiny_config.num_steps = 3
    tiny_config.model.depth = 1
    tiny_config.augment.flip = 0.5
    texts = ["default", "mimetic:value_scale=0.5"]
    schemes = [script["read_scheme"](text) for text in texts]
    assert script["read_scheme"]("impulse_2024:max_steps=3,first_input='uniform'")
    for text in ("impulse:target_mass", "impulse:nope=1"):
        with pytest.raises(InputError):
            script["read_scheme"](text)
    tiny_config.ema_decay = 0.9
    with pytest.raises(InputError, match="ema_decay"):
        script["sweep"](tiny_config, schemes, [1.0, 2.0], num_seeds=2)
    tiny_config.ema_decay = 0.0
    with jax.log_compiles():
        state, accuracies = script["sweep"](tiny_config, schemes, [1.0, 2.0], num_seeds=2)
    assert caplog.text.count("Compiling jit(step)") == 1
    (accuracy,) = accuracies.values()
    assert accuracy.shape == (2, 4)

    # The last run: seed 1, mimetic, twice the learning rate.
    tiny_config.seed = 1
    tiny_config.learning_rate *= 2
    tiny_config.warmup_learning_rate *= 2
    tiny_config.final_learning_rate *= 2
    tiny_config.attention_init = dict(name="mimetic", value_scale=0.5)
    run = set_up(tiny_config, jax.devices()[:1])
    expected = run.initialize()
    source = build.open_split(tiny_config, build.open_data(tiny_config), "train_split")
    loader = make_loader(source, run.model.mesh, build.make_crop(tiny_config))
    for batch in build.train_batches(tiny_config, loader, 0, 3):
        expected, _ = run.train_step(expected, batch, np.uint32(1))
    assert_close(jax.tree.map(lambda leaf: leaf[1, 3], state.params), expected.params, atol=1e-5)
