"""The papers' tables as grids, at full and at small scale."""

import json
import re
import signal

import fork_main
import pytest

from structinit_jax import reproduce
from structinit_jax.compare import run
from structinit_jax.compare.papers import TABLES
from structinit_jax.errors import InputError, StoppedError
from structinit_jax.training.workdir import listen_for_signals

pytestmark = pytest.mark.usefixtures("library_promotion")


@pytest.mark.parametrize("name", TABLES)
def test_every_row_has_a_config_and_a_baseline(name):
    table = TABLES[name]
    settings = reproduce.make_settings(table, [], [], small=False)
    assert settings.keys() == table.rows.keys()
    baselines = reproduce.find_baselines(settings, table.baseline)
    assert set(baselines.values()) <= table.rows.keys()
    assert all(baseline.split(",")[-1] == table.baseline for baseline in baselines.values())
    for setting, config in settings.items():
        docstring = open_docstring(table.rows[setting].location)
        figure = table.rows[setting].published
        assert figure is None or f"{figure:.2f}" in docstring
        for epoch, figure in table.rows[setting].published_training:
            assert f"{figure:.2f}" in docstring
            # Where ours is measured: an evaluation on training images ends this epoch.
            assert config.data.train_eval_split
            assert epoch % config.eval_every_epochs == 0
        assert config.is_locked


def open_docstring(location):
    with open(location.partition(":")[0]) as file:
        return file.read().split('"""')[1]


def test_figures_are_at_their_place():
    assert TABLES["2024.2"].rows["cifar100,mimetic"].published == 70.40
    assert TABLES["2024.3"].rows["vit_small_h16_patch2_32,impulse5"].published == 74.27
    assert TABLES["2024.4"].rows["convmixer_512_6,8,impulse"].published == 89.61
    assert TABLES["2024.5"].rows["vit_w512_h16_patch2_32,impulse5"].published == 91.87
    assert TABLES["2024.7"].rows["vit_w128_h8_patch2_32,mimetic"].published == 87.49
    name = "different,vit_tiny_h8_patch2_32,3,uniform,positions"
    assert TABLES["2024.6"].rows[name].published == 91.20


@pytest.mark.parametrize("name", TABLES)
def test_small_rows_can_be_trained(name, data_dir):
    """The first and the last row of each table, traced."""
    fields = [("data.data_dir", data_dir)]
    settings = reproduce.make_settings(TABLES[name], [], fields, small=True)
    for setting in (next(iter(settings)), list(settings)[-1]):
        facts = run._check(setting, settings[setting], None, {})
        assert facts["num_steps"] <= 500
        assert facts["num_parameters"] < 2e6


def test_rows_are_picked_by_words():
    rows = reproduce.make_settings(TABLES["2024.2"], ["cifar10"], [], small=False)
    assert len(rows) == 5  # not those of cifar100
    with pytest.raises(InputError, match="--rows=cifar11: no row has these words"):
        reproduce.make_settings(TABLES["2024.2"], ["cifar11"], [], small=False)


def test_rows_are_compared_with_the_baseline_of_their_own_data_set():
    names = ["cifar10,mimetic", "cifar100,mimetic"]  # their baselines are not selected
    assert reproduce.find_baselines(names, "truncated_normal") == {
        "cifar10,mimetic": "cifar10,truncated_normal",
        "cifar100,mimetic": "cifar100,truncated_normal",
    }


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

    # In another place, with a run that has not recorded its end and one that has not been started.
    row = (tmp_path / "run").rename(tmp_path / "moved") / "cifar10,selected"
    (row / "seed_3" / "status.json").unlink()
    again = [*arguments[:-1], "--seeds=2", f"--workdir={tmp_path / 'moved' / '..' / 'moved'}"]
    result = fork_main.run(*again, module="structinit_jax.reproduce")
    assert result.returncode == 0, result.stderr
    assert "resumed from step 2" in (row / "seed_3" / "log.txt").read_text()
    assert "| cifar10,selected | 2 of 2 |" in (tmp_path / "moved" / "report.md").read_text()


def test_a_signal_during_the_last_step_of_the_teacher_stops_the_command(tmp_path, monkeypatch):
    def interrupted(config, workdir, stop_request):
        with listen_for_signals(stop_request):
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(reproduce, "train", interrupted)
    with pytest.raises(StoppedError, match="run the same command again"):
        reproduce.train_teacher("configs/vit_t_digits.py", [], small=False, workdir=tmp_path)


def test_tables_are_listed(tmp_path):
    (tmp_path / "command.py").write_text(
        "import runpy\n"
        "from structinit_jax.compare.papers import TABLES\n"
        "for name in TABLES.keys() - {'2024.2', '2025.4'}: del TABLES[name]  # to be fast\n"
        "runpy.run_module('structinit_jax.reproduce', run_name='__main__', alter_sys=True)\n"
    )
    result = fork_main.run("--list", module=str(tmp_path / "command.py"))
    assert result.returncode == 0, result.stderr
    first, second = result.stdout.splitlines()
    assert re.match(r"2024\.2 +20 rows  Initializations of ViT-T", first)
    assert second.endswith("Needs: 8 or more data-center GPUs or TPUs for the teacher")


def test_a_table_is_required():
    result = fork_main.run("--workdir=/tmp/x", module="structinit_jax.reproduce")
    assert "--table is required, such as --table=2024.2; --list shows all" in result.stderr
