"""Builds schedule, model, optimizer and training step from a config, without allocating arrays.

`config.model.remat` chooses what the step recomputes in the backward pass.
'none' keeps what is costly to compute, such as matrix products, and recomputes elementwise work,
which is cheaper than storing and reading its results. 'dots' keeps the outputs of linear layers,
'full' only the inputs of blocks. 'auto' compiles the step with these in turn, takes the first that
leaves a tenth of the memory free next to the data kept on the device, and prints its choice. CPUs
report no limit and take 'none'.

All policies give the same gradients up to rounding. With 'auto', a run that resumes on another kind
of device may take another policy.
"""

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

from structinit_jax.attention_init import AttentionInit
from structinit_jax.augment import make_augment
from structinit_jax.data.loader import AugmentationSplit, bytes_on_device
from structinit_jax.errors import InputError
from structinit_jax.models.model import REMAT_POLICIES
from structinit_jax.training import mesh as mesh_lib
from structinit_jax.training.optimizer import Schedule, find_loss, find_optimizer, make_schedule
from structinit_jax.training.state import (
    AbstractModel,
    TrainState,
    abstract_model,
    check_attention_init,
    init_state,
    initialize_model,
)
from structinit_jax.training.step import make_train_step

# Part of the memory that 'auto' leaves free: for batches read ahead, for fragmentation, and since
# XLA starts to recompute on its own account when a program nearly fills the memory.
HEADROOM = 0.1
TO_SAVE_MEMORY = (
    "--config.accumulate_steps=2 (or more), --config.fsdp=N for weights and optimizer state, or "
    "more devices"
)


class Setup(NamedTuple):
    """The parts of a run that its config determines, before any array is allocated.

    Attributes:
      schedule: Number of steps, evaluations and the learning rate.
      scheme: Start values of attention.
      augmentation: Which part of the augmentation runs on the host and which in the step.
      model: The model on the mesh of all devices.
      init_state: `(params, model_state) -> state` before the first step, jitted.
      train_steps: `(state, batch) -> (state, metrics)`, jitted, by the values of
        `config.model.remat` to try, fastest first. They donate the state.
      abstract_state: Shapes, types and shardings of the training state.
      abstract_batch: Shapes, types and shardings of a global batch.
      data_bytes: Bytes of the training split in the memory of every device.
    """

    schedule: Schedule
    scheme: AttentionInit
    augmentation: AugmentationSplit
    model: AbstractModel
    init_state: Callable[..., TrainState]
    train_steps: dict[str, jax.stages.Wrapped]
    abstract_state: TrainState
    abstract_batch: dict[str, jax.ShapeDtypeStruct]
    data_bytes: int

    @property
    def train_step(self) -> jax.stages.Wrapped:
        """The fastest of `train_steps`."""
        return next(iter(self.train_steps.values()))


