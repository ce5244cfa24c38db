"""The output directory of a run: its lock, its small files, and the signals that end the run."""

import contextlib
import errno
import fcntl
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
from etils import epath
from jax.experimental import multihost_utils

from structinit_jax.errors import InputError

LOCK = ".lock"
LOCKS_UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


def is_url(workdir: epath.PathLike) -> bool:
    """Whether an output directory is in object storage."""
    return "://" in str(workdir)


def local_path(workdir: epath.PathLike) -> Path:
    """Returns --workdir as an absolute path; raises `InputError` if it is a URL."""
    if is_url(workdir):
        raise InputError(
            f"--workdir={workdir} is a URL, but this command needs a directory: mount the bucket, "
            "with gcsfuse for Google Cloud Storage, and pass the mount point"
        )
    return Path(workdir).expanduser().absolute()


def open_path(workdir: epath.PathLike) -> epath.Path:
    """Returns --workdir as an absolute path, or as one in object storage.

    Raises:
      InputError: The storage is not supported, or its package is not installed.
    """
    if not is_url(workdir):
        return epath.Path(local_path(workdir))
    if set(str(workdir)) & set("[]*?"):
        raise InputError(f"--workdir={workdir} must not contain [, ], * or ?, which are patterns")
    try:
        path = epath.Path(workdir)
        path.exists()
    except (ImportError, RuntimeError, ValueError, KeyError) as error:
        raise InputError(
            f"--workdir={workdir} needs gs:// and pip install '.[gcs]', or s3:// and '.[s3]': "
            f"{error}"
        ) from error
    except Exception as error:  # each storage has its own errors
        raise _unusable(workdir, error) from error
    return path


def _unusable(workdir, error):
    return InputError(
        f"--workdir={workdir} cannot be used ({type(error).__name__}: {error}): check its name, "
        "permissions and free space"
    )


@contextlib.contextmanager
def open_workdir(workdir: epath.PathLike) -> Iterator[epath.Path]:
    """Creates and locks the output directory of a run within the context.

    In object storage there is no lock: make sure that one run at a time uses it.

    Raises:
      InputError: It cannot be used, or another run uses it.
    """
    path = open_path(workdir)
    with contextlib.ExitStack() as on_exit:
        if not is_url(workdir):
            local = prepare_workdir(workdir)
            if jax.process_index() == 0:
                on_exit.enter_context(lock_workdir(local))
        yield path


def prepare_workdir(workdir: epath.PathLike) -> Path:
    """Creates the output directory and returns its absolute path.

    Raises:
      InputError: The directory cannot be created or written to.
    """
    path = local_path(workdir)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(bytes(2**16))  # a full disk still accepts empty files
    except OSError as error:
        raise _unusable(workdir, error) from error
    return path


@contextlib.contextmanager
def lock_workdir(workdir: Path) -> Iterator[None]:
    """Holds an exclusive lock on the directory within the context.

    The operating system releases the lock when the process ends, even after a SIGKILL. Between
    hosts the lock works only if the network file system supports it.

    Raises:
      InputError: Another run holds the lock.
    """
    # filelock does not record which process holds a lock.
    with (workdir / LOCK).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise InputError(
                f"--workdir={workdir} is in use by another run ({file.read().strip()}): wait until "
                "it ends, stop it, or choose another directory"
            ) from None
        except OSError as error:
            if error.errno not in LOCKS_UNSUPPORTED:
                raise
            print(f"note: {workdir} cannot be locked: make sure that no other run uses it")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        os.fsync(file.fileno())  # for `identify` on other hosts
        yield


def identify(workdir: epath.Path) -> str | None:
    """Returns what all processes of a run find if they share its directory: the lock's text."""
    multihost_utils.sync_global_devices("workdir")  # process 0 has written it
    if is_url(workdir):
        return str(workdir)
    lock = workdir / LOCK
    return lock.read_text() if lock.exists() else None


def write_atomically(path: epath.PathLike, content: str | bytes) -> None:
    """Replaces the content of a file. After a failure or a kill the old content is still there."""
    path, content = epath.Path(path), content.encode() if isinstance(content, str) else content
    if is_url(path):  # objects are written whole or not at all
        path.write_bytes(content)
        return
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(content)
    partial.replace(path)


@contextlib.contextmanager
def explain_failed_write(
    what: str,
    directory: epath.PathLike,
    safe: Callable[[], str] = lambda: "the checkpoints are not affected",
    errors: type[Exception] = OSError,
) -> Iterator[None]:
    """Turns the errors of a full or read-only disk within the context into an `InputError`.

    Args:
      what: What is written, for the message.
      directory: Where it is written.
      safe: Describes what a failure leaves intact.
      errors: Errors of a failed write; in object storage every error is taken for one.
    """
    try:
        yield
    except Exception as error:
        if not (isinstance(error, errors) or is_url(directory)):  # storages have their own errors
            raise
        reason = getattr(error, "strerror", None) or str(error)
        if "[os_error_code" in reason:  # of TensorStore, after the names of several files
            reason = reason.split(" [os_error_code")[0].rsplit(": ", 1)[-1]
        raise InputError(
            f"{what} could not be written to {directory}: {reason}. Training stops; {safe()}. Free "
            "disk space or fix the permissions, then run the same command again to resume"
        ) from error


class StopRequest:
    """Whether SIGTERM or SIGINT has asked for a stop; see `listen_for_signals`."""

    _received = False

    def receive(self, _number: int, _frame) -> None:
        """Handles the first signal, and restores the default handlers for the second."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if jax.process_count() > 1:
            signal.raise_signal(signal.SIGTERM)  # JAX passes it on to all processes
        else:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._received = True

    def reached(self, step: int) -> bool:
        """Returns whether to stop after this step. Every process must ask after every step."""
        if jax.process_count() > 1:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._received


@contextlib.contextmanager
def listen_for_signals(request: StopRequest | None = None) -> Iterator[StopRequest]:
    """Treats SIGTERM and SIGINT as requests to stop within the context.

    `request` records them, or a new one.

    Schedulers send SIGTERM before they take a machine away: 30 s before on spot VMs and GKE, 120 s
    with `--signal=TERM@120` on SLURM. Ctrl-C sends SIGINT. With several processes JAX itself
    handles SIGTERM, and a signal to any of them stops all of them after the same step. Signals
    cannot be handled outside the main thread.
    """
    request = request or StopRequest()
    single = jax.process_count() == 1
    numbers = (signal.SIGINT, signal.SIGTERM) if single else (signal.SIGINT,)
    with contextlib.ExitStack() as on_exit:
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                on_exit.callback(signal.signal, number, signal.signal(number, request.receive))
        yield request
