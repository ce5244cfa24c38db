"""Files of an output directory, on disk or in object storage.

A workdir may come from somebody else, or lie in a folder like /tmp in which others can prepare it.
Nothing is written, replaced or deleted through a symbolic link in it, and what is read must be a
regular file: a pipe would block. The path of the workdir may itself be a link, such as one to a
scratch disk.
"""

import contextlib
import errno
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from etils import epath

from structinit_jax.errors import InputError, StoppedError

PARTIAL = ".partial-"  # prefix of temporary folders
# How errors say that there is no room. Those of Orbax have no number.
FULL = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)))
os.environ.setdefault("EPATH_USE_TF", "false")  # else etils uses TensorFlow for URLs, if installed


def is_url(workdir: epath.PathLike) -> bool:
    """Whether an output directory is in object storage."""
    return "://" in str(workdir)


def open_path(workdir: epath.PathLike) -> epath.Path:
    """Returns a workdir as an absolute path, or as one in object storage.

    Raises `InputError` if the storage is not supported, or cannot be reached.
    """
    if not is_url(workdir):
        return epath.Path(Path(workdir).expanduser().absolute())
    if set(str(workdir)) & set("[]*?"):
        raise InputError(f"workdir={workdir} must not contain [, ], * or ?, which are patterns")
    try:
        path = epath.Path(workdir)
        path.exists()
    except Exception as error:  # each storage has its own errors
        raise InputError(
            f"workdir={workdir} cannot be used ({type(error).__name__}: {error}): gs:// needs "
            "pip install '.[gcs]', s3:// '.[s3]', and both need access to the bucket"
        ) from error
    return path


# -- reading ---------------------------------------------------------------------------------------


def is_regular(path: epath.PathLike) -> bool:
    """Whether a path is that of a file, not of a pipe or device (etils takes these for files)."""
    return is_url(path) or os.path.isfile(path)


def read_file(path: epath.PathLike) -> bytes:
    """Returns the content of a file; `InputError` if it is missing or not a regular file."""
    path = epath.Path(path)
    try:
        if path.exists() and not is_regular(path):
            raise InputError(f"{path} is not a regular file")
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error


def parse_json(content: bytes, name: epath.PathLike) -> Any:
    """Parses the content of a JSON file of this name; `InputError` if it is anything else."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:  # a RecursionError, if it is nested too deeply
        raise InputError(f"{name} is not JSON: {error}") from error


def read_json(path: epath.PathLike) -> Any:
    """Reads a JSON file; `InputError` if it is missing or anything else."""
    return parse_json(read_file(path), path)


# -- writing ---------------------------------------------------------------------------------------


def make_folder(folder: epath.PathLike) -> None:
    """Creates a folder in a workdir, unless it is there; `InputError` if it is a link."""
    folder = epath.Path(folder)
    if os.path.islink(folder):
        raise _link_error(folder)
    folder.mkdir(parents=True, exist_ok=True)


def open_to_append(path: epath.PathLike) -> TextIO:
    """Opens a text file to read it and to append lines; `InputError` if it is a link or a pipe."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        number = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _link_error(path) from error
        raise
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise InputError(f"{path} is not a regular file: delete it")
    return open(number, "a+", buffering=1, encoding="utf-8", errors="backslashreplace")


@contextlib.contextmanager
def replace_files(folder: epath.PathLike) -> Iterator[Path]:
    """Yields a temporary folder, whose files replace those of a folder at the end of the context.

    After an error or a kill the old files are still there. A link is replaced, not followed.
    """
    with tempfile.TemporaryDirectory(prefix=PARTIAL, dir=folder) as temporary:
        yield Path(temporary)
        for path in Path(temporary).iterdir():
            path.replace(Path(folder) / path.name)


def write_atomically(path: epath.PathLike, content: str | bytes) -> None:
    """Replaces the content of a file. After a failure or a kill the old content is still there."""
    path = epath.Path(path)
    content = content.encode() if isinstance(content, str) else content
    if is_url(path):  # objects are written whole or not at all
        path.write_bytes(content)
        return
    with replace_files(path.parent) as folder:
        (folder / path.name).write_bytes(content)


@contextlib.contextmanager
def report_full_disk(workdir: epath.PathLike) -> Iterator[None]:
    """Raises `StoppedError` for errors of a full disk or quota, whichever library raises them."""
    try:
        yield
    except Exception as error:
        if not (reasons := [text for text in FULL if text in str(error)]):
            raise
        raise StoppedError(
            f"cannot write to {workdir}: {reasons[0]}. Its checkpoints are complete: make room and "
            "run the same command again to resume",
            exit_code=1,
        ) from error


def _link_error(path):
    return InputError(
        f"{path} is a symbolic link, through which nothing is written: delete it. To write to "
        "another disk, pass a folder there as workdir"
    )
