"""Outputs of timm and the papers' programs: recorded, or computed where timm is installed.

    cd tests && python -m references vit swin    # writes references/vit.npz and references/swin.npz

The files were made with timm 1.0.31, torch 2.13.0 and Pillow 13.0.0, in float32 and with random
weights; nothing is downloaded. `make_NAME.py` has a function `make` that returns the arrays, or the
values of a JSON file, by name.
"""

import importlib
import importlib.util
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent


def make(name: str) -> dict[str, Any]:
    """Computes what `NAME.npz` or `NAME.json` records."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch and timm warn about themselves
        importlib.import_module("references.import_torchvision")
        return importlib.import_module(f"references.make_{name}").make()


def load(name: str) -> dict[str, np.ndarray]:
    """Returns the arrays of `NAME.npz`; computes them where timm is installed."""
    if importlib.util.find_spec("timm") is not None:
        return make(name)
    with np.load(HERE / f"{name}.npz") as file:
        return dict(file)


def save(name: str) -> None:
    """Writes `NAME.npz`, or `NAME.json` if the values are not arrays."""
    values = make(name)
    if all(isinstance(value, np.ndarray) for value in values.values()):
        np.savez_compressed(HERE / f"{name}.npz", **values)
    else:
        write_json(name, values)


def write_json(name: str, values: dict[str, Any]) -> None:
    """Writes `NAME.json`, one value per line."""
    lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in values.items())
    (HERE / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def part(arrays: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    """Returns the arrays whose names begin with `name/`, with that prefix removed."""
    return {k.removeprefix(name + "/"): v for k, v in arrays.items() if k.startswith(name + "/")}
