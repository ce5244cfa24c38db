"""Chooses what the training step recomputes in the backward pass (`config.model.remat`).

'none' keeps what is costly to compute, such as matrix products, and recomputes elementwise work,
which is cheaper than storing and reading its results. 'dots' keeps the outputs of linear layers,
'full' only the inputs of blocks. 'auto' compiles the step with these in turn, takes the first that
leaves a tenth of the memory free beside the data kept on the device, and prints its choice. CPUs
report no limit and take 'none'.

All policies give the same gradients up to rounding. With 'auto', a run that resumes on another kind
of device may take another policy.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

from structinit_jax.errors import InputError
from structinit_jax.models.model import REMAT_POLICIES

# Part of the memory that 'auto' leaves free: for batches read ahead, for fragmentation, and since
# XLA starts to recompute on its own account when a program nearly fills the memory.
HEADROOM = 0.1
TO_SAVE_MEMORY = (
    "--config.accumulate_steps=2 (or more), --config.fsdp=N for weights and optimizer state, or "
    "more devices"
)


class CompiledStep(NamedTuple):
    """A compiled training step.

    Attributes:
      step: The program.
      description: The policy and the memory of one device, for example 'dots (needs
        7,112 MiB of 14,515 MiB; none needs 19,033 MiB)'.
    """

    step: jax.stages.Compiled
    description: str


def candidates(model: ConfigDict) -> dict[str, dict[str, str]]:
    """Returns the policies to try for a model, the fastest first.

    Args:
      model: The section `config.model`.

    Returns:
      The fields of the section to replace, by policy. Your own models need not have the field
      `remat`; they recompute nothing.
    """
    if "remat" not in model:
        return {"none": {}}
    names = REMAT_POLICIES if model.remat == "auto" else [model.remat]
    return {name: {"remat": name} for name in names}


def memory_limit(devices: Sequence[jax.Device] | None = None) -> int | None:
    """Returns the bytes that programs can use on each of the devices, by default this process's.

    None if that is unknown, as on CPUs.
    """
    devices = jax.local_devices() if devices is None else devices
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in devices]
    return None if None in limits else min(limits)


def compile_step(
    steps: Mapping[str, Callable[[], jax.stages.Lowered]],
    memory: int | None,
    compiler_options: Mapping[str, bool | int] | None = None,
) -> CompiledStep:
    """Compiles the first step that leaves `HEADROOM` of the memory free, or the last if it fits.

    Every process of a run must call this, and all get the same step.

    Args:
      steps: Functions that lower the training step, by policy, the fastest first.
      memory: Bytes of one device that the step can use. If None, every step that compiles fits.
      compiler_options: Options of XLA.

    Raises:
      InputError: No step fits.
    """
    too_large = []
    for number, (policy, lower) in enumerate(steps.items(), start=1):
        is_last = number == len(steps)
        room = memory if is_last or memory is None else round(memory * (1 - HEADROOM))
        try:
            compiled = lower().compile(dict(compiler_options or {}))
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error):
                raise
            fits, needs = False, _needed_by(error)
        else:
            needed = bytes_needed(compiled)
            fits, needs = room is None or needed <= room, mib(needed)
        # Limits, and on GPUs programs, may differ a little between processes.
        if multihost_utils.process_allgather(np.asarray(fits)).all():
            limit = "" if room is None else f" of {mib(room)}"
            details = "; ".join([f"needs {needs}{limit}", *too_large])
            return CompiledStep(compiled, f"{policy} ({details})")
        too_large.append(f"{policy} needs {needs}")
    limit = "" if memory is None else f" of {mib(memory)}"
    auto = "--config.model.remat=auto, " if list(steps) in (["none"], ["dots"]) else ""
    raise InputError(
        f"the training step does not fit into the memory{limit} of each device: with remat "
        f"{', '.join(too_large)}. To save memory: {auto}{TO_SAVE_MEMORY}"
    )


def bytes_needed(compiled: jax.stages.Compiled) -> int:
    """Returns the bytes of one device that a program and its arguments take while it runs."""
    memory = compiled.memory_analysis()
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes  # not in donated arguments
    return memory.argument_size_in_bytes + outputs + memory.temp_size_in_bytes


def is_out_of_memory(error: jax.errors.JaxRuntimeError) -> bool:
    """Returns whether XLA refused a program because it needs too much memory."""
    return "RESOURCE_EXHAUSTED" in str(error)


def mib(size: int) -> str:
    """Formats a number of bytes, for example '7,112 MiB'."""
    return f"{size / 2**20:,.0f} MiB"


def _needed_by(error: Exception) -> str:
    """Returns what XLA's message says of a program that it refuses, for example '23.32 GiB'.

    This is all of the program, or only its temporaries.
    """
    size = re.search(r"(\d[\d.]*)([KMG])\b", str(error))
    return f"at least {size[1]} {size[2]}iB" if size else "more"
