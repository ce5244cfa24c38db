"""Checks that the packages of the trainer are installed. Every command imports it first.

The initialization and the models (`attention_init`, `interop`, `models`) do not need them.
"""

import importlib.util
import sys

# Modules that the extra "train" installs.
MODULES = (
    "absl",
    "array_record",
    "clu",
    "grain",
    "importlib_resources",
    "matplotlib",
    "ml_collections",
    "orbax",
    "PIL",
    "rich",
    "simplejpeg",
    "sklearn",
    "tensorboardX",
    "tensorflow_datasets",
)

_missing = [name for name in MODULES if importlib.util.find_spec(name) is None]
if _missing:
    _message = f"the trainer needs {', '.join(_missing)}: run pip install '.[train]' in a checkout"
    _command = getattr(sys.modules["__main__"].__spec__, "name", "").startswith("structinit_jax.")
    raise SystemExit(f"error: {_message}") if _command else ModuleNotFoundError(_message)
