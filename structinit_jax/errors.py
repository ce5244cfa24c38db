"""Errors that end a command with one sentence, and the texts that they are made of."""

import contextlib
import difflib
from collections.abc import Iterable, Iterator


def printable(text: str, keep: str = "") -> str:
    """Escapes control characters, all but those in `keep`, and what is no text in UTF-8.

    Names of files may have both. A terminal obeys the first; figures and files cannot hold the
    second.
    """
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in str(text))


class InputError(ValueError):
    """A flag, config field, file or argument cannot be used.

    The message names it, its value, what is needed and the fix. Commands print no traceback.
    """


@contextlib.contextmanager
def prefixed(place: str) -> Iterator[None]:
    """Puts a place before the messages of `InputError`s that are raised inside.

    A library function names its own argument; whoever passes a field of the config adds the path:

        with prefixed("config."):
            mesh = make_mesh(config.fsdp)  # 'config.fsdp=3 must be a divisor of 8, …'
    """
    try:
        yield
    except InputError as error:
        raise InputError(f"{place}{error}") from error


class StoppedError(RuntimeError):
    """A run ended early; the message says why and how to resume it.

    Commands exit with `exit_code`.
    """

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


def suggest(word: str, known: Iterable[str]) -> str:
    """Returns "did you mean 'x'?" for the known names near a word, or the names to choose from.

    Of many names, it returns the nearest ones even if none is near.
    """
    names = list(map(str, known))
    cutoff = 0.6 if len(names) <= 40 else 0.0
    if near := difflib.get_close_matches(str(word), names, n=3, cutoff=cutoff):
        return f"did you mean {' or '.join(map(repr, near))}?"
    return f"choose from {', '.join(names)}" if names else "there are none"
