"""Checks of single values: arguments, options and config fields."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from structinit_jax.errors import InputError


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
