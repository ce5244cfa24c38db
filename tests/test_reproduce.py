"""The papers' tables as grids."""

import collections
import csv
import inspect
import json

import fork_main
import pytest

from structinit_jax import attention_init, reproduce
from structinit_jax.compare import train_grid
from structinit_jax.errors import InputError

pytestmark = pytest.mark.usefixtures("library_promotion")
with open(reproduce.PAPERS) as file:
    TABLES = list(dict.fromkeys(row["table"] for row in csv.DictReader(file)))


@pytest.mark.parametrize("name", TABLES)
def test_every_row_has_a_config_and_a_baseline(name):
    rows = reproduce.read_table(name)
    assert set(reproduce.make_settings(rows, [], [])) == set(rows)
    assert {row["baseline"] for row in rows.values()} <= rows.keys()


def test_published_figures_that_disagree_have_a_note():
    same = collections.defaultdict(list)
    for name in TABLES:
        rows = reproduce.read_table(name)
        for row, config in reproduce.make_settings(rows, [], []).items():
            section = config.attention_init.to_dict()
            options = inspect.signature(attention_init.SCHEMES[section["name"]]).parameters
            defaults = {name: option.default for name, option in options.items()}
            fields = config.to_dict() | {"attention_init": defaults | section}
            same[json.dumps(fields, default=str, sort_keys=True)].append(rows[row])
    disagree = [rows for rows in same.values() if len({row["published"] for row in rows}) > 1]
    found = {row["published"] for rows in disagree for row in rows}
    assert {"85.30", "88.63", "90.75", "91.62", "90.22", "90.67"} <= found
    for rows in disagree:
        assert all(row["note"] for row in rows if row["published"]), rows


def test_the_options_of_a_scheme_may_stand_before_its_name():
    rows = reproduce.read_table("2024.2")
    fields = [("attention_init.target_mass", "0.3"), ("attention_init.name", "impulse")]
    for config in reproduce.make_settings(rows, ["cifar10"], fields).values():
        assert config.attention_init.target_mass == 0.3


def test_rows_are_selected_by_words_and_compared_within_their_data_set():
    rows = reproduce.read_table("2024.2")
    assert len(reproduce.make_settings(rows, ["cifar10"], [])) == 5  # not cifar100
    assert rows["cifar100,mimetic"]["baseline"] == "cifar100,truncated_normal"
    assert rows["cifar100,mimetic"]["published"] == "70.40"
    with pytest.raises(InputError, match="--rows=cifar11: no row has these words"):
        reproduce.make_settings(rows, ["cifar11"], [])
    with pytest.raises(InputError, match=r"--table=2024\.9 must be one of 2024\.1, "):
        reproduce.read_table("2024.9")


SMALL = {
    "data": dict(name="digits", eval_split="test", image_size=8, channels=1, mean=0.3, std=0.4),
    "model": dict(num_classes=10, patch_size=2, width=16, depth=1, num_heads=2, dtype="float32"),
    "augment": dict(crop="none", rand_augment="", erasing=0.0, mixup=0.0, cutmix=0.0),
}


def test_a_missing_file_of_weights_is_found_before_any_run():
    row = {"cifar10,from_default": reproduce.read_table("2025.4")["cifar10,from_default"]}
    fields = [(f"{part}.{k}", str(v)) for part in SMALL for k, v in SMALL[part].items()]
    (config,) = reproduce.make_settings(row, [], fields).values()
    with pytest.raises(InputError, match=r"^setting x: .*start_from='vit_small_default\.safeten"):
        train_grid.describe_setting("x", config)


def test_the_command_trains_a_row(tmp_path):
    fields = [f"--config.{part}.{k}={v}" for part in SMALL for k, v in SMALL[part].items()]
    arguments = [
        *("--table=2024.2", "--rows=cifar10,truncated_normal", f"--workdir={tmp_path / 'run'}"),
        *("--config.num_steps=2", "--config.batch_size=64", "--config.seed=3", *fields),
    ]
    result = fork_main.run(*arguments, module="structinit_jax.reproduce")
    assert result.returncode == 0, result.stderr
    report = (tmp_path / "run" / "report.md").read_text()
    assert "| cifar10,truncated_normal | 1 of 1 |" in report
    assert "| 88.63 |" in report
    assert "cifar10,truncated_normal: Table 1 has 85.30" in report
