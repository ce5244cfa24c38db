"""The output directory of a run, which one run at a time may use."""

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import jax
from etils import epath
from jax.experimental import multihost_utils

from structinit_jax.errors import InputError
from structinit_jax.files import is_url, open_path, read_file
from structinit_jax.training import distributed

LOCK = ".lock"


@contextlib.contextmanager
def open_workdir(workdir: epath.PathLike) -> Iterator[epath.Path]:
    """Creates and locks the output directory of a run within the context.

    In object storage there is no lock: make sure that one run at a time uses a directory. Raises
    `InputError` if the directory cannot be used, or if another run uses it.
    """
    if is_url(workdir):
        yield open_path(workdir)
        return
    with contextlib.ExitStack() as locked:
        with distributed.shared_errors():
            path = prepare_workdir(workdir)
            if jax.process_index() == 0:
                locked.enter_context(lock_workdir(path))
        yield epath.Path(path)


def prepare_workdir(workdir: epath.PathLike) -> Path:
    """Creates the output directory and returns its absolute path.

    Raises `InputError` if it cannot be created or written to, or is a URL.
    """
    if is_url(workdir):
        raise InputError(f"workdir={workdir} is a URL, but this command needs a directory")
    path = Path(workdir).expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / LOCK).open("a").close()
    except OSError as error:
        raise InputError(f"workdir={workdir} cannot be written to: {error}") from error
    return path


@contextlib.contextmanager
def lock_workdir(workdir: Path) -> Iterator[None]:
    """Holds an exclusive lock on the directory within the context.

    The operating system releases the lock when the process ends, even after a SIGKILL. Between
    hosts the lock works only if the network file system supports it. Raises `InputError` if another
    run holds it.
    """
    # filelock does not record which process holds a lock.
    with (workdir / LOCK).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise InputError(
                f"workdir={workdir} is in use by another run ({file.read().strip()}): wait until it"
                f" ends, stop it, or choose another directory; if its host is lost, delete {LOCK}"
            ) from None
        except OSError:
            print(f"note: {workdir} cannot be locked: make sure that no other run uses it")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        os.fsync(file.fileno())  # for `identify` on other hosts
        yield


def identify(workdir: epath.Path) -> str | None:
    """Returns the lock's text, or the URL: the same in all processes that share the directory."""
    multihost_utils.sync_global_devices("workdir")  # process 0 has written it
    if is_url(workdir):
        return str(workdir)
    lock = workdir / LOCK
    return read_file(lock).decode(errors="replace") if lock.exists() else None
