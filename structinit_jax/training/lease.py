"""Locks a run in object storage by an object that keeps changing while the run is alive."""

import json
import os
import socket
import time
import uuid
from typing import Any

from structinit_jax.errors import InputError

NAME = ".lock.json"
STALE_SECONDS = 60.0  # after which the lock of a killed run is taken over
SETTLE_SECONDS = 0.5  # of two runs that start at the same moment, the later one gets the lock


class Lease:
    """Holds the lock of a run, until another run takes it over.

    Args:
      storage: An fsspec file system.
      path: Where the lock is stored.
      url: The run, for messages.

    Attributes:
      lost: Who has taken over the run, or None.
    """

    def __init__(self, storage: Any, path: str, url: str):
        self.lost: str | None = None
        self._storage, self._path, self._url = storage, path, url
        self._me = {"id": uuid.uuid4().hex, "host": socket.gethostname(), "process": os.getpid()}
        self._beat = 0

    def take(self) -> None:
        """Takes the lock; waits first if another run holds it, whose process may be gone.

        Raises:
          InputError: The other run is alive.
        """
        found = self.read()
        if found is not None and not _has_ended(found):
            print(f"note: {self._url} is locked by {_describe(found)}; waiting for a sign of life")
            end = time.monotonic() + STALE_SECONDS
            while time.monotonic() < end:
                time.sleep(1.0)
                if (now := self.read()) is None:
                    break
                if now != found:
                    self._refuse(now)
        self._write()
        time.sleep(SETTLE_SECONDS)
        if (now := self.read()) is None or now["id"] != self._me["id"]:
            self._refuse(now or {})

    def renew(self) -> None:
        """Shows that this run is alive; sets `lost` if another one has taken over."""
        now = self.read()
        if now is not None and now["id"] != self._me["id"]:
            self.lost = f"{_describe(now)} has taken over the run"
            return
        self._beat += 1
        self._write()

    def release(self) -> None:
        """Removes the lock."""
        self._storage.rm_file(self._path)

    def read(self) -> dict[str, Any] | None:
        """Returns who holds the lock, or None."""
        try:
            return json.loads(self._storage.cat_file(self._path))
        except FileNotFoundError:
            return None

    def _write(self):
        content = self._me | {"beat": self._beat}
        self._storage.pipe_file(self._path, json.dumps(content).encode())

    def _refuse(self, other):
        raise InputError(
            f"--workdir={self._url} is in use by another run ({_describe(other)}): wait until it "
            "ends, stop it, or choose another directory"
        )


def _describe(lock):
    return f"process {lock.get('process', '?')} on {lock.get('host', '?')}"


def _has_ended(lock):
    """Whether the process of a lock ran on this machine and is gone."""
    if lock.get("host") != socket.gethostname():
        return False
    try:
        os.kill(lock["process"], 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return False
