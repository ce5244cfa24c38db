"""Reproduces tables of the papers and puts the published accuracies next to ours.

    python -m structinit_jax.reproduce --table=2024.2 --rows=cifar10 --workdir=/tmp/table2

configs/papers.csv has the rows of all tables with their configs and published figures:

    2024.1        ViT-T with learned and sin-cos positions, class token and pooling, on CIFAR-10
    2024.2        initializations of ViT-T on CIFAR-10, CIFAR-100, SVHN and ImageNet-1K
    2024.3        initializations of ViTs with more heads on CIFAR-100
    2024.4        ConvMixer with trained and fixed spatial filters on CIFAR-10
    2024.5        ViTs of depth 8, widths 256 and 512, with 4 to 32 heads on CIFAR-10
    2024.6        pseudo inputs of the solve, ViT-T with 3 and 8 heads on CIFAR-10
    2024.7        ViTs of depth 8, widths 64 and 128, with 4 to 32 heads on CIFAR-10
    2025.1        initializations of ViT-T on six small data sets at 224 pixels
    2025.2        initializations of ViT-T, ViT-S and ViT-B on ImageNet-1K
    2025.3        Swin and MLP-Mixer (our own impulse) on six small data sets
    2025.4        ViT-T on six small data sets; rows 'from_X' take weights from a ViT-S,
                  vit_small_X.safetensors (how to make it: configs/vit_2025_small.py)
    2025.5        ViT-B on ImageNet-1K in three configurations, whose curves are in figure 5
    2025.figure3  training curves of ViT-T on CIFAR-10 and ViT-B on ImageNet-1K

One GPU suffices for the small data sets; ImageNet-1K needs eight or more. The report has the notes
of configs/papers.csv, such as where published figures disagree.

--rows=A,B selects the rows whose names contain all of these words; the difference to a baseline is
reported once its row is trained too. --config.FIELD=VALUE applies to all rows. Workdir, report and
resuming are as in `compare`.
"""

import csv
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict

from structinit_jax import command_line
from structinit_jax import config as config_lib
from structinit_jax.command_line import FLAGS
from structinit_jax.compare import train_grid
from structinit_jax.errors import InputError

PAPERS = Path("configs/papers.csv")  # of a checkout, like the configs that it names


def define_flags() -> None:
    """Defines the flags of this command alone."""
    flags.DEFINE_string("table", None, "The table, such as 2024.2; --help lists them.")
    flags.DEFINE_list("rows", [], "Only the rows whose name has all these words.")
    flags.DEFINE_integer("seeds", 1, "Seeds of each row, from config.seed on.", lower_bound=1)


def read_table(table: str | None) -> dict[str, dict[str, str]]:
    """Returns the rows of a table of `configs/papers.csv` by name, each a dict by column."""
    if not PAPERS.exists():
        raise InputError(f"{PAPERS} is not in {Path.cwd()}: run this command in a checkout")
    rows = list(csv.DictReader(PAPERS.read_text(encoding="utf-8").splitlines()))
    found = {row["row"]: row for row in rows if row["table"] == table}
    if not found:
        tables = ", ".join(dict.fromkeys(row["table"] for row in rows))
        raise InputError(f"--table={table} must be one of {tables}")
    return found


def make_settings(
    rows: dict[str, dict[str, str]], words: Sequence[str], overrides: command_line.Overrides
) -> dict[str, ConfigDict]:
    """Returns the configs of the rows whose names have all the words, by name.

    The overrides are fields of all configs, with values as on the command line, and are set last.
    """
    settings = {}
    for name, row in rows.items():
        if not set(words) <= set(name.split(",")):
            continue
        config = config_lib.load_config(row["config"])
        fields = [tuple(field.split("=", 1)) for field in row["fields"].split()]
        command_line.set_fields(config, fields)
        command_line.set_fields(config, overrides)
        settings[name] = config.lock()
    if not settings:
        raise InputError(f"--rows={','.join(words)}: no row has these words: {'; '.join(rows)}")
    return settings


def main(overrides: command_line.Overrides) -> None:
    """Runs the command; exits with status 1 if a run failed."""
    if not FLAGS.workdir:
        raise InputError("--workdir is required: the output directory, such as /tmp/table")
    rows = read_table(FLAGS.table)
    settings = make_settings(rows, FLAGS.rows, overrides)
    first_seed = next(iter(settings.values())).seed
    failed = train_grid.run_grid(
        settings,
        range(first_seed, first_seed + FLAGS.seeds),
        FLAGS.workdir,
        baselines={name: rows[name]["baseline"] for name in settings},
        published={name: rows[name]["published"] for name in settings},
        notes={name: rows[name]["note"] for name in settings},
    )
    if failed:
        sys.exit(f"{failed} runs failed: see the report; the same command tries them again")


if __name__ == "__main__":
    command_line.run(main, define_flags, shared=["workdir"])
