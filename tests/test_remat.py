"""The choice of what the training step recomputes, by the device memory."""

import re

import jax
import jax.numpy as jnp
import pytest

from structinit_jax import run
from structinit_jax.errors import InputError
from structinit_jax.models.model import REMAT_POLICIES
from structinit_jax.training.setup import HEADROOM, Setup, bytes_needed, compile_step


@pytest.fixture(scope="module")
def setup():
    """A run whose training steps have temporaries of about 4, 2 and 1 MB."""

    def make(size):
        # The sort needs the whole array in memory.
        return jax.jit(lambda x, *_: jnp.sort(jnp.broadcast_to(x, (size,)) + jnp.arange(size))[-1])

    sizes = zip(REMAT_POLICIES, (10**6, 5 * 10**5, 10**5), strict=True)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    return Setup(
        schedule=None,
        model=None,
        initialize=None,
        train_steps={name: make(size) for name, size in sizes},
        abstract_state=number,
        abstract_batch=number,
        data_bytes=1000,
    )


@pytest.fixture(scope="module")
def needed(setup):
    arguments = setup.arguments
    steps = setup.train_steps.items()
    return {name: bytes_needed(step.lower(*arguments).compile()) for name, step in steps}


def test_the_fastest_policy_that_fits_is_chosen(setup, needed):
    assert list(setup.train_steps) == ["none", "dots", "full"]
    assert needed["none"] > needed["dots"] > needed["full"]
    for name, size in needed.items():
        memory = int(size / (1 - HEADROOM)) + 1 + setup.data_bytes
        step, description = compile_step(setup, memory)
        tries = "".join(
            f"; {other} needs {n / 2**20:,.0f} MiB" for other, n in needed.items() if n > size
        )
        assert re.fullmatch(rf"{name} \(needs \d+ MiB of \d+ MiB{tries}\)", description)
        assert bytes_needed(step) == size
        assert int(step(jnp.int32(0), jnp.int32(0), jnp.uint32(0))) > 0


def test_the_last_policy_may_use_the_headroom(setup, needed):
    memory = needed["full"] + setup.data_bytes
    assert compile_step(setup, memory)[1].startswith("full ")
    with pytest.raises(InputError) as caught:
        compile_step(setup, memory - 1)
    message = str(caught.value)
    for text in ("none needs 4 MiB", "dots needs", "full needs", "--config.accumulate_steps=2"):
        assert text in message


@pytest.mark.parametrize("memory", [None, 2**30])
def test_a_program_that_xla_refuses_does_not_fit(setup, memory):
    def refused():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory on HBM")

    _, description = compile_step(setup, memory, first=refused)
    assert "; none needs more than there is)" in description
    assert description.startswith("dots ")
    alone = setup._replace(train_steps={"full": setup.train_steps["full"]})
    with pytest.raises(InputError, match=r"with remat full needs more than there is\. To"):
        compile_step(alone, memory, first=refused)


@pytest.mark.usefixtures("library_promotion")
def test_the_step_of_a_model_is_chosen_beside_its_data(tiny_config):
    tiny_config.batch_size = 512
    tiny_config.model.update(depth=6, mlp_ratio=8.0)
    setup = run.set_up(tiny_config, 384, 90)
    assert setup.data_bytes == (384 + 90) * 8 * 8
    arguments = setup.arguments
    none, dots = (
        bytes_needed(setup.train_steps[name].lower(*arguments).compile())
        for name in ("none", "dots")
    )
    assert dots < none
    enough = int(none / (1 - HEADROOM)) + 1 + setup.data_bytes
    found = [compile_step(setup, memory)[1][:5] for memory in (enough, enough - 2, None)]
    assert found == ["none ", "dots ", "none "]
