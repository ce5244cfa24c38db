"""Prints the sizes and costs of a run without reading images or computing initial weights.

Data sets listed in `data.datasets` do not have to be present.
"""

import os
import re

import jax
from clu import parameter_overview
from jax.experimental import topologies
from ml_collections import ConfigDict

from structinit_jax import config as config_lib
from structinit_jax.data.datasets import CATALOG, open_dataset
from structinit_jax.data.folder import display_name
from structinit_jax.data.source import check_classes, split_size
from structinit_jax.errors import InputError, prefixed
from structinit_jax.training import build, sharding
from structinit_jax.training.build import mib
from structinit_jax.training.state import abstract_state, make_initializer
from structinit_jax.training.step import make_train_step

# Memory per device that programs can use, as libtpu reports it when a program needs more.
MEMORY = {
    "TPU v4": int(30.75 * 2**30),
    "TPU v5 lite": int(15.75 * 2**30),
    "TPU v5": int(95.74 * 2**30),
    "TPU v6 lite": int(31.25 * 2**30),
    "NVIDIA H100 80GB HBM3": 84_929_347_584 * 3 // 4,  # JAX's default share of a GPU's memory
}
# GpuTargetConfigProto that describes an H100 SXM to XLA on machines without one.
H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 }
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84929347584
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 12 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def dry_run(config: ConfigDict, target: str | None = None) -> None:
    """Compiles the training step of a config and prints parameters, sizes and memory.

    The devices are those of this machine or of `target`; see `find_target`.
    Raises `InputError` if the config, the data or the target cannot be used, or if the step needs
    more memory than a device has.
    """
    config_lib.validate(config)
    scheme = ", ".join(f"{name}={value}" for name, value in config.attention_init.items())
    devices = find_target(target) if target else jax.devices()
    memory = MEMORY.get(devices[0].device_kind) if target else build.memory_limit()
    data = config.data
    with prefixed("config.data: "):
        info = CATALOG.get(data.name) or open_dataset(data.name, data.data_dir, data.channels).info
    with prefixed("config.model."):
        check_classes(info, config.model.num_classes)
    with prefixed("config.data.train_split: "):
        num_examples = split_size(data.train_split, info)
    with prefixed("config.data.eval_split: "):
        num_eval_examples = split_size(data.eval_split, info)
    mesh = build.make_mesh(config, devices)
    schedule = build.make_schedule(config, num_examples)
    model = build.make_model(config, mesh)
    make_initializer(config, model)  # checks that the scheme fits
    optimizer = build.make_optimizer(config, schedule.learning_rate, model)
    state = abstract_state(model, optimizer, config.ema_decay > 0)
    batch = build.abstract_batch(config, mesh)
    step = make_train_step(config, model, optimizer, schedule.learning_rate)
    print(parameter_overview.get_parameter_overview(model.params, include_stats=False))

    with build.explain_errors():
        lowered = build.jit_step(step, mesh, state).lower(state, batch, build.SEED)
        # Without a GPU to try them on, XLA finds no Triton kernel for some products of a Swin.
        is_absent_gpu = target and devices[0].platform == "gpu"
        step = lowered.compile({"xla_gpu_enable_triton_gemm": False} if is_absent_gpu else None)
    data_bytes = build.data_bytes(config, num_examples, num_eval_examples)
    total = build.check_memory(step, data_bytes, memory)
    needs = step.memory_analysis()
    epochs = schedule.num_steps / schedule.steps_per_epoch
    num_processes = len({device.process_index for device in mesh.devices.flat})
    num_parameters = parameter_overview.count_parameters(model.params)
    rows = {
        "model": f"{config.model.name}, {num_parameters:,} parameters",
        "initial weights": config.start_from or scheme,
        "devices": sharding.describe(mesh),
        "batch": f"{config.batch_size} global, {config.batch_size // mesh.size} per device, "
        f"{config.batch_size // num_processes} per process",
        "data": f"{display_name(data.name, data.data_dir)}, {num_examples:,} training examples "
        f"({data.train_split}), {num_eval_examples:,} evaluation examples ({data.eval_split})",
        "steps": f"{schedule.num_steps:,} ({epochs:.1f} epochs of {schedule.steps_per_epoch:.1f} "
        f"steps); evaluations: {len(schedule.eval_steps)}",
        "memory per device": f"{total}: {mib(needs.argument_size_in_bytes)} state and batch, "
        f"{mib(needs.temp_size_in_bytes)} activations and temporaries",
    }
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:<{width}}  {value}")


# -- accelerators that this machine lacks ----------------------------------------------------------


def find_target(name: str) -> list[jax.Device]:
    """Returns the devices of a target such as 'tpu-v5e:4x8' or 'h100:2x8' (machines × GPUs).

    From then on, JAX uses only this machine's CPU: its GPU plugins cannot start without CUDA.
    """
    jax.config.update("jax_platforms", "cpu")
    try:
        if match := re.fullmatch(r"h100:(\d+x\d+)", name):
            return _find_h100s(match[1])
        return _find_tpus(name.removeprefix("tpu-"))
    except RuntimeError as error:
        raise InputError(
            f"--target={name!r} is not a slice such as tpu-v5e:4x8 or h100:2x8, or its compiler "
            f"is not installed (pip install '.[targets]'): {error}"
        ) from error


def _find_tpus(slice_name):
    # Without these two, libtpu complains that this machine has no TPU.
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    # Without this, a second process that loads libtpu fails, as if the first held the chips.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    # A v4 chip has two cores that programs see as one device, which is not libtpu's default here.
    options = {"chip_config_name": "megacore"} if slice_name.startswith("v4:") else {}
    return topologies.get_topology_desc(slice_name, platform="tpu", **options).devices


def _find_h100s(size):
    # When JAX traces `models.attention` for GPUs, it asks this machine for its cuDNN version.
    from jax._src.cudnn import fused_attention_stablehlo

    fused_attention_stablehlo.check_cudnn_version = lambda: 90800
    options = {"target_config": H100, "topology": f"1x{size}"}
    return topologies.get_topology_desc("h100", platform="cuda", **options).devices
