"""Prints the sizes and costs of a run without reading images or allocating weights.

Data sets that `data.datasets` lists need not be present.
"""

import time

from clu import parameter_overview
from ml_collections import ConfigDict

from structinit_jax import config as config_lib
from structinit_jax.data.datasets import CATALOG, EVALUATION_SETS, find_info
from structinit_jax.data.source import check_classes, split_size
from structinit_jax.training import mesh as mesh_lib
from structinit_jax.training.remat import mib
from structinit_jax.training.setup import compile_step, set_up
from structinit_jax.training.state import count_parameters
from structinit_jax.training.targets import find_target, this_machine


def dry_run(config: ConfigDict, target: str | None = None) -> dict[str, str]:
    """Compiles the training step of a config and prints parameters, FLOPs and memory.

    The FLOPs are XLA's count of everything that the compiled program does.

    Args:
      config: See `structinit_jax.config.base_config`.
      target: Devices to compile for, see `training.targets.find_target`. The default is the devices
        of this machine.

    Returns:
      The printed lines by their name.

    Raises:
      InputError: The config, the data or the target cannot be used, or the step needs more memory
        than a device of the target has.
    """
    config_lib.validate(config)
    devices, memory_limit, options = find_target(target) if target else this_machine()
    data = config.data
    info = find_info(data.name, data.data_dir or None, data.channels)
    check_classes(info, config.model.num_classes)
    num_examples = split_size(data.name, data.train_split, info, "data.train_split")
    if data.eval_name:
        test_name = data.eval_name.split("/")[0]
        test_split = EVALUATION_SETS[test_name][0]
        num_eval = CATALOG[test_name].num_examples[test_split]
        test_split = f"{data.eval_name} {test_split}"
    else:
        test_split = data.eval_split
        num_eval = split_size(data.name, test_split, info, "data.eval_split")
    eval_sizes = [num_eval]
    if spec := data.train_eval_split:
        eval_sizes.append(split_size(data.name, spec, info, "data.train_eval_split"))
    setup = set_up(config, info, num_examples, devices)
    print(parameter_overview.get_parameter_overview(setup.model.params, include_stats=False))

    schedule, mesh = setup.schedule, setup.model.mesh
    start = time.perf_counter()
    step, remat = compile_step(config, setup, eval_sizes, memory_limit, options)
    compile_seconds = time.perf_counter() - start
    memory = step.memory_analysis()
    num_processes = len({device.process_index for device in mesh.devices.flat})
    num_flops = step.cost_analysis()["flops"]
    rows = {
        "model": f"{config.model.name}, {count_parameters(setup.model.params):,} parameters",
        "attention_init": ", ".join(f"{k}={v}" for k, v in config.attention_init.items()),
        "devices": mesh_lib.describe(mesh),
        "batch": f"{config.batch_size} global, {config.batch_size // mesh.size} per device, "
        f"{config.batch_size // num_processes} per host",
        "data": f"{data.name}, {num_examples:,} training examples ({data.train_split}), "
        f"{num_eval:,} test examples ({test_split})",
        "steps": f"{schedule.num_steps:,}, "
        f"{schedule.num_steps / schedule.steps_per_epoch:.1f} epochs of "
        f"{schedule.steps_per_epoch:.1f}; {len(schedule.eval_steps)} evaluations",
        "FLOPs per step": f"{num_flops:.3e} on each device",
        "memory per device": f"{mib(memory.argument_size_in_bytes)} state and batch, "
        f"{mib(memory.temp_size_in_bytes)} activations and temporaries",
        "remat": remat,
        "compiled in": f"{compile_seconds:.0f} s",
    }
    if memory_limit:
        rows["memory per device"] += f"; {mib(memory_limit)} available"
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:<{width}}  {value}")
    return rows
