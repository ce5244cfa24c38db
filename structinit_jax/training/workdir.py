"""The output directory of a run: its lock, its small files, and the signals that end the run."""

import contextlib
import errno
import fcntl
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental import multihost_utils

from structinit_jax.errors import InputError

LOCK = ".lock"
LOCKS_UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


def local_path(workdir: str | Path) -> Path:
    """Returns the directory that --workdir names as an absolute path.

    Raises:
      InputError: The name is a URL.
    """
    if "://" in str(workdir):
        raise InputError(
            f"--workdir={workdir} is a URL, but must be a directory: mount the bucket on every "
            "host (with gcsfuse for Google Cloud Storage) and pass the mount point"
        )
    return Path(workdir).absolute()


def prepare_workdir(workdir: str | Path) -> Path:
    """Creates the output directory, checks that it is writable and returns its absolute path.

    Raises:
      InputError: The directory cannot be created or written to.
    """
    path = local_path(workdir)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(bytes(2**16))  # a full disk still accepts empty files
    except OSError as error:
        raise InputError(
            f"--workdir={workdir} cannot be written to ({error.strerror}): choose another directory"
        ) from error
    return path


@contextlib.contextmanager
def lock_workdir(workdir: Path) -> Iterator[None]:
    """Holds an exclusive lock on the directory within the context.

    The operating system releases the lock when the process ends, even after a SIGKILL. The lock
    works between the processes of one host, and between hosts only if the network file system
    supports it.

    Raises:
      InputError: Another run holds the lock.
    """
    # By hand, since filelock does not record which process holds a lock.
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
        yield


def write_atomically(path: Path, text: str) -> None:
    """Replaces the content of a file. After a failure or a kill the old content is still there.

    Raises:
      OSError: The file cannot be written.
    """
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text)
    os.replace(partial, path)


@contextlib.contextmanager
def explain_failed_write(what: str, directory: Path) -> Iterator[None]:
    """Turns the `OSError` of a full or read-only disk into a message for the user.

    Raises:
      InputError: A write failed within the context.
    """
    try:
        yield
    except OSError as error:
        raise failed_write(what, directory, error.strerror) from error


def failed_write(
    what: str, directory: Path, reason: str, safe: str = "the checkpoints are not affected"
) -> InputError:
    """Returns the error for a write that failed, with the reason and what is left of the run."""
    return InputError(
        f"{what} could not be written to {directory}: {reason}. Training stops; {safe}. Free disk "
        "space or fix the permissions, then run the same command again to resume"
    )


class StopRequest:
    """Whether SIGTERM or SIGINT has asked the run to stop; see `listen_for_signals`."""

    def __init__(self):
        self._received = False

    def receive(self, number: int, frame) -> None:
        """Handles the first signal, and restores the default handlers for the second."""
        del number, frame
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
def listen_for_signals() -> Iterator[StopRequest]:
    """Treats SIGTERM and SIGINT as requests to stop within the context.

    A scheduler sends SIGTERM before it takes a machine away: 30 s before on spot VMs and GKE, and
    as long before as `--signal=TERM@120` says on SLURM. Ctrl-C sends SIGINT.

    With several processes JAX itself handles SIGTERM, and a signal to any of them stops all of them
    after the same step. Outside the main thread signals cannot be handled and are ignored here.
    """
    request = StopRequest()
    with contextlib.ExitStack() as on_exit:
        if threading.current_thread() is threading.main_thread():
            single = jax.process_count() == 1
            for number in (signal.SIGINT, signal.SIGTERM) if single else (signal.SIGINT,):
                on_exit.callback(signal.signal, number, signal.signal(number, request.receive))
        yield request
