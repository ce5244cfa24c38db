"""The notebooks: run from top to bottom with small sizes, and checked as stored.

Cells tagged "torch" run only where torch, timm and transformers can be imported; elsewhere, only
the cells on Flax models run. The stored outputs are from an environment with all three.
"""

import base64
import importlib.util
import io
import json
import re

import fork_main
import pytest
from PIL import Image

SMALL = {  # replaces the parameter cell
    "quickstart": dict(EPOCHS=0.4, WORKDIR=""),
    "compare": dict(EPOCHS=0.4, SEEDS=1, SCHEMES=["impulse"], WORKDIR=""),
    # A third, so that the ViT's training is the one of the other notebooks.
    "why_it_works": dict(
        EPOCHS=0.4 / 3, SEEDS=1, CONVMIXERS=["fixed impulse"], VITS=["default"], WORKDIR=""
    ),
    "your_own_model": dict(DEPTH=2),
}
VIT = {"64, depth=4, num_heads=4, patch_size=1": "32, depth=2, num_heads=2, patch_size=2"}
SMALLER = {  # replacements in the other cells
    "quickstart": {
        "(14, 14), 192, 3, 64": "(6, 6), 48, 3, 16",
        '("default", "mimetic", "impulse")': '("default", "impulse")',
        **VIT,
    },
    "compare": VIT,
    "why_it_works": {"num_layers=20": "num_layers=4", "reshape(20,": "reshape(4,", **VIT},
}
AFTER = {
    "quickstart": """
structure = [s.layers[0].measures["neighbor_mass"].min() for s in snapshots]
assert structure[1] > 1.4 * structure[0]  # each head of impulse attends to one neighbor
""",
    "compare": """
assert not failed and "| impulse | 1 of 1 |" in (workdir / "report.md").read_text()
""",
    "why_it_works": """
spans = {line.get_label(): line.get_ydata() for line in axes[0].lines}
assert spans["random"][8] == 9 > spans["impulse"][8]  # nine random filters, more impulses
assert (spans["impulse"][-1] > 8.5, spans["box"][-1], failed) == (True, 1, 0)
assert len(ranks) == 4 and np.all((ranks >= 1) & (ranks < 32))
""",
    "your_own_model": """
mass = [measures.measure_mean_maps(m, GRID) for m in (before, after, nnx_maps(new))]
values = [m["neighbor_mass"].mean() for m in mass]
assert values[0] < 0.01 < 0.05 < values[1] < values[2]
""",
}
# Stands in for IPython, which may be missing; images that the cells display must exist.
DISPLAY = """
import sys, types
from pathlib import Path
stub = types.ModuleType("IPython.display")
stub.display = print
stub.Image = lambda filename, width: Path(filename).read_bytes()[:4]
stub.Markdown = str
parent = types.ModuleType("IPython")
parent.version_info, parent.get_ipython = (9, 0), lambda: None  # for matplotlib
sys.modules |= {"IPython": parent, "IPython.display": stub}
"""
WHOLE_ENVIRONMENT = all(importlib.util.find_spec(n) for n in ("torch", "timm", "transformers"))


def code_cells(name):
    notebook = json.loads((fork_main.ROOT / "colab" / f"{name}.ipynb").read_text())
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def source(cell):
    return "".join(cell["source"])


@pytest.mark.parametrize("name", SMALL)
def test_the_notebook_runs_top_to_bottom(name, tmp_path):
    _, parameters, *rest = code_cells(name)
    assert re.findall(r"^\w+", source(parameters), re.M) == list(SMALL[name])
    small = [f"{variable} = {value!r}" for variable, value in SMALL[name].items()]
    if not WHOLE_ENVIRONMENT:
        rest = [cell for cell in rest if "torch" not in cell["metadata"].get("tags", [])]
    cells = "\n".join(map(source, rest))
    for old, new in SMALLER.get(name, {}).items():
        assert old in cells
        cells = cells.replace(old, new)
    script = tmp_path / f"{name}.py"
    # The cells write their figures to the current directory.
    start = f"import os; os.chdir({str(tmp_path)!r})"
    script.write_text("\n".join([DISPLAY, start, *small, cells, AFTER[name]]))
    result = fork_main.run(module=str(script), timeout=600)
    assert "Warning" not in result.stderr


@pytest.mark.parametrize("name", SMALL)
def test_the_notebook_is_stored_with_its_outputs(name):
    assert (fork_main.ROOT / "colab" / f"{name}.ipynb").stat().st_size < 600_000
    cells = code_cells(name)
    assert source(cells[0]) == source(code_cells("quickstart")[0])  # all have the same install cell
    outputs = [output for cell in cells[2:] for output in cell["outputs"]]
    assert all(cell["execution_count"] for cell in cells[2:])
    assert not [o for o in outputs if o["output_type"] == "error" or o.get("name") == "stderr"]
    images = [o["data"] for o in outputs if "image/png" in o.get("data", {})]
    assert images
    for data in images:
        assert Image.open(io.BytesIO(base64.b64decode("".join(data["image/png"])))).width >= 700
    text = json.dumps(outputs)
    assert not re.search(r"/(root|home|work|usr|opt)/|site-packages", text)
