r"""Compares initializations, and any other fields, over several seeds.

    python -m structinit_jax.compare --config=configs/vit_fashion_mnist.py --workdir=/tmp/compare \
        --schemes=default,mimetic,impulse --seeds=3

Trains every setting with the seeds config.seed, config.seed + 1, …, prints a line for each run and
each evaluation, and writes results.csv, report.md and curves.png to the workdir. Any
field can be an axis: --grid=model.num_heads=3,6. The first scheme of the latest command is the
baseline, or the first setting if all have the same scheme.

The same command resumes after Ctrl-C and retries failed runs; with more schemes, values or seeds it
trains only what is missing. Started a second time while it runs, for example with another device
(CUDA_VISIBLE_DEVICES) or core (taskset), it trains settings that the first has not begun. Each run
is a workdir of its own, SETTING/seed_K, for all other commands.
"""

import sys

from absl import flags

from structinit_jax import command_line
from structinit_jax.command_line import FLAGS
from structinit_jax.compare import train_grid
from structinit_jax.errors import InputError


def define_flags() -> None:
    """Defines the flags of this command alone."""
    flags.DEFINE_list("schemes", [], "Initializations to compare.")
    flags.DEFINE_integer("seeds", 3, "Seeds of each setting.", lower_bound=1)
    text = "A field and its values, such as model.num_heads=3,6. May be repeated."
    flags.DEFINE_multi_string("grid", [], text)


def main(overrides: command_line.Overrides) -> None:
    """Runs the command; exits with status 1 if a run failed."""
    if not FLAGS.workdir:
        raise InputError("--workdir is required: the output directory, such as /tmp/compare")
    if FLAGS.config is None:
        raise InputError("--config is required, such as --config=configs/vit_fashion_mnist.py")
    config = command_line.read_config(overrides)
    schemes = FLAGS.schemes or [config.attention_init.name]
    failed = train_grid.run_grid(
        train_grid.expand(config, schemes, train_grid.parse_axes(FLAGS.grid)),
        range(config.seed, config.seed + FLAGS.seeds),
        FLAGS.workdir,
    )
    if failed:
        sys.exit(f"{failed} runs failed: see the report; the same command tries them again")


if __name__ == "__main__":
    command_line.run(main, define_flags, shared=["config", "workdir"])
