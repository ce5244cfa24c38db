"""The memory that a training step needs, and what each device has."""

import contextlib
from collections.abc import Iterator

import jax

from structinit_jax.errors import InputError

SAVE_MEMORY = (
    "To save memory: --config.model.remat=dots (or full, which is slower), "
    "--config.accumulate_steps=2 (or more), --config.model.dtype=bfloat16, --config.fsdp=N on N "
    "devices"
)


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
    # Outputs in the memory of donated arguments need no other.
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + outputs + memory.temp_size_in_bytes


def mib(size: int) -> str:
    """Formats a number of bytes, for example '7,112 MiB'."""
    return f"{size / 2**20:,.0f} MiB"
