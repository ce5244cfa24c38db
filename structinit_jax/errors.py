"""Errors that end a command with a one-sentence message, and the value checks that raise them.

Values are checked once, where they enter the package. The annotation of a dataclass field or of a
function parameter says what the value must be:

    width: PositiveInt = 192
    drop_path: Fraction = 0.0
    pool: Literal["mean", "class_token"] = "mean"
    layer_scale: NonNegativeFloat | None = None

`check_fields` checks values against these annotations, `checked` does so for the arguments of a
call, and `require` checks conditions that depend on several fields.
"""

import contextlib
import difflib
import functools
import importlib
import inspect
import math
import os
import re
import sys
import types
import typing
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

import numpy as np

_SKIPPED_MODULES = ("structinit_jax.", "flax.", "jaxtyping.")

# -- errors ----------------------------------------------------------------------------------------


def printable(text: str, keep: str = "") -> str:
    """Escapes control characters, except those in `keep`, and characters that UTF-8 cannot encode.

    File names can contain both. Terminals execute the former; UTF-8 files cannot hold the latter.
    """
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in str(text))


class InputError(ValueError):
    """A flag, config field, file or argument cannot be used.

    The message names it, its value, what is needed and the fix. Commands print it without a
    traceback and exit with `exit_code`, for launchers that restart a run.
    """

    exit_code = 2  # a restart would end in the same way


class InUseError(InputError):
    """Another process is using a file or folder. A later start may succeed."""

    exit_code = 1


@contextlib.contextmanager
def prefixed(place: str) -> Iterator[None]:
    """Prefixes the message of an `InputError` raised inside the context with a place.

    A library function names its own argument; the caller that passes a config field adds its path:

        with prefixed("config."):
            mesh = make_mesh(config.fsdp)  # 'config.fsdp=3 must be a divisor of 8, …'
    """
    try:
        yield
    except InputError as error:
        error.args = (f"{place}{error}",)
        raise


class StoppedError(RuntimeError):
    """A run ended early. The message says why and how to resume; commands exit with `exit_code`."""

    exit_code: int


class FullDiskError(StoppedError):
    """The disk is full. Other processes, whose disks are not, wait for this one."""

    exit_code = 1


class PreemptedError(StoppedError):
    """A signal stopped the run."""

    exit_code = 75  # EX_TEMPFAIL in sysexits.h, "try again later"


class NotFiniteError(StoppedError):
    """The state is not finite. A launcher must not restart the run: it would end the same way."""

    exit_code = 2


def warn(message: str) -> None:
    """Warns at the user's line: the first caller outside this package, Flax and jaxtyping.

    Flax constructs our modules, and jaxtyping checks our functions if a user asks it to.
    """
    frame = sys._getframe(1)
    level = 2
    while frame and frame.f_globals.get("__name__", "").startswith(_SKIPPED_MODULES):
        frame = frame.f_back
        level += 1
    warnings.warn(message, stacklevel=level)


def suggest(word: str, known: Iterable[str]) -> str:
    """Returns "did you mean 'x'?" with the known names closest to a word, or lists all known names.

    If there are many names, it returns the closest ones even if none is close.
    """
    names = list(map(str, known))
    cutoff = 0.6 if len(names) <= 40 else 0.0
    if near := difflib.get_close_matches(str(word), names, n=3, cutoff=cutoff):
        return f"did you mean {' or '.join(map(repr, near))}?"
    return f"choose from {', '.join(names)}" if names else "there are none"


# -- checks ----------------------------------------------------------------------------------------

Function = TypeVar("Function", bound=Callable[..., Any])


class Check(NamedTuple):
    """A requirement on a value, for use in `Annotated`: 'NAME=VALUE must be NEEDS'."""

    needs: str
    holds: Callable[[Any], bool]

    def accepts(self, value: Any) -> bool:
        """Whether a value passes; one that cannot be compared or converted does not."""
        try:
            return bool(self.holds(value))
        except Exception:  # 10**400 in `math`, "(0.5,)" as a type in NumPy, …
            return False

    def require(self, name: str, value: Any) -> None:
        """Raises `InputError` unless a value passes."""
        require(name, value, self.needs, self.accepts(value))


