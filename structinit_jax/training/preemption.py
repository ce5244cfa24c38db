"""SIGTERM and SIGINT: a run that is told to stop saves a checkpoint after the step under way.

A scheduler that takes a machine back sends SIGTERM some time before: 30 s on spot machines and GKE,
as long as `--signal=TERM@120` asks for on SLURM. Ctrl-C is SIGINT.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator

import jax
from jax.experimental import multihost_utils


class StopRequest:
    """Whether the run has been told to stop; made by `listen`."""

    def __init__(self):
        self._received = False

    def receive(self, number: int, frame) -> None:
        """The signal handler. A second signal does what it does without this one."""
        del frame
        if jax.process_count() > 1:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.raise_signal(signal.SIGTERM)  # JAX passes this one on to all processes
        else:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._received = True

    def reached(self, step: int) -> bool:
        """Whether to stop after this step; the same in all processes. To be asked at every step."""
        if jax.process_count() > 1:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._received


@contextlib.contextmanager
def listen() -> Iterator[StopRequest]:
    """Takes SIGTERM and SIGINT as requests to stop while the context lasts.

    With several processes JAX itself listens to SIGTERM, and a signal to any of them stops all at
    one step. Outside of the main thread no signal can be taken, and the request never comes.
    """
    request = StopRequest()
    with contextlib.ExitStack() as on_exit:
        if threading.current_thread() is threading.main_thread():
            single = jax.process_count() == 1
            for number in (signal.SIGINT, signal.SIGTERM) if single else (signal.SIGINT,):
                on_exit.callback(signal.signal, number, signal.signal(number, request.receive))
        yield request
