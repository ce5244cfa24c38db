"""The processes of a run: how they join, what must agree, and the signals that stop them."""

import contextlib
import hashlib
import importlib.util
import json
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jaxlib.version
import numpy as np
from jax.experimental import multihost_utils

from structinit_jax.errors import InputError, InUseError, require

LOST_TIMEOUT = 60  # seconds of silence after which a process is considered lost


def join(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout: int = 300,
) -> None:
    """Connects this process to the others in a run. Only process 0 prints to stdout afterwards.

    Without arguments, JAX finds the other processes on Cloud TPU, SLURM and TPU slices of GKE;
    elsewhere, the run has a single process. `num_processes=1` disables the search. The coordinator
    is process 0, at an address such as '10.0.0.1:1234'. JAX ends this process if the others do not
    join within `timeout` seconds. Later, JAX ends all processes if one of them is silent for
    `LOST_TIMEOUT`; a process that has crashed waits that long for the others.
    """
    given = (coordinator_address, num_processes, process_id)
    alone = given == (None, None, None) and not _in_cluster(os.environ)
    if alone or (num_processes == 1 and process_id in (None, 0)):
        return
    newer = jax.__version_info__ >= (0, 8, 1)
    shutdown = {"shutdown_timeout_seconds": LOST_TIMEOUT} if newer else {}
    # If the others do not join, JAX aborts with a message that does not say so.
    print(
        f"waiting up to {timeout} s for all processes to join; to train on this machine alone, "
        "pass --num_processes=1",
        file=sys.stderr,
        flush=True,
    )
    try:
        jax.distributed.initialize(
            *given,
            # Explicit arguments take precedence over SLURM's environment variables.
            cluster_detection_method="deactivate" if coordinator_address else None,
            initialization_timeout=timeout,
            heartbeat_timeout_seconds=LOST_TIMEOUT,
            **shutdown,
        )
    except (RuntimeError, ValueError) as error:
        raise InputError(f"cannot join the other processes: {error}") from error
    counts = Counter(device.process_index for device in jax.devices())
    needs = "the same for all processes: check which devices each of them may use"
    require("devices of each process", dict(counts), needs, len(set(counts.values())) == 1)
    if jax.process_count() > 1 and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        # Only process 0 writes to the cache. When it finds a program there, the other processes
        # would wait for its share of the autotuning of GPU kernels.
        jax.config.update("jax_compilation_cache_dir", None)
    if jax.process_index() != 0:
        print(f"process {jax.process_index()} has joined", flush=True)
        sys.stdout = Path(os.devnull).open("w", errors="backslashreplace")  # noqa: SIM115


def check_equal(values: Mapping[str, Any]) -> None:
    """Raises the same `InputError` in all processes unless all have the same values.

    Processes that differ would wait for each other forever, or train different models. `values`
    maps names to JSON objects. Every process must call this.
    """
    texts = [json.dumps(value, sort_keys=True).encode() for value in values.values()]
    digests = np.stack([np.frombuffer(hashlib.sha256(text).digest(), np.uint8) for text in texts])
    gathered = multihost_utils.process_allgather(digests).reshape(-1, *digests.shape)
    for process, name in np.argwhere((gathered != gathered[0]).any(-1)):
        raise InputError(
            f"process {process} has a different {list(values)[name]} than process 0: start all "
            "processes with the same code, packages, flags and data, and with one --workdir on a "
            "shared disk or in object storage"
        )


def check_program(lowered: jax.stages.Lowered) -> None:
    """Raises `InputError` in all processes unless all have the same traced program and JAX.

    With different code, packages or environments, the copies of the weights would drift apart.
    """
    if jax.process_count() > 1:
        versions = [jax.__version__, jaxlib.version.__version__]
        check_equal({"version of JAX": versions, "training step": lowered.as_text()})


@contextlib.contextmanager
def shared_errors() -> Iterator[None]:
    """Raises an `InputError` in all processes if one of them raises one within the context.

    Otherwise, JAX would end the others with its own messages. Every process must enter the context.
    """
    error = None
    try:
        yield
    except InputError as own:
        error = own
    code = np.asarray(error.exit_code if error else 0)
    codes = multihost_utils.process_allgather(code).reshape(-1)
    if error:
        raise error
    if codes.any():
        kind = InUseError if InUseError.exit_code in codes else InputError
        raise kind(f"process {codes.argmax()} cannot continue: see its message")


class StopRequest:
    """A reusable context manager in which SIGTERM and SIGINT request a stop.

    Schedulers send SIGTERM before they reclaim a machine: 15 to 30 s in advance on spot VMs, 120 s
    on SLURM with `--signal=TERM@120`. Ctrl-C sends SIGINT. With several processes, JAX itself
    handles SIGTERM after `join`, and a signal to any process stops all of them after the same step.
    Signals cannot be handled outside the main thread.
    """

    _received = False

    def __enter__(self):
        joined = jax.distributed.is_initialized()
        numbers = (signal.SIGINT,) if joined else (signal.SIGINT, signal.SIGTERM)
        if threading.current_thread() is not threading.main_thread():
            numbers = ()
        self._handlers = {number: signal.signal(number, self._receive) for number in numbers}
        return self

    def __exit__(self, *_):
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _receive(self, _number, _frame):
        """Handles a signal, and restores the default handler for a second Ctrl-C."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if jax.distributed.is_initialized():
            signal.raise_signal(signal.SIGTERM)  # JAX passes it on to all processes
        else:
            self._received = True

    def reached(self, count: int) -> bool:
        """Returns whether to stop after this step, the `count`-th of this process.

        Every process must call this after every step. Counts start at 1 because JAX waits for
        count 1 if a signal arrives before the first step.
        """
        if jax.distributed.is_initialized():
            return multihost_utils.reached_preemption_sync_point(count)
        return self._received


def _in_cluster(environment) -> bool:
    """Whether this process is one of several, or runs on a Cloud TPU host."""
    srun = int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1
    gke = "," in environment.get("TPU_WORKER_HOSTNAMES", "")
    # A Cloud TPU VM has libtpu and device files for its chips. Notebook services have both, too,
    # but no metadata server to query, so they set TPU_SKIP_MDS_QUERY.
    chips = Path("/dev/accel0").exists() or Path("/dev/vfio/0").exists()
    libtpu = importlib.util.find_spec("libtpu") is not None
    return srun or gke or (chips and libtpu and "TPU_SKIP_MDS_QUERY" not in environment)
