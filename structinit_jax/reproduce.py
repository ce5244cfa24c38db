"""Reproduces tables of the papers and puts the published accuracies next to ours.

    python -m structinit_jax.reproduce --table=2024.2 --rows=cifar10 --workdir=/tmp/table2
    python -m structinit_jax.reproduce --table=2024.2 --scale=small --workdir=/tmp/table2_small

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
    2025.4        ViT-T on six small data sets, and weights selected from a ViT-S
    2025.figure3  training curves of ViT-T on CIFAR-10 and ViT-B on ImageNet-1K

One GPU suffices for the small data sets; ImageNet-1K needs eight or more.

--rows=A,B selects the rows whose names contain all of these words; the difference to a baseline is
reported once its row is trained too. --scale=small trains small models of the same shape on digits,
in minutes on a CPU and without a download; their accuracies are not comparable with the published
ones. --config.FIELD=VALUE applies to all rows. Workdir, report and resuming are as in `compare`.
"""

# isort: split
import csv
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict

from structinit_jax import command_line, export
from structinit_jax import config as config_lib
from structinit_jax.command_line import WORKDIR
from structinit_jax.compare import train_grid
from structinit_jax.errors import InputError
from structinit_jax.train import train
from structinit_jax.training.workdir import prepare_workdir

PAPERS = Path("configs/papers.csv")  # of a checkout, like the configs that it names
_TABLE = flags.DEFINE_string("table", None, "The table, such as 2024.2; --help lists them.")
_ROWS = flags.DEFINE_list("rows", [], "Only the rows whose name has all these words.")
_SCALE = flags.DEFINE_enum("scale", "full", ["full", "small"], "Size of the models and data.")
_SEEDS = flags.DEFINE_integer("seeds", 1, "Seeds of each row, from config.seed on.", lower_bound=1)
SMALL_NOTE = "Every row is a small model on digits (--scale=small), whatever its name says."
TEACHER = "teacher"  # name of the row whose model the others select their weights from


def read_table(table: str | None) -> dict[str, dict[str, str]]:
    """Returns the rows of a table of `configs/papers.csv` by name; the cells by column."""
    if not PAPERS.exists():
        raise InputError(f"{PAPERS} is not in {Path.cwd()}: run this command in a checkout")
    rows = list(csv.DictReader(PAPERS.read_text(encoding="utf-8").splitlines()))
    found = {row["row"]: row for row in rows if row["table"] == table}
    if not found:
        tables = ", ".join(dict.fromkeys(row["table"] for row in rows))
        raise InputError(f"--table={table} must be one of {tables}")
    return found


def make_settings(
    rows: dict[str, dict[str, str]],
    words: Sequence[str],
    overrides: Sequence[tuple[str, str]],
    small: bool,
) -> dict[str, ConfigDict]:
    """Returns the configs of the rows whose names have all the words, by name.

    The overrides are fields of all configs, with values as on the command line, and are set last.
    """
    settings = {}
    for name, row in rows.items():
        if name != TEACHER and not set(words) <= set(name.split(",")):
            continue
        config = config_lib.load_config(row["config"])
        for field in row["fields"].split():
            command_line.set_field(config, *field.split("=", 1))
        if small:
            config = shrink(config)
        for field, text in overrides:
            command_line.set_field(config, field, text)
        settings[name] = config.lock()
    if not settings.keys() - {TEACHER}:
        raise InputError(f"--rows={','.join(words)}: no row has these words: {'; '.join(rows)}")
    return settings


def shrink(config: ConfigDict) -> ConfigDict:
    """Returns the recipe of `vit_t_digits.py` with a small model of the same shape.

    Layers and widths are fewer; heads, kernels, positions and initialization stay.
    """
    model = config.model
    if model.name == "vit":
        # Every head keeps two channels or more, and sin-cos positions need a multiple of four.
        model.width = max(model.width // 4, 4 * -(-2 * model.num_heads // 4))
    elif model.name == "swin":
        tiny = model.width < 128
        model.update(width=16 if tiny else 32, depths=(2, 2), window_size=4)
        model.num_heads = (2, 4) if tiny else (4, 8)
    else:
        model.width //= 8
    changes = dict(depth=3, num_classes=10, patch_size=1, dtype="float32", drop_path=0.0)
    model.update({field: value for field, value in changes.items() if field in model})
    small = config_lib.load_config("configs/vit_t_digits.py")
    small.model, small.attention_init = model, config.attention_init
    small.start_from = config.start_from
    if model.name == "vit" and small.attention_init.name == "impulse_2024":
        small.attention_init.max_steps = 1000
    return small


def main(overrides: command_line.Overrides) -> None:
    """Runs the command; exits with status 1 if a run failed."""
    if not WORKDIR.value:
        raise InputError("--workdir is required: the output directory, such as /tmp/table")
    rows, small = read_table(_TABLE.value), _SCALE.value == "small"
    settings = make_settings(rows, _ROWS.value, overrides, small)
    workdir, teacher = prepare_workdir(WORKDIR.value), settings.pop(TEACHER, None)
    selected = [config for config in settings.values() if config.start_from == TEACHER]
    if selected:
        train(teacher, workdir / TEACHER)
        weights = workdir / f"{TEACHER}.safetensors"
        export.export(teacher, workdir / TEACHER, weights)
        for config in selected:
            config.start_from = str(weights)
    first_seed = next(iter(settings.values())).seed
    failed = train_grid.run_grid(
        settings,
        range(first_seed, first_seed + _SEEDS.value),
        workdir,
        baselines={name: rows[name]["baseline"] for name in settings},
        published={} if small else {name: rows[name]["published"] for name in settings},
        note=SMALL_NOTE if small else "",
        command=shlex.join(["python", "-m", "structinit_jax.reproduce", *sys.argv[1:]]),
    )
    if failed:
        sys.exit(f"{failed} runs failed: see the report; the same command trains them again")


if __name__ == "__main__":
    command_line.run(main, shared=["workdir"])
