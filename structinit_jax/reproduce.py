"""Reproduces tables of the papers, with the published accuracies beside ours.

    python -m structinit_jax.reproduce --list
    python -m structinit_jax.reproduce --table=2024.2 --rows=cifar10 --workdir=/tmp/table2
    python -m structinit_jax.reproduce --table=2024.2 --scale=small --workdir=/tmp/table2_small

--scale=small trains small models of the same shape on subsets of digits, in minutes on a CPU and
without a download; their accuracies say nothing about the published ones. --rows=A,B selects the
rows whose names contain all of these words; the difference to a baseline is reported once its row
is trained too. --config.FIELD=VALUE applies to all rows. The workdir, the report and resuming are
those of `structinit_jax.compare`.
"""

# isort: split
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict

from structinit_jax import command_line, export, resume
from structinit_jax import config as config_lib
from structinit_jax.command_line import WORKDIR
from structinit_jax.compare import run
from structinit_jax.compare.papers import TABLES, Row, Table
from structinit_jax.errors import InputError, StoppedError
from structinit_jax.train import PREEMPTED_EXIT_CODE, train
from structinit_jax.training.workdir import StopRequest, prepare_workdir

_TABLE = flags.DEFINE_enum("table", None, list(TABLES), "The table, such as 2024.2.")
_ROWS = flags.DEFINE_list("rows", [], "Only the rows whose name has all these words.")
_SCALE = flags.DEFINE_enum("scale", "full", ["full", "small"], "Size of the models and data.")
_SEEDS = flags.DEFINE_integer("seeds", 1, "Seeds of each row, from config.seed on.", lower_bound=1)
_LIST = flags.DEFINE_bool("list", False, "List the tables and what they need, and exit.")

SMALL_NOTE = (
    "Every row is a small model on digits (--scale=small), also where its name has another data "
    "set: its accuracy is not comparable with the published ones."
)
# Data sets of a table -> the digits that stand for them, in the order of their first appearance.
SUBSETS = ("train", "train[:800]", "train[:400]", "train[:200]", "train[400:]", "train[800:]")


def make_settings(
    table: Table, words: Sequence[str], overrides: Sequence[tuple[str, str]], small: bool
) -> dict[str, ConfigDict]:
    """Returns the configs of the rows whose name has all the words, by name.

    Args:
      table: The table.
      words: Words of the names.
      overrides: Fields to set in all configs, with their values as on the command line.
      small: Whether to shrink the configs.
    """
    sets = list(dict.fromkeys(_dataset(row) for row in table.rows.values()))
    settings = {}
    for name, row in table.rows.items():
        if set(words) <= set(name.split(",")):
            config = config_lib.load_config(row.location)
            for field, text in row.fields:
                command_line.set_field(config, field, text)
            if small:
                shrink(config, SUBSETS[sets.index(_dataset(row)) % len(SUBSETS)])
            settings[name] = _finish(config, overrides)
    if not settings:
        raise InputError(
            f"--rows={','.join(words)}: no row has these words. The rows: {'; '.join(table.rows)}"
        )
    return settings


def shrink(config: ConfigDict, train_split: str) -> None:
    """Replaces the data by digits, and the model by a small one of the same shape.

    Layers, widths and epochs are fewer; heads, kernels, positions and initialization stay.
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
    if "depth" in model:
        model.depth = 3
    model.update(num_classes=10, patch_size=1)
    for field, value in dict(dtype="float32", drop_path=0.0).items():
        if field in model:
            model[field] = value
    config.update(
        num_epochs=20.0,
        batch_size=64,
        schedule="cosine",
        learning_rate=2e-3,
        warmup_epochs=2.0,
        cooldown_epochs=0.0,
        adam_epsilon=1e-8,
        clip_norm=1.0,
        log_every_steps=10,
        eval_every_epochs=2.0,
        checkpoint_every_steps=500,
    )
    if model.name == "vit" and config.attention_init.name == "impulse_2024":
        with config.unlocked():
            config.attention_init.max_steps = 1000
    base = config_lib.base_config(model.name)
    config.augment.update(base.augment)
    config.data.update(base.data)
    config.data.update(
        name="digits",
        train_split=train_split,
        image_size=8,
        channels=1,
        mean=(0.305,),
        std=(0.376,),
    )


def train_teacher(
    location: str, overrides: Sequence[tuple[str, str]], small: bool, workdir: Path
) -> Path:
    """Trains the model whose weights are selected, and returns its safetensors file."""
    config = config_lib.load_config(location)
    if small:
        shrink(config, SUBSETS[0])
    config = _finish(config, overrides)
    stop = StopRequest()
    train(config, workdir / "teacher", stop_request=stop)
    if stop.reached(0):  # by a signal during the last step
        raise StoppedError(run.STOPPED, PREEMPTED_EXIT_CODE)
    path = workdir / resume.TEACHER
    export.export(config, workdir / "teacher", path)
    return path


def _finish(config, overrides):
    for field, text in overrides:
        command_line.set_field(config, field, text)
    config_lib.set_base_init(config)
    return config.lock()


def _dataset(row: Row) -> str:
    return config_lib.load_config(row.location).data.name


def find_baselines(names: Iterable[str], baseline: str) -> dict[str, str]:
    """Returns the row that each one is compared with, whether it is selected or not."""
    return {name: ",".join([*name.split(",")[:-1], baseline]) for name in names}


def describe_tables() -> str:
    """Lists the tables with their rows and the hardware that they need."""
    return "\n".join(
        f"{name:13} {len(table.rows):3} rows  {table.title}. Needs: {table.hardware}"
        for name, table in TABLES.items()
    )


def main(overrides: Sequence[tuple[str, str]]) -> None:
    """Runs the command; exits with status 1 if a run failed."""
    if _LIST.value:
        print(describe_tables())
        return
    if not _TABLE.value:
        raise InputError("--table is required, such as --table=2024.2; --list shows all")
    if not WORKDIR.value:
        raise InputError("--workdir is required: the output directory, such as /tmp/table")
    table, small = TABLES[_TABLE.value], _SCALE.value == "small"
    settings = make_settings(table, _ROWS.value, overrides, small)
    workdir = prepare_workdir(WORKDIR.value)
    selected = [name for name in settings if table.rows[name].from_teacher]
    if selected:
        path = train_teacher(table.teacher, overrides, small, workdir)
        for name in selected:
            settings[name].start_from = str(path)
    first_seed = next(iter(settings.values())).seed
    failed = run.run_grid(
        settings,
        range(first_seed, first_seed + _SEEDS.value),
        workdir,
        locations={name: table.rows[name].location for name in settings},
        baselines=find_baselines(settings, table.baseline),
        # The figures of small models and digits would be something else.
        published=None if small else table.rows,
        note=SMALL_NOTE if small else "",
        started_by=shlex.join(["python", "-m", "structinit_jax.reproduce", *sys.argv[1:]]),
    )
    if failed:
        sys.exit(f"{failed} runs failed: see the report; the same command trains them again")


if __name__ == "__main__":
    command_line.run(main, shared=["workdir"], with_config=False)
