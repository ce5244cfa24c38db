import csv
import functools
import json
import re
import runpy
import tomllib
import typing
from operator import attrgetter

import jax
import pytest
from conftest import set_up
from fork_main import ROOT

from structinit_jax.attention_init import SCHEMES
from structinit_jax.compare.settings import expand
from structinit_jax.config import load_config, set_field, validate
from structinit_jax.data.datasets import CATALOG
from structinit_jax.data.source import split_size
from structinit_jax.training import build
from structinit_jax.training.sharding import make_mesh
from structinit_jax.training.state import make_initializer

CONFIGS = sorted((ROOT / "configs").glob("*.py"))
REFERENCE = tomllib.loads((ROOT / "tests" / "references" / "recipes.toml").read_text())

each_file = pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)


@functools.cache
def load_rows(path):
    """Configs of a file's first row and of the rows that differ from it in one word."""
    hints = typing.get_type_hints(runpy.run_path(str(path))["get_config"])
    columns = [typing.get_args(hint) for hint in hints.values()]
    first = [words[0] for words in columns]
    rows = [
        [*first[:i], word, *first[i + 1 :]] for i, words in enumerate(columns) for word in words
    ]
    rows = dict.fromkeys(map(",".join, rows or [[]]))
    return {row: load_config(f"{path}:{row}").lock() for row in rows}


@pytest.mark.parametrize("name", REFERENCE["recipes"])
def test_recipes_have_the_papers_numbers(name):
    recipe = REFERENCE["recipes"][name]
    assert recipe["source"]
    for file in recipe["configs"]:
        config = next(iter(load_rows(ROOT / "configs" / file).values()))
        assert {field: attrgetter(field)(config) for field in recipe["fields"]} == recipe["fields"]


def test_recipes_are_those_of_the_programs():
    fidelity = runpy.run_path(str(ROOT / "benchmarks" / "fidelity.py"))
    rows = fidelity["compare_recipes"](json.loads(fidelity["PROGRAMS"].read_text()))
    assert len(rows) > 10
    assert not [row for row in rows if "DIFFERS" in row]


def test_initial_weights_of_all_rows_were_compared_with_the_programs():
    papers = csv.DictReader((ROOT / "configs" / "papers.csv").read_text().splitlines())
    names = {f"{row['table']} {row['row']}" for row in papers}
    results = csv.DictReader((ROOT / "benchmarks/results/fidelity.csv").read_text().splitlines())
    compared = {name for result in results for name in result["rows"].split("; ")}
    left_out = names - compared  # not in the authors' programs
    assert all(re.match(r"2025.3 .*(mimetic|impulse)|2025.4 .*from_", name) for name in left_out)
    assert compared <= names


@each_file
def test_every_row_is_a_valid_config_of_its_data_set_and_model(path):
    for row, config in load_rows(path).items():
        validate(config)
        # The config with a folder reads CIFAR-10 from files.
        name = "cifar10" if config.data.name == "folder" else config.data.name
        assert config.model.num_classes == CATALOG[name].num_classes
        for field in ("train_split", "eval_split"):
            assert split_size(config.data[field], CATALOG[name]) > 0
        for word in row.split(","):
            if word in CATALOG:
                assert name == word
            if word in REFERENCE["models"]["sizes"]:
                model = config.model
                sizes = [model.width, model.depth, model.num_heads]
                assert sizes == REFERENCE["models"]["sizes"][word]
            assert word not in SCHEMES or word == config.attention_init.name


SCHEMES_2025 = ("impulse_2025", "mimetic", "default", "impulse")


@pytest.mark.parametrize("scheme", SCHEMES_2025)
def test_vit_b_imagenet_has_the_rows_of_table_2(scheme):
    row = load_config(f"{ROOT}/configs/vit_2025_imagenet.py:vit_base_patch16_224,{scheme}")
    assert load_config(f"{ROOT}/configs/vit_b_imagenet.py:{scheme}").to_dict() == row.to_dict()
    model = row.model
    assert (model.base_init, model.positions, model.pool) == ("pytorch", "learned", "class_token")
    # In a comparison, all schemes keep the learned positions, whichever row it starts from.
    for config in expand(row, SCHEMES_2025, {}).values():
        assert not config.attention_init.replace_positions
    default = load_config(ROOT / "configs" / "vit_b_imagenet.py").attention_init.to_dict()
    assert default == dict(name="impulse", replace_positions=False)


@each_file
def test_commands_and_flags_in_the_docstring_work(path):
    text = runpy.run_path(str(path))["__doc__"]
    rows = re.findall(rf"--config=configs/{path.name}:?(\S+)?", text)
    assert rows
    for row in rows:
        load_config(f"{path}:{row}")
    config = load_config(path)
    for field, value in re.findall(r"--config\.([\w.]+)='?([\w./%:\[\]]*[\w\]])", text):
        set_field(config, field, value)
        validate(config)


@pytest.mark.usefixtures("library_promotion")
@each_file
def test_every_scheme_fits_its_family(path):
    distinct = {
        f"{config.model.name} {config.attention_init}": config
        for config in load_rows(path).values()
    }
    for config in distinct.values():
        make_initializer(config, build.make_model(config, make_mesh()))


@pytest.mark.usefixtures("library_promotion")
@pytest.mark.parametrize("name", ["vit_2024_imagenet", "vit_2025_imagenet"])
def test_a_training_step_can_be_traced(name):
    config = load_config(ROOT / "configs" / f"{name}.py")
    config.data.drop_remainder = False  # fewer examples than a batch
    setup = set_up(config)
    before = setup.abstract_state
    after, metrics = jax.eval_shape(setup.train_step, *setup.arguments)
    assert metrics["loss"].shape == ()
    assert jax.tree.structure(after) == jax.tree.structure(before)
