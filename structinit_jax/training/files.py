"""Small files of a run: written whole or not at all, with a clear error where there is no room."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from structinit_jax.errors import InputError


def write_whole(path: Path, text: str) -> None:
    """Replaces a file's content; a failure or a kill leaves the old content.

    Raises:
      OSError: if it cannot be written.
    """
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text)
    os.replace(partial, path)


@contextlib.contextmanager
def explain_failure(what: str, folder: Path) -> Iterator[None]:
    """Tells a full or read-only disk as what it is.

    Raises:
      InputError: in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{what} could not be written to {folder}: {error.strerror}. The run stops and its "
            "checkpoints are as before. Make room there, or make it writable, and give the same "
            "command again"
        ) from error
