"""What keeps the startup of a run short."""

import logging
import subprocess
import sys

import jax
import numpy as np
import pytest
from conftest import set_up

from structinit_jax.rngs import draw_flat

HEAVY = {"sklearn", "tensorflow", "tensorflow_datasets"}


def test_heavy_libraries_are_imported_only_where_they_are_used():
    core = HEAVY | {"clu", "flax"}
    # Training imports them later: Orbax at the first checkpoint.
    training = HEAVY | {"orbax.checkpoint", "scipy", "tensorboardX"}
    code = f"""
import sys
import structinit_jax
assert not (found := {{"jax", "numpy"}} & set(sys.modules)), found
assert "impulse" in dir(structinit_jax) and "epy" not in dir(structinit_jax)
import structinit_jax.attention_init
assert not (found := {core} & set(sys.modules)), found
import structinit_jax.interop
assert not [name for name in sys.modules if name.startswith("structinit_jax.models")]
import structinit_jax.main
assert not (found := {training} & set(sys.modules)), found
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("shape", [(4, 3, 5), ()])
@pytest.mark.parametrize("draw", [jax.random.normal, jax.random.bits, jax.random.uniform])
def test_a_flat_draw_has_the_same_values(draw, shape):
    rng, dtype = jax.random.key(3), "uint32" if draw is jax.random.bits else "float32"
    np.testing.assert_array_equal(draw_flat(draw, rng, shape, dtype), draw(rng, shape, dtype))


def test_a_state_takes_few_programs(tiny_config, caplog, library_promotion):
    setup = set_up(tiny_config)
    jax.clear_caches()
    with jax.log_compiles(), caplog.at_level(logging.WARNING, logger="jax"):
        setup.initialize()
    text = "Finished XLA compilation of "
    compiled = [message for message in caplog.messages if message.startswith(text)]
    assert len(compiled) == 2  # draws the weights; makes the optimizer's state
