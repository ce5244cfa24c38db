"""Ends the processes of a run with a message when one of them is lost.

JAX aborts them only after its own timeout and without saying what to do, and they wait for minutes
for a process whose Python code has failed.
"""

import contextlib
import itertools
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator

import jax
from jax._src.distributed import global_state

from structinit_jax.errors import StoppedError

PREFIX = "structinit_jax/alive/"
DONE = "done"
JAX_MARGIN = 30  # seconds by which JAX's own timeout is longer


@contextlib.contextmanager
def watch(timeout: float) -> Iterator[None]:
    """Ends this process if another process of the run is lost within the context.

    Every process reports to the coordinator a few times per `timeout`. A process that leaves the
    context without an error does not count as lost.

    Args:
      timeout: Seconds without a report after which a process counts as lost. The coordinator
        counts as lost as soon as its port closes.
    """
    if global_state.client is None:
        yield
        return
    watcher = _Watcher(timeout)
    word = None
    try:
        yield
        word = DONE
    except StoppedError:
        word = DONE
        raise
    except (RuntimeError, ValueError) as error:
        if isinstance(error, RuntimeError) or "Gloo" in str(error):
            # Most likely a collective failed since a process was lost: the watcher says which one.
            print(f"{error}\nwaiting to see whether another process was lost", file=sys.stderr)
            time.sleep(timeout + 2 * watcher.interval)
        raise
    finally:
        watcher.stop(word)


class _Watcher:
    def __init__(self, timeout):
        self.interval = min(timeout / 4, 5.0)
        self._timeout = timeout
        self._client, self._address = global_state.client, global_state.coordinator_address
        self._key, self._host = f"{PREFIX}{jax.process_index()}", socket.gethostname()
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        targets = [self._exchange]
        if jax.process_index() != 0:
            targets.append(self._watch_coordinator)
        for target in targets:
            threading.Thread(target=target, name=target.__name__, daemon=True).start()

    def stop(self, word):
        """Stops reporting; `word`, unless None, is the last report."""
        with self._lock:
            self._stopped.set()
            if word is not None:
                with contextlib.suppress(RuntimeError):  # the coordinator may have ended
                    self._report(word)

    def _report(self, text):
        self._client.key_value_set(self._key, text, allow_overwrite=True)

    def _exchange(self):
        """Reports this process and looks for reports of the others."""
        reports, times = {}, {}
        for count in itertools.count():
            try:
                with self._lock:
                    if self._stopped.is_set():
                        return
                    self._report(f"{self._host} {count}")
                found = dict(self._client.key_value_dir_get(PREFIX))
            except RuntimeError:
                self._end("process 0, the coordinator,", "does not answer")
                return
            now = time.monotonic()
            for key, report in found.items():
                if report != reports.get(key):
                    reports[key], times[key] = report, now
            silent = [key for key, last in times.items() if now - last > self._timeout]
            lost = [key for key in silent if reports[key] != DONE]
            if lost:
                names = (f"{key.rpartition('/')[2]} (on {reports[key].split()[0]})" for key in lost)
                self._end(f"process {', '.join(names)}", f"was silent for {self._timeout:g} s")
            self._stopped.wait(self.interval)

    def _watch_coordinator(self):
        """Holds a connection to the coordinator's port, which breaks as soon as it ends."""
        host, _, port = self._address.rpartition(":")
        pause = 0.0
        while not self._stopped.is_set():
            began = time.monotonic()
            try:
                connection = socket.create_connection((host.strip("[]"), int(port)), self._timeout)
            except OSError:
                self._end("process 0, the coordinator,", "has closed its port")
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(None)
                while connection.recv(4096):
                    pass
            # gRPC closes idle connections, but only after minutes.
            pause = 0.0 if time.monotonic() - began > 1 else min(2 * pause + 1e-3, 1.0)
            self._stopped.wait(pause)

    def _end(self, who, what):
        with self._lock:
            if self._stopped.is_set():
                return
            message = (
                f"error: {who} {what}: it was killed or has failed, or its machine or network "
                f"has. Process {jax.process_index()} of {jax.process_count()} ends too. Read the "
                "log of that process, then run the same command again on all hosts to resume from "
                "the newest checkpoint. --lost_timeout sets how long to wait\n"
            )
            # At once, since JAX is about to abort; the main thread is blocked in a collective.
            os.write(2, message.encode())
            os._exit(1)
