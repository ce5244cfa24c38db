r"""Compares initializations, or any other config fields, over several seeds.

    python -m structinit_jax.compare --config=configs/vit_fashion_mnist.py --workdir=/tmp/compare \
        --schemes=default,mimetic,impulse --seeds=3

Trains every setting with the seeds config.seed, config.seed + 1, …, prints a line for each run and
each evaluation, and writes results.csv, report.md and curves.png to the workdir. Any other field
can be an axis: --grid=model.num_heads=3,6. The first scheme of a command is the baseline of its
settings; if all have the same scheme, the first setting is the baseline. A later command with a
single scheme changes no baseline.

Run the same command again to resume after Ctrl-C or to retry failed runs; with more schemes, values
or seeds, it trains only what is missing. To train on another device (CUDA_VISIBLE_DEVICES) or core
(taskset) too, start the command again while it runs: the second process trains settings that the
first has not begun. Each run has its own workdir, SETTING/seed_K, which all other commands accept.

To train a table of the papers and show the published accuracies next to ours:

    python -m structinit_jax.compare --table=2024.2 --rows=cifar10 --workdir=/tmp/table2 --seeds=1

configs/papers.csv lists the rows of all tables with their configs and published numbers:

    2024.1        ViT-T with learned and sin-cos positions, class token and pooling, on CIFAR-10
    2024.2        initializations of ViT-T on CIFAR-10, CIFAR-100, SVHN and ImageNet-1K
    2024.3        initializations of ViTs with more heads on CIFAR-100
    2024.4        ConvMixer with trained and fixed spatial filters on CIFAR-10
    2024.5        ViTs of depth 8, widths 256 and 512, with 4 to 32 heads on CIFAR-10
    2024.6        pseudo inputs of the solve, ViT-T with 3 and 8 heads on CIFAR-10
    2024.7        ViTs of depth 8, widths 64 and 128, with 4 to 32 heads on CIFAR-10
    2025.1        initializations of ViT-T on six small data sets at 224 pixels
    2025.2        initializations of ViT-T, ViT-S and ViT-B on ImageNet-1K
    2025.3        Swin on six small data sets, MLP-Mixer on CIFAR-10 (our own impulse)
    2025.4        ViT-T on six small data sets; rows 'from_X' take weights from a ViT-S,
                  vit_small_X.safetensors (how to make it: configs/vit_2025_small.py)
    2025.5        ViT-B on ImageNet-1K in three configurations, whose curves are in figure 5
    2025.figure3  training curves of ViT-T on CIFAR-10 and ViT-B on ImageNet-1K

One GPU suffices for the small data sets; ImageNet-1K needs eight or more. The report includes the
notes of configs/papers.csv, such as where published numbers disagree. The difference from a
baseline is reported once the baseline's row is trained. --config.FIELD=VALUE applies to all rows.
"""

import sys

from absl import flags

from structinit_jax import command_line
from structinit_jax.command_line import FLAGS
from structinit_jax.compare import grid
from structinit_jax.compare import settings as settings_lib
from structinit_jax.errors import InputError


def define_flags() -> None:
    """Defines the flags specific to this command."""
    flags.DEFINE_list("schemes", [], "Initializations to compare.")
    text = "Number of seeds per setting: by default 3, or 1 with --table."
    flags.DEFINE_integer("seeds", None, text, lower_bound=1)
    text = "A field and its values, such as model.num_heads=3,6. May be repeated."
    flags.DEFINE_multi_string("grid", [], text)
    flags.DEFINE_string("table", None, "A table of the papers, such as 2024.2, in place of a grid.")
    flags.DEFINE_list("rows", [], "Only table rows whose names contain all these words.")


def main(overrides: command_line.Overrides) -> None:
    """Runs the command; exits with status 1 if a run failed."""
    workdir = command_line.required_workdir()
    given = {name for name in ("config", "schemes", "grid", "table", "rows") if FLAGS[name].value}
    of_grid = {"config"} <= given <= {"config", "schemes", "grid"}
    of_table = {"table"} <= given <= {"table", "rows"}
    if not (of_grid or of_table):
        raise InputError("pass --config (and --schemes, --grid) or --table (and --rows)")
    rows = {}
    if of_table:
        rows = settings_lib.read_table(FLAGS.table, FLAGS.rows)
        settings = settings_lib.configs_of(rows, overrides)
    else:
        config = command_line.read_config(overrides)
        schemes = FLAGS.schemes or [config.attention_init.name]
        settings = settings_lib.expand(config, schemes, settings_lib.parse_axes(FLAGS.grid))
    first = next(iter(settings.values())).seed
    num_seeds = FLAGS.seeds or (1 if of_table else 3)
    failed = grid.run_grid(settings, range(first, first + num_seeds), workdir, rows)
    if failed:
        total = len(settings) * num_seeds
        sys.exit(
            f"{failed} of {total} runs failed: see the report; run the same command again to retry"
        )


if __name__ == "__main__":
    command_line.run(main, define_flags, shared=["config", "workdir"])
