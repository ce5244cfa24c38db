"""Averages training metrics, writes them to disk and shows them."""

import contextlib
import datetime
import json
import math
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath, epy

from structinit_jax.files import is_url, read_file, write_atomically
from structinit_jax.training import distributed
from structinit_jax.training.optimizer import Schedule

with epy.lazy_imports():  # only the first process of a training run needs them
    import tensorboardX
    from tensorboardX.proto import event_pb2, summary_pb2

WAITS = ("data", "checkpoint", "evaluation")


def average(steps: Mapping[int, dict[str, Any]]) -> dict[str, float]:
    """Returns means over steps as 'train/…'; 'train/learning_rate' is that of the last step."""
    every = list(steps.values())
    means = {f"train/{name}": float(np.mean([m[name] for m in every])) for name in every[0]}
    del means["train/finite"]
    means["train/learning_rate"] = float(every[-1]["learning_rate"])
    return means


class MetricsLog:
    """Appends metrics to `metrics.jsonl` and to a TensorBoard event file in `tensorboard/`.

    Only the first process writes. `start_step` is the step that the run resumes from, or 0. Lines
    of later steps, left by a killed run, are removed because these steps run again; with 0, all
    lines are removed.
    """

    def __init__(self, workdir: epath.PathLike, start_step: int):
        self._workdir = epath.Path(workdir)
        self._folder = self._workdir
        self._files = contextlib.ExitStack()
        if is_url(workdir):  # object storage does not support appending
            folder = self._files.enter_context(tempfile.TemporaryDirectory())
            self._folder = epath.Path(folder)
        with distributed.shared_errors():
            if jax.process_index() == 0:
                self._open(start_step)

    def _open(self, start_step: int) -> None:
        folder = self._folder / "tensorboard"
        folder.mkdir(exist_ok=True)
        path = self._folder / "metrics.jsonl"
        earlier = self._workdir / "metrics.jsonl"
        lines = read_metrics(earlier, start_step) if start_step else []
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in lines))
        self._lines = self._files.enter_context(path.open("a"))
        suffix = f".{start_step}"  # Two starts can fall within the same second.
        # A `SummaryWriter`'s thread would print a traceback when the disk is full.
        self._events = tensorboardX.event_file_writer.EventsWriter(str(folder / "events"), suffix)
        # From this step on, TensorBoard drops the events in earlier files.
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write_event(step=start_step + 1 if start_step else 0, session_log=start)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Writes one JSON line, and one TensorBoard scalar per name."""
        if jax.process_index() == 0:
            finite = {k: v if math.isfinite(v) else None for k, v in values.items()}  # for JSON
            self._lines.write(json.dumps({"step": step, **finite}) + "\n")
            self._lines.flush()
            scalars = [summary_pb2.Summary.Value(tag=k, simple_value=v) for k, v in values.items()]
            self._write_event(step=step, summary=summary_pb2.Summary(value=scalars))

    def _write_event(self, **fields) -> None:
        event = event_pb2.Event(wall_time=time.time(), **fields)
        with contextlib.suppress(OSError):  # on a full disk, lost events must not end the run
            self._events.write_event(event)
            self._events.flush()

    def upload(self) -> None:
        """Copies both files to the workdir if it is in object storage."""
        if self._folder != self._workdir and jax.process_index() == 0:
            for path in (self._folder / "metrics.jsonl", *self._folder.glob("tensorboard/*")):
                target = self._workdir / path.relative_to(self._folder)
                target.write_bytes(path.read_bytes())

    def close(self) -> None:
        """Closes both files."""
        with self._files:
            if jax.process_index() == 0:
                with contextlib.suppress(OSError):
                    self._events.close()
            self.upload()


def read_metrics(path: epath.PathLike, last_step: int) -> list[dict[str, Any]]:
    """Returns the lines of a `metrics.jsonl` up to a step as dicts; none if there is no file.

    Unreadable lines are skipped with a note. An incomplete last line, left by a killed run, is
    dropped.
    """
    if not epath.Path(path).exists():
        return []
    metrics = []
    *lines, _ = read_file(path).split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            values = json.loads(line)
            if values["step"] <= last_step:
                metrics.append(values)
        except (ValueError, LookupError, TypeError):
            print(f"note: {path}: line {number} cannot be read")
    return metrics


class Progress:
    """Measures speed and waiting times, and prints them with the metrics.

    tqdm would count evaluations as training time.
    """

    def __init__(self, start_step: int, schedule: Schedule, batch_size: int):
        self._schedule = schedule
        self._batch_size = batch_size
        self._last_step = start_step
        self._last_time = time.perf_counter()
        self._waited = dict.fromkeys(WAITS, 0.0)

    @contextlib.contextmanager
    def wait(self, name: str) -> Iterator[None]:
        """Counts the time within the context as one of `WAITS`."""
        start = time.perf_counter()
        yield
        self._waited[name] += time.perf_counter() - start

    def measure(self, step: int) -> dict[str, float]:
        """Measures speed and waiting times since the last call.

        Returns 'images_per_second', excluding checkpoints and evaluations, and 'data_wait',
        'checkpoint_wait' and 'evaluation_wait' as fractions of the elapsed time.
        """
        now = time.perf_counter()
        seconds = now - self._last_time
        waits = {f"{name}_wait": waited / seconds for name, waited in self._waited.items()}
        training = seconds - self._waited["checkpoint"] - self._waited["evaluation"]
        steps = step - self._last_step
        self._last_step = step
        self._last_time = now
        self._waited = dict.fromkeys(WAITS, 0.0)
        return {"images_per_second": steps * self._batch_size / training, **waits}

    def show(self, step: int, values: dict[str, float]) -> None:
        """Prints metrics, including the values that `measure` returned."""
        schedule = self._schedule
        left = (schedule.num_steps - step) * self._batch_size / values["images_per_second"]
        print(
            f"step {step}/{schedule.num_steps}  epoch {step / schedule.steps_per_epoch:.1f}  "
            f"loss {values['train/loss']:.4f}  lr {values['train/learning_rate']:.2e}  "
            f"{values['images_per_second']:.0f} images/s  {format_duration(left)} left",
            flush=True,
        )


def format_duration(seconds: float) -> str:
    """Formats a time, for example '1:02:03'."""
    return str(datetime.timedelta(seconds=round(seconds)))


class StepTrace:
    """Records a JAX profiler trace of four steps on the first process.

    The trace starts at `first_step`; None disables it. Files for XProf and Perfetto are written to
    `profile/` in the workdir, or in the working directory if the workdir is in object storage.
    clu's Profile would import TensorFlow and write no Perfetto file.
    """

    def __init__(self, workdir: epath.PathLike, first_step: int | None):
        self._directory = Path("profile") if is_url(workdir) else Path(workdir) / "profile"
        self._first = first_step if jax.process_index() == 0 else None
        self._active = False

    def after(self, step: int, state: Any) -> None:
        """Starts the trace just before its first step, and stops it after its last."""
        if step + 1 == self._first:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # tracing Python calls would slow the steps down
            jax.profiler.start_trace(
                self._directory, create_perfetto_trace=True, profiler_options=options
            )
            self._active = True
        elif step - 3 == self._first:
            jax.block_until_ready(state)
            self.close()

    def close(self) -> None:
        """Writes the trace, if one is being recorded; notes if none was recorded at all."""
        first = self._first
        self._first = None
        if self._active:
            self._active = False
            jax.profiler.stop_trace()
            print(
                f"wrote a trace, starting at step {first}, to {self._directory}: open "
                "perfetto_trace.json.gz at https://ui.perfetto.dev, or the directory with XProf"
            )
        elif first is not None:
            print(f"note: no trace was written: the run ended before step {first}")