def is_integer(value: Any) -> bool:
    """Whether a value is an integer."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_count(value: Any, low: int = 1) -> bool:
    """Whether a value is an integer in [low, 2**32)."""
    return is_integer(value) and bool(low <= value < 2**32)


# Integers must fit uint32: random seeds require it, and larger values elsewhere are mistakes.
Number = int | float
PositiveInt = Annotated[int, Check("an integer from 1 to 2**32 - 1", is_count)]
NonNegativeInt = Annotated[int, Check("an integer from 0 to 2**32 - 1", lambda x: is_count(x, 0))]
AtLeastTwo = Annotated[int, Check("an integer, 2 or more", lambda x: is_count(x, 2))]
PositiveFloat = Annotated[Number, Check("a number above 0 and at most 1e7", lambda x: 0 < x <= 1e7)]
NonNegativeFloat = Annotated[Number, Check("a number from 0 to 1e7", lambda x: 0 <= x <= 1e7)]
Fraction = Annotated[Number, Check("a number in [0, 1)", lambda x: 0 <= x < 1)]
Probability = Annotated[Number, Check("a number in [0, 1]", lambda x: 0 <= x <= 1)]

_CHECKS = {
    bool: Check("True or False", lambda x: isinstance(x, bool)),
    int: Check("an integer", is_integer),
    float: Check("a finite number", math.isfinite),
    str: Check("a string", lambda x: isinstance(x, str)),
    types.NoneType: Check("None", lambda x: x is None),
}


def require(name: str, value: Any, needs: str, holds: Any) -> None:
    """Raises `InputError`, 'NAME=VALUE must be NEEDS', unless the condition `holds` is true."""
    if not holds:
        shape = getattr(value, "shape", ())  # NumPy's scalars have the shape ().
        text = f"array of shape {shape}" if shape and isinstance(shape, tuple) else repr(value)
        text = text if len(text) <= 200 else f"{text[:200]}…"
        raise InputError(f"{name}={text} must be {needs}")


def require_function(name: str, value: Any, arguments: Sequence[str], fix: str = "") -> None:
    """Raises `InputError` unless a value is a function that can be called with the arguments."""
    try:
        inspect.signature(value).bind(*arguments)
    except (TypeError, ValueError) as error:
        shown = getattr(value, "__name__", repr(value))
        raise InputError(
            f"{name}={shown} must be a function of ({', '.join(arguments)}){fix}"
        ) from error


def check_fields(owner: Callable[..., Any], values: Mapping[str, Any], prefix: str = "") -> None:
    """Raises `InputError` unless every value satisfies the annotation of its field.

    The annotations are those of `owner`, a dataclass or a function. Types other than numbers,
    strings, `Literal`, and tuples and unions of these are checked only if they have a `Check`.
    Messages show `prefix` before the name of the field.
    """
    hints = typing.get_type_hints(owner, include_extras=True)
    for name, value in values.items():
        if name not in hints:
            raise InputError(f"{prefix}{name} does not exist: {suggest(name, hints)}")
        _check_of(hints[name]).require(f"{prefix}{name}", value)


def checked(function: Function) -> Function:
    """Decorates a function so that `check_fields` checks its keyword arguments before each call."""

    @functools.wraps(function)
    def check_and_call(*args, **kwargs):
        check_fields(function, kwargs)
        return function(*args, **kwargs)

    return check_and_call


def _check_of(hint: Any) -> Check:
    """Returns the check that an annotation asks for."""
    arguments = typing.get_args(hint)
    match typing.get_origin(hint):
        case typing.Annotated:
            checks = [x for x in hint.__metadata__ if isinstance(x, Check)]
            return checks[0] if checks else _check_of(arguments[0])
        case typing.Literal:
            return Check(f"one of {', '.join(map(repr, arguments))}", arguments.__contains__)
        case typing.Union | types.UnionType:
            checks = [_check_of(argument) for argument in arguments]
            return Check(
                " or ".join(dict.fromkeys(check.needs for check in checks)),
                lambda x: any(check.accepts(x) for check in checks),
            )
        case origin if origin in (tuple, Sequence):
            each = _check_of(arguments[0])
            return Check(
                f"a tuple, each element {each.needs}",
                lambda x: isinstance(x, tuple | list) and all(map(each.holds, x)),
            )
    return _CHECKS.get(hint, Check("", lambda _: True))


def is_reference(name: str) -> bool:
    """Whether a config value has the form `my_module:my_function`."""
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name) is not None


def find(name: str, known: Mapping[str, Any], field: str) -> Any:
    """Returns the object that a name in `field` refers to: a known one, or 'module:object'."""
    require(field, name, "a string", isinstance(name, str))
    if name in known:
        return known[name]
    if not is_reference(name):
        raise InputError(f"{field}={name!r} is unknown: {suggest(name, known)}")
    module_name, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise InputError(
            f"{field}={name!r} cannot be imported ({error}): the module must be in the "
            f"working directory, {os.getcwd()}, or on PYTHONPATH"
        ) from error
    require(field, name, "the name of a function or class", callable(found))
    return found
