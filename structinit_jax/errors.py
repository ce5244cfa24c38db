"""Exceptions, checks of single values, and loading of what a user names as `module:name`."""

import importlib
import math
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np


class InputError(ValueError):
    """A flag, config field, file or argument cannot be used.

    The message names it, its value, what is needed and the fix. Commands print no traceback.
    """


class StoppedError(RuntimeError):
    """A run ended early; the message says why and how to resume it."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


# -- checks ----------------------------------------------------------------------------------------


def is_count(value: Any, low: int = 1) -> bool:
    """Whether a value is a whole number, `low` or more."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return whole and bool(value >= low)


def is_positive(x: Any) -> bool:
    """Whether a value is a finite number above 0."""
    return 0 < x < math.inf


def is_positive_or_zero(x: Any) -> bool:
    """Whether a value is a finite number of 0 or more."""
    return 0 <= x < math.inf


def is_below_one(x: Any) -> bool:
    """Whether a value is in [0, 1)."""
    return 0 <= x < 1


def require(name: str, value: Any, text: str, holds: Callable[[Any], bool]) -> None:
    """Raises `InputError` unless a value meets a test; the message says that it must be `text`."""
    try:
        if holds(value):
            return
    except TypeError:
        pass
    raise InputError(f"{name}={value!r} must be {text}")


# -- references ------------------------------------------------------------------------------------


def is_reference(name: str) -> bool:
    """Whether a config value has the form `my_module:my_function`."""
    return ":" in name


def reference(thing: Any) -> str:
    """Returns the name under which a config finds your function or class.

    In a notebook or script `config.loss = reference(my_loss)` sets '__main__:my_loss'.

    Raises:
      InputError: It cannot be found by name, for example a lambda or a nested function.
    """
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", "")
    if getattr(sys.modules.get(module), name, None) is not thing:
        raise InputError(
            f"{thing!r} cannot be named in a config: define it with def or class at the top level "
            "of a module, script or notebook"
        )
    return f"{module}:{name}"


def load_reference(reference: str, field: str) -> Any:
    """Imports the object that a config field names, such as 'my_package.schemes:my_scheme'.

    The module is found as by `import`, in the working directory and on `PYTHONPATH` too.

    Args:
      reference: 'module:attribute'.
      field: Config field, for error messages.

    Raises:
      InputError: The module cannot be imported or has no such function or class.
    """
    module_name, _, attribute = reference.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(
            f"config.{field}={reference!r} cannot be imported: {error}. It needs the form "
            "'module:attribute', and the module must be in the working directory, "
            f"{os.getcwd()}, or on PYTHONPATH"
        ) from error
    if not callable(found):
        raise InputError(
            f"config.{field}={reference!r} is a {type(found).__name__}: name a function or class"
        )
    return found
