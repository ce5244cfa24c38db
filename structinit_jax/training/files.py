"""A run's folder and its small files, with a clear error where they cannot be written."""

import contextlib
import os
import tempfile
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


def local_path(workdir: str | Path) -> Path:
    """The folder that --workdir names, as an absolute path.

    Raises:
      InputError: if it is the address of a store.
    """
    if "://" in str(workdir):
        raise InputError(
            f"--workdir={workdir} is the address of a store, and needs to be a folder: mount the "
            "store on every host (a bucket of Google Cloud with gcsfuse) and give its path"
        )
    return Path(workdir).absolute()


def prepare_workdir(workdir: str | Path) -> Path:
    """Makes the run's folder and checks that it can be written to.

    Raises:
      InputError: if it cannot.
    """
    path = local_path(workdir)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(bytes(2**16))  # a full disk takes empty files
    except OSError as error:
        raise InputError(
            f"--workdir={workdir} cannot be written to ({error.strerror}): give another folder"
        ) from error
    return path
