"""The initialization and the models without the trainer's packages."""

import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from structinit_jax import trainer_extra

ROOT = Path(__file__).parent.parent
# Imported by optax and Flax themselves.
SHARED = {"absl", "rich"}
# As if the modules were not installed, in a new interpreter.
BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: (
    None if name.split(".")[0] in {blocked!r} else find_spec(name, package)
)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("core")
    blocked = set(trainer_extra.MODULES) - SHARED
    (folder / "sitecustomize.py").write_text(BLOCKER.format(blocked=blocked))

    def run(*arguments):
        environment = os.environ | {"PYTHONPATH": f"{folder}:{ROOT}", "JAX_PLATFORMS": "cpu"}
        return subprocess.run(
            [sys.executable, *arguments], env=environment, capture_output=True, text=True
        )

    return run


def test_the_initialization_and_the_models_do_without(run):
    modules = ("attention_init", "interop", "models.registry", "interop.select_weights")
    result = run("-c", "".join(f"import structinit_jax.{name};" for name in modules))
    assert result.returncode == 0, result.stderr


def test_a_command_says_what_to_install(run):
    result = run("-m", "structinit_jax.main", "--help")
    assert result.returncode == 1
    assert re.fullmatch(
        r"error: the trainer needs array_record, clu, .*: run pip install '\.\[train\]' .*\n",
        result.stderr,
    )
    result = run("-c", "import structinit_jax.export")
    assert "ModuleNotFoundError: the trainer needs" in result.stderr


def test_the_modules_are_those_of_the_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {
        re.match(r"[\w\-]+", requirement)[0].lower().replace("_", "-")
        for requirement in project["optional-dependencies"]["train"]
    }
    modules = metadata.packages_distributions()
    distributions = {modules[name][0] for name in trainer_extra.MODULES if name != "orbax"}
    expected = {name.lower().replace("_", "-") for name in distributions}
    # cykooz-resizer can be replaced by Pillow; orbax is a namespace of several distributions.
    assert named - {"cykooz-resizer", "orbax-checkpoint"} == expected


def test_the_extras_named_in_documents_and_scripts_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    paths = [*ROOT.glob("*.md"), *ROOT.glob("*/*.ipynb"), *ROOT.glob("launch/**/*.*")]
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in paths}
    named = {
        (name, extra)
        for name, text in texts.items()
        for group in re.findall(r"(?:structinit-jax|\{wheel\}|'\.)\[([\w,]+)\]", text)
        for extra in group.split(",")
    }
    found = {"README.md", "launch/README.md", "colab/quickstart.ipynb", "launch/gke/gke.sh"}
    assert found | {"launch/tpu_install.sh"} <= dict(named).keys()
    assert {extra for _, extra in named} <= project["optional-dependencies"].keys(), named
