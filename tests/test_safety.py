"""What the package reads is data: nothing in it is run, unpickled, unpacked or given to a shell."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "structinit_jax"
# Pickles run what they hold; archives name the paths that they are written to.
MODULES = {
    *("cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve", "torch"),
    *("tarfile", "zipfile"),
}
CALLS = {"eval", "exec", "popen", "spawn", "system", "unpack_archive"}


def find_dangers(code: str) -> list[str]:
    """Imports and calls that would run, unpickle or unpack what is read."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append(node.module or "")
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            found += [name] if name in CALLS else []
            found += [k.arg for k in node.keywords if k.arg in ("allow_pickle", "shell")]
    dangers = MODULES | CALLS | {"allow_pickle", "shell"}
    return [name for name in found if name.split(".")[0] in dangers]


def test_nothing_runs_or_unpacks_what_it_reads():
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 30
    dangers = {str(path): find_dangers(path.read_text()) for path in files}
    assert {path: found for path, found in dangers.items() if found} == {}


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from tarfile import open",
        "import numpy as np; np.load(path, allow_pickle=True)",
        "import os; os.system(config.workdir)",
        "run(command, shell=True)",
        "eval(config.model)",
    ],
)
def test_dangers_are_found(code):
    assert find_dangers(code)
