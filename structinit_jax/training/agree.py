"""Checks at the start of a run that all processes have the same workdir, config and data.

Otherwise they would wait for each other forever, or silently train different models. They exchange
texts through the coordinator, so nothing is compiled and no device is used.
"""

import hashlib
import itertools
import json
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from flax.traverse_util import flatten_dict
from jax._src.distributed import global_state
from ml_collections import ConfigDict

from structinit_jax.errors import InputError
from structinit_jax.training import workdir as workdir_lib

PREFIX = "structinit_jax/agree/"
SHARED_SECONDS = 5.0  # for a network file system to show a new file
# Another process may still be reading a large data set. If it is lost, `watch` ends this one.
TIMEOUT_MS = 24 * 3600 * 1000
# Each host may have its copy of the data at a different place.
LOCAL_FIELDS = ("config.data.data_dir", "config.data.manual_dir")
MAX_LINES = 10
MAX_CHARACTERS = 60  # of a value in the message
_calls = itertools.count()


def check_workdir(place: str | Path, workdir: Path) -> None:
    """Raises the same `InputError` in all processes if they do not share the output directory.

    Args:
      place: Value of --workdir. A URL of object storage must be the same in all processes.
      workdir: The local directory.
    """
    if global_state.client is None:
        return
    place, is_url = str(place), workdir_lib.is_url(place)
    own_mark = workdir / f".shared_{uuid.uuid4().hex}"

    def make_mark(_):
        if is_url:
            return place
        with workdir_lib.explain_failed_write("a file", workdir):
            own_mark.touch()
        return own_mark.name

    try:
        mark = _decide({}, make_mark)
        shared = place == mark if is_url else _appears(workdir / mark)
        problem = _decide({"place": place, "shared": shared}, _compare_workdirs)
    finally:
        own_mark.unlink(missing_ok=True)
    if problem:
        raise InputError(problem)


def check_run(config: ConfigDict, data: Mapping[str, Any]) -> None:
    """Raises the same `InputError` in all processes if their configs or data differ.

    Args:
      config: Config of the run. The folders of its data may differ.
      data: JSON object of what else must be the same.
    """
    if global_state.client is None:
        return
    values = flatten_dict({"config": json.loads(config.to_json()), **data}, sep=".")
    values = {name: _shorten(json.dumps(value)) for name, value in values.items()}
    for field in LOCAL_FIELDS:
        values.pop(field, None)
    if problem := _decide({"values": values}, _compare_values):
        raise InputError(problem)


def _decide(report: dict[str, Any], judge: Callable[[list[dict[str, Any]]], str]) -> str:
    """Returns in every process what process 0 decides from the reports of all of them."""
    client, key = global_state.client, f"{PREFIX}{next(_calls)}"
    own = json.dumps(report | {"host": socket.gethostname()})
    client.key_value_set(f"{key}/{jax.process_index()}", own)
    if jax.process_index() == 0:  # alone, since thousands of processes would read millions of keys
        keys = [f"{key}/{i}" for i in range(jax.process_count())]
        reports = [json.loads(client.blocking_key_value_get(k, TIMEOUT_MS)) for k in keys]
        client.key_value_set(f"{key}/decision", judge(reports))
    return client.blocking_key_value_get(f"{key}/decision", TIMEOUT_MS)


def _appears(path: Path) -> bool:
    end = time.monotonic() + SHARED_SECONDS
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


def _compare_workdirs(reports: list[dict[str, Any]]) -> str:
    """Returns what is wrong with the workdirs of the processes, or ''."""
    first = reports[0]
    for index, report in enumerate(reports):
        if not report["shared"]:
            return (
                f"--workdir={report['place']} of process {index} (on {report['host']}) is not the "
                f"directory --workdir={first['place']} of process 0 (on {first['host']}): pass all "
                "processes one directory on a disk that their hosts share, such as NFS, or a "
                "bucket (gs://BUCKET/RUN or s3://BUCKET/RUN)"
            )
    return ""


def _compare_values(reports: list[dict[str, Any]]) -> str:
    """Returns what the first process that differs from process 0 has instead, or ''."""
    old = reports[0]["values"]
    for index, report in enumerate(reports):
        if (new := report["values"]) == old:
            continue
        lines = [
            f"  {name}: {old.get(name, '(absent)')} -> {new.get(name, '(absent)')}"
            for name in sorted(old | new)
            if old.get(name) != new.get(name)
        ]
        if len(lines) > MAX_LINES:
            lines[MAX_LINES:] = ["  …"]
        first, other = (f"process {i} (on {reports[i]['host']})" for i in (0, index))
        return "\n".join(
            [
                f"{other} does not run what {first} runs. From process 0 to process {index}:",
                *lines,
                "Start all processes with the same checkout, flags and data",
            ]
        )
    return ""


def _shorten(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    return f"(checksum {hashlib.sha256(text.encode()).hexdigest()[:8]})"
