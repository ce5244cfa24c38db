"""What a config would train and cost, without data and without device memory."""

import jax
from ml_collections import ConfigDict

from structinit_jax import config as config_lib
from structinit_jax.data import info as info_lib
from structinit_jax.data.datasets import find_info
from structinit_jax.program import build_program, make_plan, parameter_table
from structinit_jax.training import flops
from structinit_jax.training import mesh as mesh_lib
from structinit_jax.training.collectives import bytes_by_kind
from structinit_jax.training.state import count_parameters


def dry_run(config: ConfigDict) -> None:
    """Builds model, state and step abstractly and prints their sizes and costs.

    FLOPs are those of the model's products, forward and backward (see `training.flops`). Memory is
    that of the step compiled for the devices at hand.

    Raises:
      InputError: for any mistake in the config that can be seen without data.
    """
    config_lib.validate(config)
    data = config.data
    info = find_info(data.name, data.data_dir or None)
    info_lib.check_examples(info, num_classes=config.model.num_classes, channels=data.channels)
    num_examples = info_lib.split_size(data.name, data.train_split, info, "data.train_split")
    if data.eval_name:
        test_name = data.eval_name.split("/")[0]
        test_split = info_lib.EVALUATION_SETS[test_name][0]
        num_eval = info_lib.CATALOG[test_name].num_examples[test_split]
        test_split = f"{data.eval_name} {test_split}"
    else:
        test_split = data.eval_split
        num_eval = info_lib.split_size(data.name, test_split, info, "data.eval_split")
    plan = make_plan(config, info, num_examples)
    program = build_program(config, plan)
    print(parameter_table(program))

    num_devices, num_hosts = program.mesh.size, jax.process_count()
    step = program.train_step.lower(program.abstract_state, program.abstract_batch).compile()
    memory = step.memory_analysis()
    per_image = flops.flops_per_image(config)
    rows = {
        "model": f"{config.model.name}, {count_parameters(program.abstract_state.params):,} "
        "parameters",
        "attention_init": ", ".join(f"{k}={v}" for k, v in config.attention_init.items()),
        "devices": mesh_lib.describe(program.mesh),
        "batch": f"{config.batch_size} global, {config.batch_size // num_devices} per device, "
        f"{config.batch_size // num_hosts} per host",
        "data": f"{data.name}, {num_examples:,} examples to train on ({data.train_split}), "
        f"{num_eval:,} to test on ({test_split})",
        "steps": f"{plan.num_steps:,}, {plan.num_steps / plan.steps_per_epoch:.1f} epochs of "
        f"{plan.steps_per_epoch:.1f}; {len(plan.eval_steps)} evaluations",
        "FLOPs of a step": f"{per_image * config.batch_size:.3e}, {per_image:.3e} per image",
        "memory per device": f"{_mib(memory.argument_size_in_bytes)} state and batch, "
        f"{_mib(memory.temp_size_in_bytes)} activations and temporaries",
    }
    if num_devices > 1:
        rows["sent per step"] = ", ".join(
            f"{kind} of {_mib(size)}" for kind, size in bytes_by_kind(step.as_text()).items()
        )
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:<{width}}  {value}")


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
