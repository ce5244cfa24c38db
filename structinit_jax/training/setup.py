"""The parts of a run before any array is allocated, and the compilation of its training step.

`config.model.remat` is the policy of what the step recomputes in the backward pass, see
`models.model.run_stack`. 'auto' compiles the step with each policy in turn, fastest first, and
takes the first that fits into the memory next to the data with a tenth to spare. CPUs report no
limit and take 'none'. All policies give the same gradients up to rounding; a run that resumes on
another kind of device may take another one.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from structinit_jax.errors import InputError
from structinit_jax.training.optimizer import Schedule
from structinit_jax.training.state import AbstractModel, TrainState

# Part of the memory that 'auto' leaves free: for batches read ahead, for fragmentation, and since
# XLA starts to recompute on its own account when a program nearly fills the memory.
HEADROOM = 0.1


class Setup(NamedTuple):
    """The parts of a run that its config determines, before any array is allocated.

    `abstract_state` and `abstract_batch` have the shapes, types and shardings of the training state
    and of a global batch.
    """

    schedule: Schedule
    model: AbstractModel  # on the devices of the run, or those of a dry run's target
    # Returns the state before the first step, and the metrics of `state.initialize_model`.
    initialize: Callable[[], tuple[TrainState, dict[str, float]]]
    # `(state, batch, seed) -> (state, metrics)`, jitted, by the values of `config.model.remat` to
    # try, fastest first. They donate the state.
    train_steps: dict[str, jax.stages.Wrapped]
    abstract_state: TrainState
    abstract_batch: dict[str, jax.ShapeDtypeStruct]
    data_bytes: int  # of training and evaluation images, in the memory of every device

    @property
    def train_step(self) -> jax.stages.Wrapped:
        """The fastest of `train_steps`."""
        return next(iter(self.train_steps.values()))

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The shapes, types and shardings of the arguments of a training step."""
        return self.abstract_state, self.abstract_batch, jax.ShapeDtypeStruct((), np.uint32)


def memory_limit() -> int | None:
    """Returns the bytes that programs can use on each device; None if unknown, as on CPUs."""
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in jax.local_devices()]
    return None if None in limits else min(limits)


def compile_step(
    setup: Setup,
    memory: int | None,
    compiler_options: Mapping[str, bool | int] | None = None,
    first: Callable[[], jax.stages.Compiled] | None = None,
) -> tuple[jax.stages.Compiled, str]:
    """Compiles the first of the training steps that fits next to the data.

    All but the last must leave `HEADROOM` of the memory free. `memory` is the number of bytes of
    one device that programs can use; if it is None, every step that compiles fits. `first` returns
    the program of the fastest step, if it is compiled elsewhere. Every process of a run must call
    this, and all get the same step.

    Returns:
      The program, and its policy and memory, for example 'dots (needs 7,112 MiB of 14,515 MiB; none
      needs 19,033 MiB)'.

    Raises:
      InputError: No step fits.
    """

    def compile_(step):
        lowered = step.lower(*setup.arguments)
        return lowered.compile(dict(compiler_options or {}))

    memory = None if memory is None else memory - setup.data_bytes
    tries = []
    for number, (policy, step) in enumerate(setup.train_steps.items(), start=1):
        is_last = number == len(setup.train_steps)
        room = memory if is_last or memory is None else round(memory * (1 - HEADROOM))
        try:
            compiled = first() if first and number == 1 else compile_(step)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            fits, needs = False, "more than there is"
        else:
            needed = bytes_needed(compiled)
            fits, needs = room is None or needed <= room, mib(needed)
        # Limits, and on GPUs programs, may differ a little between processes.
        if multihost_utils.process_allgather(np.asarray(fits)).all():
            limit = "" if room is None else f" of {mib(room)}"
            details = "; ".join([f"needs {needs}{limit}", *tries])
            return compiled, f"{policy} ({details})"
        tries.append(f"{policy} needs {needs}")
    limit = "" if memory is None else f" of {mib(memory)} beside {mib(setup.data_bytes)} of images"
    raise InputError(
        f"the training step does not fit into the memory{limit} of each device: with remat "
        f"{', '.join(tries)}. To save memory: --config.accumulate_steps=2 (or more), "
        "--config.model.dtype=bfloat16, --config.model.remat=auto, --config.fsdp=N on N devices"
    )


def bytes_needed(compiled: jax.stages.Compiled) -> int:
    """Returns the bytes of one device that a program and its arguments take while it runs."""
    memory = compiled.memory_analysis()
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes  # not in donated arguments
    return memory.argument_size_in_bytes + outputs + memory.temp_size_in_bytes


def mib(size: int) -> str:
    """Formats a number of bytes, for example '7,112 MiB'."""
    return f"{size / 2**20:,.0f} MiB"
