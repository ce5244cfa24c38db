"""What timm computes: recorded, or by the timm that is installed where there is one."""

import importlib
import importlib.util
import warnings
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent


def load(name: str) -> dict[str, np.ndarray]:
    """The arrays that `make_<name>.py` records in `<name>.npz`; live where timm is installed."""
    if importlib.util.find_spec("timm") is None:
        with np.load(HERE / f"{name}.npz") as file:
            return dict(file)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch and timm, about themselves
        return importlib.import_module(f"references.make_{name}").make()
