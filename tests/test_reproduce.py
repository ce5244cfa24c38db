"""The papers' tables as grids, at full and at small scale."""

import csv

import fork_main
import pytest

from structinit_jax import reproduce
from structinit_jax.errors import InputError
from structinit_jax.run import Run

pytestmark = pytest.mark.usefixtures("library_promotion")
with open(reproduce.PAPERS) as file:
    TABLES = list(dict.fromkeys(row["table"] for row in csv.DictReader(file)))


@pytest.mark.parametrize("name", TABLES)
def test_every_row_has_a_config_and_a_baseline_and_can_be_trained_small(name, data_dir):
    rows = reproduce.read_table(name)
    assert set(reproduce.make_settings(rows, [], [], small=False)) == set(rows)
    names = rows.keys() - {reproduce.TEACHER}
    assert {rows[row]["baseline"] for row in names} <= names
    small = reproduce.make_settings(rows, [], [("data.data_dir", data_dir)], small=True)
    name = next(iter(small))
    assert Run(small[name]).setup.schedule.num_steps <= 500  # traced


def test_rows_are_selected_by_words_and_compared_within_their_data_set():
    rows = reproduce.read_table("2024.2")
    assert len(reproduce.make_settings(rows, ["cifar10"], [], small=False)) == 5  # not cifar100
    assert rows["cifar100,mimetic"]["baseline"] == "cifar100,truncated_normal"
    assert rows["cifar100,mimetic"]["published"] == "70.40"
    with pytest.raises(InputError, match="--rows=cifar11: no row has these words"):
        reproduce.make_settings(rows, ["cifar11"], [], small=False)
    with pytest.raises(InputError, match=r"--table=2024\.9 must be one of 2024\.1, "):
        reproduce.read_table("2024.9")


def test_the_command_trains_a_teacher_and_selects_its_weights(tmp_path, data_dir):
    arguments = [
        *("--table=2025.4", "--scale=small", "--rows=cifar10,selected"),
        *("--config.num_steps=2", "--config.seed=3", f"--config.data.data_dir={data_dir}"),
        *("--config.model.depth=1", f"--workdir={tmp_path / 'run'}"),
    ]
    result = fork_main.run(*arguments, module="structinit_jax.reproduce")
    assert result.returncode == 0, result.stderr
    log = (tmp_path / "run" / "cifar10,selected" / "seed_3" / "log.txt").read_text()
    assert f"weights selected from {tmp_path / 'run' / 'teacher.safetensors'}" in log
    report = (tmp_path / "run" / "report.md").read_text()
    assert "reproduce --table=2025.4 --scale=small" in report
    assert reproduce.SMALL_NOTE in report
