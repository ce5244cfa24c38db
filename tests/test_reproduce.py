"""The papers' tables as grids, at full and at small scale."""

import csv
import json

import fork_main
import pytest

from structinit_jax import reproduce
from structinit_jax.compare import run
from structinit_jax.errors import InputError

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
    for setting in (next(iter(small)), list(names)[-1]):  # traced
        if small[setting].start_from != reproduce.TEACHER:
            assert run._check(setting, small[setting])[0]["num_steps"] <= 500


def test_figures_are_at_their_place():
    for table, row, figure in [
        ("2024.2", "cifar100,mimetic", "70.40"),
        ("2024.3", "vit_small_h16_patch2_32,impulse5", "74.27"),
        ("2024.4", "convmixer_512_6,8,impulse", "89.61"),
        ("2024.5", "vit_w512_h16_patch2_32,impulse5", "91.87"),
        ("2024.6", "different,vit_tiny_h8_patch2_32,3,uniform,positions", "91.20"),
        ("2024.7", "vit_w128_h8_patch2_32,mimetic", "87.49"),
        ("2025.2", "vit_base_patch16_224,impulse", "81.83"),
    ]:
        assert reproduce.read_table(table)[row]["published"] == figure
    assert reproduce.read_table("2025.figure3")["cifar10,default"]["published"].startswith("train ")


def test_rows_are_selected_by_words_and_compared_within_their_data_set():
    rows = reproduce.read_table("2024.2")
    assert len(reproduce.make_settings(rows, ["cifar10"], [], small=False)) == 5  # not cifar100
    assert rows["cifar100,mimetic"]["baseline"] == "cifar100,truncated_normal"
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
    config = json.loads((tmp_path / "run" / "teacher" / "config.json").read_text())
    assert config["attention_init"]["name"] == "impulse_2025"
    report = (tmp_path / "run" / "report.md").read_text()
    assert "reproduce --table=2025.4 --scale=small" in report
    assert reproduce.SMALL_NOTE in report
