r"""Compares initializations, and any other fields, over several seeds.

    python -m structinit_jax.compare --config=configs/vit_fashion_mnist.py --workdir=/tmp/compare \
        --schemes=default,mimetic,impulse --seeds=3

Trains every setting with the seeds config.seed, config.seed + 1, …, shows the progress and the time
left, and writes results.csv, report.md, report.html and curves.png to the workdir. Any field can be
an axis: --grid.config.model.num_heads=3,6. If all settings have the same scheme, the first setting
is the baseline.

The same command resumes after Ctrl-C and retries failed runs; with more schemes, values or seeds it
trains only what is missing. Fields that do not change the results, such as config.data.data_dir,
may differ from earlier commands. Each run is a workdir of its own, SETTING/seed_K, for all other
commands.
"""

# isort: split
import re
import shlex
import sys

from absl import flags
from ml_collections import ConfigDict

from structinit_jax import command_line
from structinit_jax.command_line import CONFIG, WORKDIR
from structinit_jax.compare import grid, report, run
from structinit_jax.errors import InputError
from structinit_jax.training.workdir import local_path

_SCHEMES = flags.DEFINE_list("schemes", [], "Initializations to compare.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "Seeds of each setting.", lower_bound=1)
_GRID = flags.DEFINE_multi_string(
    "grid", [], "Values of a field: --grid.config.model.num_heads=3,6. May be repeated."
)
_BASELINE = flags.DEFINE_string(
    "baseline",
    None,
    "Scheme that the others are compared with. The default is that of earlier commands in the "
    "workdir, or else the first scheme.",
)
_TOGETHER = flags.DEFINE_enum(
    "together",
    "auto",
    ["auto", "yes", "no"],
    "Train as many seeds of a setting in one program as fit into memory, each setting on one "
    "device. auto: on accelerators, unless config.fsdp splits the weights.",
)
_REPORT_ONLY = flags.DEFINE_bool(
    "report_only", False, "Only report what has been trained so far; needs no --config."
)


def main(config: ConfigDict | None) -> None:
    """Runs the command; exits with status 1 if a run failed."""
    if not WORKDIR.value:
        raise InputError("--workdir is required: the output directory, such as /tmp/compare")
    if _REPORT_ONLY.value:
        for flag in (_SCHEMES, _SEEDS, _GRID, _BASELINE, _TOGETHER):
            if flag.present:
                text = " ".join(_written(flags.FLAGS[flag.name].serialize().splitlines()))
                raise InputError(
                    f"{text}: --report_only reports what earlier commands have trained, with "
                    "their baseline: leave out one of the two"
                )
        report.write_report(local_path(WORKDIR.value))
        return
    if config is None:
        raise InputError(
            "--config is required, such as --config=configs/vit_fashion_mnist.py, unless "
            "--report_only is given"
        )
    command_line.check_schemes(_SCHEMES.value)
    schemes = _SCHEMES.value or [config.attention_init.name]
    settings = grid.expand(config, schemes, grid.parse_axes(_GRID.value))
    failed = run.run_grid(
        settings,
        range(config.seed, config.seed + _SEEDS.value),
        WORKDIR.value,
        locations=dict.fromkeys(settings, CONFIG.value),
        baseline=_BASELINE.value,
        started_by=shlex.join(["python", "-m", "structinit_jax.compare", *_written(sys.argv[1:])]),
        together={"auto": None, "yes": True, "no": False}[_TOGETHER.value],
    )
    if failed:
        sys.exit(f"{failed} runs failed: see the report; the same command trains them again")


def _read_axes(words: list[str]) -> list[str]:
    """Turns the form --grid.config.FIELD=VALUES into that of a flag."""
    return [re.sub(r"^--?grid\.", "--grid=", word) for word in words]


def _written(words: list[str]) -> list[str]:
    """Undoes `_read_axes`."""
    return [re.sub(r"^--grid=", "--grid.", word) for word in words]


if __name__ == "__main__":
    sys.argv = _read_axes(sys.argv)
    command_line.run(main, shared=["workdir"], of_a_run=False)
