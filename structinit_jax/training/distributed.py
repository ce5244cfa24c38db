"""Joins the processes of a run before JAX initializes the devices."""

import hashlib
import importlib.util
import json
import os
import re
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict
from jax.experimental import multihost_utils

import structinit_jax
from structinit_jax.errors import InputError

# Each host may have its copy of the data at a different place.
LOCAL_FIELDS = ("config.data.data_dir", "config.data.manual_dir")


def join(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout: float = 300,
    lost_timeout: float = 100,
) -> None:
    """Connects this process to the others of a run. Only process 0 prints to stdout afterwards.

    Without arguments JAX finds the other processes on Cloud TPU, SLURM and GKE; elsewhere the run
    has a single process.

    Args:
      coordinator_address: Host and port of process 0, for example '10.0.0.1:1234'.
      num_processes: Number of processes. 1 disables the search.
      process_id: Index of this process, from 0 to num_processes - 1.
      timeout: Seconds to wait for the other processes before this one exits.
      lost_timeout: Seconds after which JAX ends all processes if one of them is silent, and which a
        process that has failed waits for the others.

    Raises:
      InputError: The arguments are incomplete or do not fit together.
    """
    given = {
        "--coordinator_address": coordinator_address,
        "--num_processes": num_processes,
        "--process_id": process_id,
    }
    flags = tuple(given.values())
    if flags == (None, 1, None) or (flags == (None, None, None) and not _in_cluster(os.environ)):
        return
    place = "this process"
    if flags != (None, None, None):
        _check(given)
        if num_processes == 1:
            return
        place = f"process {process_id} of {num_processes} (coordinator {coordinator_address})"
    watchdog = threading.Timer(timeout, _give_up, (place, timeout))
    watchdog.daemon = True
    watchdog.start()
    try:
        # JAX calls abort() at its own timeout, so the watchdog's must be shorter.
        jax.distributed.initialize(
            coordinator_address,
            num_processes,
            process_id,
            # Explicit arguments take precedence over SLURM's environment variables.
            cluster_detection_method="deactivate" if coordinator_address else None,
            initialization_timeout=round(timeout) + 60,
            heartbeat_timeout_seconds=round(lost_timeout),
            shutdown_timeout_seconds=round(lost_timeout),
        )
    except (RuntimeError, ValueError) as error:
        raise InputError(
            f"{place} cannot join the other processes: {error}. To train on this machine alone, "
            "pass --num_processes=1"
        ) from error
    finally:
        watchdog.cancel()
    if jax.process_index() != 0:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115


def check_equal(values: Mapping[str, Any]) -> None:
    """Raises the same `InputError` in all processes unless all have the same values.

    Otherwise they would wait for each other forever, or train different models. The code of this
    package is compared too.

    Args:
      values: A JSON object. Every process must call this.
    """
    if jax.process_count() == 1:
        return
    text = json.dumps({**values, "code": _digest_of_code()}, sort_keys=True)
    sizes = multihost_utils.process_allgather(np.int32(len(text.encode())))
    buffer = np.zeros(sizes.max(), np.uint8)
    buffer[: len(text.encode())] = np.frombuffer(text.encode(), np.uint8)
    texts = multihost_utils.process_allgather(buffer)
    first, *others = (
        flatten_dict(json.loads(row[:size].tobytes()), sep=".")
        for row, size in zip(texts, sizes, strict=True)
    )
    for index, other in enumerate(others, start=1):
        names = sorted(
            n for n in first | other if first.get(n) != other.get(n) and n not in LOCAL_FIELDS
        )
        if names:
            name = names[0]
            raise InputError(
                f"process {index} has {name}={other.get(name)!r}, process 0 has "
                f"{first.get(name)!r} (and {len(names) - 1} more differences): start all "
                "processes with the same code, flags and data, and with one --workdir on a shared "
                "disk or in object storage"
            )


def _digest_of_code() -> str:
    """Returns the version of this package and a digest of its source files."""
    root, digest = Path(structinit_jax.__file__).parent, hashlib.blake2b(digest_size=8)
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return f"{structinit_jax.__version__} {digest.hexdigest()}"


def _check(given: dict) -> None:
    if missing := [flag for flag, value in given.items() if value is None]:
        raise InputError(f"{' and '.join(missing)} must be set: pass all of {', '.join(given)}")
    address, num_processes, process_id = given.values()
    if not re.fullmatch(r".+:\d+", address):
        raise InputError(
            f"--coordinator_address={address} must be a host and a port, for example 10.0.0.1:1234"
        )
    if not 0 <= process_id < num_processes:
        raise InputError(
            f"--process_id={process_id} must be from 0 to --num_processes={num_processes} minus 1"
        )


def _in_cluster(environment) -> bool:
    """Whether this process is one of several, or runs on a Cloud TPU host."""
    srun = int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1
    gke = "," in environment.get("TPU_WORKER_HOSTNAMES", "")
    # A Cloud TPU VM has libtpu and device files of its chips. Notebook services have both too, but
    # no metadata server to query, and set TPU_SKIP_MDS_QUERY.
    chips = Path("/dev/accel0").exists() or Path("/dev/vfio/0").exists()
    libtpu = importlib.util.find_spec("libtpu") is not None
    return srun or gke or (chips and libtpu and "TPU_SKIP_MDS_QUERY" not in environment)


def _give_up(place: str, timeout: float) -> None:
    print(
        f"error: {place} waited {timeout:.0f} s, but not all processes joined. Start it on all "
        "hosts at the same time, check that they can reach the coordinator's port, or pass "
        "--num_processes=1 to train on this machine alone",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)  # the main thread is blocked in a call that cannot be interrupted
