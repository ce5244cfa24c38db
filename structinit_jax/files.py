"""Files of an output directory, on disk or in object storage."""

import contextlib
import csv
import errno
import io
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from etils import epath

from structinit_jax.errors import FullDiskError, InputError

PARTIAL = ".partial-"  # prefix of temporary folders
# Messages of errors for a full disk or quota. Orbax's errors have no errno.
DISK_FULL = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)))
os.environ.setdefault("EPATH_USE_TF", "false")  # else etils uses TensorFlow for URLs, if installed


def is_url(workdir: epath.PathLike) -> bool:
    """Whether an output directory is in object storage."""
    return "://" in str(workdir)


def open_path(workdir: epath.PathLike) -> epath.Path:
    """Returns a workdir as an absolute path, or as a path in object storage.

    Raises `InputError` if the storage is not supported, or cannot be reached.
    """
    if not is_url(workdir):
        return epath.Path(Path(workdir).expanduser().absolute())
    try:
        path = epath.Path(workdir)
        path.exists()
    except Exception as error:  # each storage has its own errors
        raise InputError(
            f"workdir={workdir} cannot be used ({type(error).__name__}: {error}): gs:// needs "
            "pip install '.[gcs]', s3:// needs pip install '.[s3]'"
        ) from error
    return path


# -- reading ---------------------------------------------------------------------------------------


def read_file(path: epath.PathLike) -> bytes:
    """Returns the content of a file; raises `InputError` if it is missing or cannot be read."""
    try:
        return epath.Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error


def read_json(path: epath.PathLike) -> Any:
    """Reads a JSON file; raises `InputError` if it is missing or not JSON."""
    content = read_file(path)
    try:
        return json.loads(content)
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}") from error


# -- writing ---------------------------------------------------------------------------------------


def write_atomically(path: epath.PathLike, content: str | bytes) -> None:
    """Replaces a file's content. If this fails or the process is killed, the old content stays."""
    path = epath.Path(path)
    content = content.encode() if isinstance(content, str) else content
    if is_url(path):  # objects are written whole or not at all
        path.write_bytes(content)
        return
    with tempfile.TemporaryDirectory(prefix=PARTIAL, dir=path.parent) as folder:
        new = Path(folder) / path.name
        new.write_bytes(content)
        new.replace(path)


@contextlib.contextmanager
def report_full_disk(workdir: epath.PathLike) -> Iterator[None]:
    """Turns any library's error about a full disk or quota into a `FullDiskError`."""
    try:
        yield
    except Exception as error:
        if not (reasons := [text for text in DISK_FULL if text in str(error)]):
            raise
        raise FullDiskError(
            f"cannot write to {workdir}: {reasons[0]}. Checkpoints are intact: free some space "
            "and run the same command again to resume"
        ) from error


def csv_text(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Formats a table as CSV."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([header, *rows])
    return file.getvalue()
