"""Loads user-defined objects that a config names as `module:attribute`."""

import importlib
import os
import sys
from typing import Any

from structinit_jax.errors import InputError


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


def load(reference: str, field: str) -> Any:
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
