"""Training metrics: pending on the devices, averaged, and written to disk."""

import collections
import contextlib
import json
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c

from structinit_jax.training import workdir as workdir_lib

# Steps dispatched ahead of the devices: enough to keep them busy, with few batches in memory.
MAX_IN_FLIGHT = 2


class InFlight:
    """Bounds the number of steps that are dispatched ahead of the devices."""

    def __init__(self):
        self._outputs = collections.deque()

    def add(self, outputs: Any) -> None:
        """Adds the outputs of a step; waits for the step `MAX_IN_FLIGHT` before it."""
        self._outputs.append(outputs)
        if len(self._outputs) > MAX_IN_FLIGHT:
            jax.block_until_ready(self._outputs.popleft())


class PendingMetrics:
    """Metrics of the steps since the last log line.

    They stay on the devices until they are needed, since reading them after every step would leave
    the devices idle.

    Args:
      saved: Result of `to_json` at the checkpoint to resume from.
    """

    def __init__(self, saved: Sequence[dict[str, float]] = ()):
        self._fetched = [{name: np.float32(v) for name, v in step.items()} for step in saved]
        self._on_device: dict[int, dict[str, Any]] = {}
        self._in_flight = InFlight()

    def add(self, step: int, metrics: dict[str, Any]) -> None:
        """Adds the metrics of a step without waiting for it."""
        self._on_device[step] = metrics
        self._in_flight.add(metrics)

    def fetch(self) -> dict[int, dict[str, Any]]:
        """Waits for all steps, and returns the metrics of those since the last call, by step."""
        fetched, self._on_device = jax.device_get(self._on_device), {}
        for metrics in fetched.values():
            self._fetched.append({k: v for k, v in metrics.items() if not isinstance(v, dict)})
        return fetched

    def to_json(self) -> list[dict[str, float]]:
        """Returns the scalars among the fetched metrics, to be saved with a checkpoint."""
        return [{name: float(v) for name, v in step.items()} for step in self._fetched]

    def average(self) -> dict[str, float]:
        """Averages the scalars among the fetched metrics over the finite steps, and clears them.

        Returns:
          Means under 'train/…', the last step's 'train/learning_rate', and the number of
          'train/nonfinite_steps'.
        """
        steps, self._fetched = self._fetched, []
        finite = [m for m in steps if not m["nonfinite"]] or steps
        means = {f"train/{name}": float(np.mean([m[name] for m in finite])) for name in steps[0]}
        del means["train/nonfinite"]
        return means | {
            "train/learning_rate": float(steps[-1]["learning_rate"]),
            "train/nonfinite_steps": sum(int(m["nonfinite"]) for m in steps),
        }


class MetricsLog:
    """Appends metrics to `metrics.jsonl` and to TensorBoard event files in `tensorboard/`.

    With several processes, only the first one writes.

    Args:
      workdir: Output directory of the run.
      start_step: Step that the run starts or resumes from. Later lines, which a killed run wrote
        after its last checkpoint, are removed, since their steps will be repeated.

    Raises:
      InputError: The directory is full or not writable. The methods raise it too.
    """

    def __init__(self, workdir: Path, start_step: int):
        self._workdir = workdir
        self._files = contextlib.ExitStack()
        if jax.process_index() == 0:
            with self._explain_failure():
                path = workdir / "metrics.jsonl"
                _drop_lines_after(path, start_step)
                self._lines = self._files.enter_context(path.open("a"))
                events = EventFile(workdir / "tensorboard", start_step + 1 if start_step else None)
                self._events = self._files.enter_context(contextlib.closing(events))

    def write(self, step: int, values: dict[str, float]) -> None:
        """Writes one JSON line, and one TensorBoard scalar per name."""
        if jax.process_index() != 0:
            return
        with self._explain_failure():
            self._lines.write(json.dumps({"step": step, **values}) + "\n")
            self._lines.flush()
            self._events.write(step, values)

    def close(self) -> None:
        """Closes both files."""
        with self._explain_failure():
            self._files.close()

    def _explain_failure(self):
        return workdir_lib.explain_failed_write("the metrics", self._workdir)


class EventFile:
    """A TensorBoard event file of scalars.

    By hand, since the thread of tensorboardX's writer dies on a full disk, and then its queue
    blocks the training loop forever.

    Args:
      directory: Created if it does not exist.
      purge_step: TensorBoard drops the events of earlier files in the directory from this step on.
        None keeps them.

    Raises:
      OSError: The file cannot be written. The methods raise it too.
    """

    def __init__(self, directory: Path, purge_step: int | None):
        directory.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}"
        self._file = (directory / name).open("ab")
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if purge_step is not None:
            restart = SessionLog(status=SessionLog.START)
            self._write(Event(wall_time=time.time(), step=purge_step, session_log=restart))

    def write(self, step: int, values: dict[str, float]) -> None:
        """Appends one scalar per name."""
        scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=scalars)))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _write(self, event: Event) -> None:
        """Frames an event as a TFRecord: length, its checksum, content, its checksum."""
        content = event.SerializeToString()
        length = struct.pack("<Q", len(content))
        checksums = [struct.pack("<I", masked_crc32c(part)) for part in (length, content)]
        self._file.write(length + checksums[0] + content + checksums[1])
        self._file.flush()


def _drop_lines_after(path: Path, step: int) -> None:
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines(keepends=True):
        # A line that a kill has truncated is the last one, written after the last checkpoint.
        if line.endswith("\n") and json.loads(line)["step"] <= step:
            kept.append(line)
    workdir_lib.write_atomically(path, "".join(kept))
