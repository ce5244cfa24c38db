"""Joining the processes of one run, before anything touches a device."""

import importlib.util
import os
import sys
import threading
from pathlib import Path

import jax

from structinit_jax.errors import InputError


def join(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout: float = 300,
) -> None:
    """Makes this process one of those of a run; the first alone prints to stdout from then on.

    Without arguments JAX finds the others by itself on Cloud TPU, SLURM and GKE's TPU jobs; on any
    other machine the run is of this process alone.

    Args:
      coordinator_address: host and port of process 0, such as '10.0.0.1:1234'.
      num_processes: how many there are. 1, alone, turns the search for others off.
      process_id: 0 to num_processes - 1, in each process another.
      timeout: seconds after which a process that waits for others gives up and exits.

    Raises:
      InputError: if the arguments are incomplete or do not fit together.
    """
    given = (coordinator_address, num_processes, process_id)
    if given == (None, 1, None):
        return
    if given == (None, None, None):
        if not _in_cluster(os.environ):
            return
    else:
        _check(coordinator_address, num_processes, process_id)
    place = (
        f"process {process_id} of {num_processes} (coordinator {coordinator_address})"
        if coordinator_address
        else "this process"
    )
    watchdog = threading.Timer(timeout, _give_up, (place, timeout))
    watchdog.daemon = True
    watchdog.start()
    try:
        # JAX ends the process by abort() at its own limit, so the watchdog's comes first.
        jax.distributed.initialize(
            coordinator_address,
            num_processes,
            process_id,
            # Where SLURM's variables lie about, explicit arguments still mean what they say.
            cluster_detection_method="deactivate" if coordinator_address else None,
            initialization_timeout=round(timeout) + 60,
        )
    except (RuntimeError, ValueError) as error:
        raise InputError(
            f"{place} cannot join the others: {error}. To train on this machine alone, pass "
            "--num_processes=1"
        ) from error
    finally:
        watchdog.cancel()
    if jax.process_index() != 0:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115


def _check(coordinator_address: str | None, num_processes: int | None, process_id: int | None):
    values = {
        "--coordinator_address": coordinator_address,
        "--num_processes": num_processes,
        "--process_id": process_id,
    }
    missing = [flag for flag, value in values.items() if value is None]
    if missing:
        raise InputError(
            f"{' and '.join(missing)} must be given too: several processes need all of "
            "--coordinator_address=HOST:PORT, --num_processes and --process_id"
        )
    host, _, port = coordinator_address.rpartition(":")
    if not host or not port.isdigit():
        raise InputError(
            f"--coordinator_address={coordinator_address} needs a host and a port, such as "
            "10.0.0.1:1234"
        )
    if num_processes < 1:
        raise InputError(f"--num_processes={num_processes} needs to be 1 or more")
    if not 0 <= process_id < num_processes:
        raise InputError(
            f"--process_id={process_id} needs to be from 0 to {num_processes - 1}, since "
            f"--num_processes={num_processes}"
        )


def _in_cluster(environment) -> bool:
    """Whether this process was started as one of several, or on a Cloud TPU host."""
    if int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1:  # set by srun for its step
        return True
    if "," in environment.get("TPU_WORKER_HOSTNAMES", ""):  # set by GKE
        return True
    # A Cloud TPU VM has libtpu and the chips' device files; notebook services that have them too
    # set TPU_SKIP_MDS_QUERY, since they have no metadata server to ask.
    chips = Path("/dev/accel0").exists() or Path("/dev/vfio/0").exists()
    libtpu = importlib.util.find_spec("libtpu") is not None
    return chips and libtpu and "TPU_SKIP_MDS_QUERY" not in environment


def _give_up(place: str, timeout: float) -> None:
    print(
        f"error: {place} waited {timeout:.0f} s and the others did not all come. Start the same "
        "command on all hosts at the same time, check that the coordinator's port is open "
        "between them, or pass --num_processes=1 to train on this machine alone",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)  # the main thread is inside a call that cannot be interrupted