def make_setup(
    config: ConfigDict,
    scheme: AttentionInit,
    augmentation: AugmentationSplit,
    num_examples: int,
    devices: list[jax.Device] | None = None,
) -> Setup:
    """Builds the schedule, the model, the optimizer and the training step of a run.

    Args:
      config: See `structinit_jax.config.base_config`.
      scheme: Start values of attention.
      augmentation: Where training images are cropped, and their augmentation on the devices.
      num_examples: Size of the training split.
      devices: Devices to compile for. The default is all devices of all processes.

    Raises:
      InputError: The fields of the config do not fit together, or the data or devices.
    """
    # -- Mesh and schedule -------------------------------------------------------------------------
    mesh = mesh_lib.make_mesh(config.fsdp, devices)
    mesh_lib.check_batch_size(config.batch_size, mesh.size, config.accumulate_steps)
    replicated, sharded = mesh_lib.replicated(mesh), mesh_lib.batch_sharding(mesh)
    schedule = make_schedule(config, num_examples)

    # -- Model and optimizer -----------------------------------------------------------------------
    model = abstract_model(config, mesh)
    check_attention_init(scheme, model)
    find_loss(config.loss)  # the step looks it up again when it is traced
    optimizer = find_optimizer(config.optimizer)(config, schedule.learning_rate)
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise InputError(
            f"config.optimizer={config.optimizer!r} returns {type(optimizer).__name__}, but an "
            "optax.GradientTransformation is needed"
        )
    make_state = functools.partial(init_state, optimizer=optimizer, with_ema=config.ema_decay > 0)
    shapes = jax.eval_shape(make_state, model.params, model.model_state)
    abstract_state = mesh_lib.shard(mesh, shapes)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state)

    # -- Training step -----------------------------------------------------------------------------
    augment = make_augment(augmentation.on_device, mesh)

    def jit_step(changes):
        def train_step(*args):  # builds the model lazily: most candidates are never traced
            graphdef = abstract_model(config, mesh, **changes).graphdef
            rate = schedule.learning_rate
            step = make_train_step(config, graphdef, optimizer, rate, augment, mesh)
            return step(*args)

        return jax.jit(
            train_step,
            in_shardings=(shardings, sharded),
            out_shardings=(shardings, replicated),
            donate_argnums=0,
        )

    size, channels = augmentation.image_size, config.data.channels
    on_host = augmentation.host_crop is not None
    image_shape = (config.batch_size, size, size, channels)
    return Setup(
        schedule=schedule,
        scheme=scheme,
        augmentation=augmentation,
        model=model,
        init_state=jax.jit(make_state, out_shardings=shardings, donate_argnums=(0, 1)),
        train_steps={name: jit_step(c) for name, c in candidates(config.model).items()},
        abstract_state=abstract_state,
        abstract_batch={
            "image": jax.ShapeDtypeStruct(image_shape, np.uint8, sharding=sharded),
            "label": jax.ShapeDtypeStruct((config.batch_size,), np.int32, sharding=sharded),
        },
        data_bytes=0 if on_host else bytes_on_device(num_examples, size, channels),
    )


# -- compilation -----------------------------------------------------------------------------------


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
    """Returns the policies to try for a model, fastest first.

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


def compile_first_that_fits(
    steps: Mapping[str, Callable[[], jax.stages.Lowered]],
    memory: int | None,
    compiler_options: Mapping[str, bool | int] | None = None,
) -> CompiledStep:
    """Compiles the first step that leaves `HEADROOM` of the memory free, or the last if it fits.

    Every process of a run must call this, and all get the same step.

    Args:
      steps: Functions that lower the training step, by policy, fastest first.
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


def compile_step(
    config: ConfigDict,
    setup: Setup,
    eval_sizes: Iterable[int],
    memory_limit: int | None,
    compiler_options: Mapping[str, bool | int] | None = None,
    first: jax.stages.Lowered | None = None,
) -> CompiledStep:
    """Compiles the first of the training steps that fits next to the data.

    Args:
      config: Config of the run.
      setup: The run.
      eval_sizes: Sizes of the evaluation sets.
      memory_limit: Bytes of one device that programs can use, or None if that is not known.
      compiler_options: Options of XLA.
      first: The fastest step, if it has been lowered.

    Raises:
      InputError: No step fits.
    """
    data = config.data
    if memory_limit is not None:
        memory_limit -= setup.data_bytes
        memory_limit -= sum(bytes_on_device(n, data.image_size, data.channels) for n in eval_sizes)
    arguments = (setup.abstract_state, setup.abstract_batch)
    steps = {
        name: functools.partial(step.lower, *arguments) for name, step in setup.train_steps.items()
    }
    if first is not None:
        steps[next(iter(steps))] = lambda: first
    return compile_first_that_fits(steps, memory_limit, compiler_options)


def initialize(config: ConfigDict, setup: Setup) -> TrainState:
    """Returns the state before the first step, see `training.state.initialize_model`."""
    return setup.init_state(*initialize_model(config, setup.model, setup.scheme))
