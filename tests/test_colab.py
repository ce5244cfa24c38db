import json
from pathlib import Path

import matplotlib
import pytest

QUICKSTART = Path(__file__).parent.parent / "colab" / "quickstart.ipynb"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive")
def test_the_quickstart_runs_top_to_bottom_and_shows_both_curves(
    data_dir, monkeypatch, capsys, library_promotion
):
    matplotlib.use("Agg")
    monkeypatch.setenv("TFDS_DATA_DIR", data_dir)
    cells = json.loads(QUICKSTART.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in code)
    tags = [cell["metadata"].get("tags", []) for cell in code]
    assert tags[:2] == [["install"], ["parameters"]]
    assert ">=0.1,<0.2" in "".join(code[0]["source"])

    names = {"NUM_EPOCHS": 1.0}
    for cell in code[2:]:
        exec("".join(cell["source"]), names)  # as a kernel does, in one namespace

    kernels, curves = names["kernels"], names["curves"]
    centre = (13, 13)
    neighbours = kernels["impulse"][:, 12:15, 12:15].reshape(3, 9)
    assert neighbours.max(axis=1).min() > 0.3  # each head looks at one neighbour
    assert kernels["default"].max() < 0.02  # and without structure at none
    assert kernels["mimetic"][:, *centre].min() > 0.01
    assert {"train/loss", "test/accuracy"} <= set().union(*curves["impulse"])
    assert set(names["accuracies"]) == {"default", "impulse"}
    assert "of the test digits right" in capsys.readouterr().out
