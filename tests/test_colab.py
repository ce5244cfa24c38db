import json
from pathlib import Path

import fork_main
import pytest

QUICKSTART = Path(__file__).parent.parent / "colab" / "quickstart.ipynb"
BEFORE = """
from structinit_jax.command_line import use_compilation_cache
use_compilation_cache()
NUM_EPOCHS = 0.3
"""
AFTER = """
neighbors = kernels["impulse"][:, 12:15, 12:15].reshape(3, 9)
assert neighbors.max(axis=1).min() > 0.3  # each head attends to one neighbor
assert kernels["default"].max() < 0.02  # without structure to none
assert kernels["mimetic"][:, 13, 13].min() > 0.01  # and here to the token itself
assert {"train/loss", "test/accuracy"} <= set().union(*curves["impulse"])
assert set(accuracies) == {"default", "impulse"}
"""


@pytest.mark.slow
def test_the_quickstart_runs_top_to_bottom_and_shows_both_curves(data_dir, tmp_path):
    cells = json.loads(QUICKSTART.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in code)
    tags = [cell["metadata"].get("tags", []) for cell in code]
    assert tags[:2] == [["install"], ["parameters"]]
    install, parameters, *rest = ("".join(cell["source"]) for cell in code)
    assert ">=0.1,<0.2" in install
    assert parameters.startswith("NUM_EPOCHS =")

    script = tmp_path / "quickstart.py"
    script.write_text("\n".join([BEFORE, *rest, AFTER]))
    result = fork_main.run(
        module=str(script),
        MPLBACKEND="Agg",
        TFDS_DATA_DIR=data_dir,
        XDG_CACHE_HOME=str(tmp_path),
    )
    assert result.returncode == 0, result.stderr
    assert "test accuracy" in result.stdout
