"""One run at a time in a workdir."""

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from structinit_jax.errors import InputError

LOCK = ".lock"
UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


@contextlib.contextmanager
def lock_workdir(workdir: Path) -> Iterator[None]:
    """Holds the workdir while the context lasts.

    The lock is the kernel's and goes when the process ends, however it ends: the file that stays
    behind holds nothing up. It covers the processes of one host; another host that has the folder
    over a network file system is seen only where that file system passes locks on.

    Raises:
      InputError: if another run holds it.
    """
    with (workdir / LOCK).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise InputError(
                f"--workdir={workdir} is in use by another run ({file.read().strip()}): wait for "
                "it, stop it, or give another folder"
            ) from None
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            print(f"note: {workdir} cannot be locked: take care that no second run uses it")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield
