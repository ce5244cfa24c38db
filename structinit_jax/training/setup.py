"""The parts of a run before any array is allocated, and the memory of its training step."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from structinit_jax.errors import InputError
from structinit_jax.training.optimizer import Schedule
from structinit_jax.training.state import AbstractModel, TrainState

SAVE_MEMORY = (
    "To save memory: --config.model.remat=dots (or full, which is slower), "
    "--config.accumulate_steps=2 (or more), --config.model.dtype=bfloat16, --config.fsdp=N on N "
    "devices"
)


class Setup(NamedTuple):
    """The parts of a run that its config determines, before any array is allocated.

    `abstract_state` and `abstract_batch` have the shapes, types and shardings of the training state
    and of a global batch.
    """

    schedule: Schedule
    model: AbstractModel  # on the devices of the run, or those of a dry run's target
    # Returns the state before the first step, and the metrics of `state.initialize_model`.
    initialize: Callable[[], tuple[TrainState, dict[str, float]]]
    # `(state, batch, seed) -> (state, metrics)`, jitted. It donates the state.
    train_step: jax.stages.Wrapped
    abstract_state: TrainState
    abstract_batch: dict[str, jax.ShapeDtypeStruct]
    data_bytes: int  # of training and evaluation images, in the memory of every device

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The shapes, types and shardings of the arguments of a training step."""
        return self.abstract_state, self.abstract_batch, jax.ShapeDtypeStruct((), np.uint32)


def memory_limit() -> int | None:
    """Returns the bytes that programs can use on each device; None if unknown, as on CPUs."""
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in jax.local_devices()]
    return None if None in limits else min(limits)


def check_memory(step: jax.stages.Compiled, data_bytes: int, memory: int | None) -> str:
    """Returns what a compiled step needs, such as '7,112 MiB of 14,515 MiB'.

    `memory` is the number of bytes of one device that programs can use, None if unknown, and
    `data_bytes` what images take of it. Raises `InputError` if the rest does not suffice.
    """
    needed = bytes_needed(step)
    if memory is None:
        return mib(needed)
    text = f"{mib(needed)} of {mib(memory - data_bytes)}"
    if needed > memory - data_bytes:
        raise InputError(
            f"the training step needs {text} that each device has besides {mib(data_bytes)} of "
            f"images. {SAVE_MEMORY}"
        )
    return text


@contextlib.contextmanager
def explain_out_of_memory() -> Iterator[None]:
    """Raises `InputError` with the fields to change if a device has too little memory."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        first_line = str(error).splitlines()[0]
        raise InputError(f"a device ran out of memory ({first_line}). {SAVE_MEMORY}") from error


def bytes_needed(step: jax.stages.Compiled) -> int:
    """Returns the bytes of one device that a program and its arguments take while it runs."""
    memory = step.memory_analysis()
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes  # not in donated arguments
    return memory.argument_size_in_bytes + outputs + memory.temp_size_in_bytes


def mib(size: int) -> str:
    """Formats a number of bytes, for example '7,112 MiB'."""
    return f"{size / 2**20:,.0f} MiB"
