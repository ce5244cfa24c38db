"""Collects training metrics from the devices, averages them, writes them to disk and shows them."""

import contextlib
import datetime
import json
import math
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath, epy

from structinit_jax.errors import InputError
from structinit_jax.training import distributed
from structinit_jax.training.workdir import (
    is_url,
    make_folder,
    open_to_append,
    parse_json,
    read_file,
    write_atomically,
)

with epy.lazy_imports():  # only the first process of a training run needs them
    import tensorboardX

# Steps dispatched ahead of the devices: enough to keep them busy, with few batches in memory.
MAX_IN_FLIGHT = 2
WAITS = ("data", "checkpoint", "evaluation")


class PendingMetrics:
    """Metrics of the steps since the last log line, on the devices.

    Reading them after every step would leave the devices idle.
    """

    def __init__(self):
        self._steps: dict[int, dict[str, Any]] = {}

    def add(self, step: int, metrics: dict[str, Any]) -> None:
        """Adds the metrics of a step; waits for the step `MAX_IN_FLIGHT` before it."""
        self._steps[step] = metrics
        jax.block_until_ready(self._steps.get(step - MAX_IN_FLIGHT))

    def fetch(self) -> dict[int, dict[str, Any]]:
        """Waits for all steps, and returns the metrics of those since the last call, by step."""
        steps = self._steps
        self._steps = {}
        return jax.device_get(steps)


def average(steps: Mapping[int, dict[str, Any]]) -> dict[str, float]:
    """Returns the means over steps as 'train/…', but 'train/learning_rate' of the last step."""
    every = list(steps.values())
    means = {f"train/{name}": float(np.mean([m[name] for m in every])) for name in every[0]}
    del means["train/finite"]
    return means | {"train/learning_rate": float(every[-1]["learning_rate"])}


class MetricsLog:
    """Appends metrics to `metrics.jsonl` and to a TensorBoard event file in `tensorboard/`.

    Only the first process writes. `start_step` is the step that the run resumes from, or 0. Lines
    of later steps, left by a killed run, are removed because these steps run again; with 0, all
    lines are removed. Lines that cannot be read are removed too, with a note.
    """

    def __init__(self, workdir: epath.PathLike, start_step: int):
        self._workdir = epath.Path(workdir)
        self._folder = self._workdir
        self._files = contextlib.ExitStack()
        if is_url(workdir):  # where files cannot be appended to
            folder = self._files.enter_context(tempfile.TemporaryDirectory())
            self._folder = epath.Path(folder)
        with distributed.shared_errors():
            if jax.process_index() == 0:
                self._open(start_step)

    def _open(self, start_step: int) -> None:
        folder = self._folder / "tensorboard"
        make_folder(folder)
        path = self._folder / "metrics.jsonl"
        earlier = self._workdir / "metrics.jsonl"
        lines, damaged = read_metrics(earlier, start_step) if start_step else ([], [])
        if damaged:
            print(f"note: {earlier}: left out lines that cannot be read: {damaged}")
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in lines))
        self._lines = self._files.enter_context(open_to_append(path))
        self._events = tensorboardX.SummaryWriter(
            str(folder),
            # TensorBoard drops the events of earlier files from this step on.
            purge_step=start_step + 1 if start_step else 0,
            max_queue=0,  # unlimited, so that writing never waits
            flush_secs=10,
            filename_suffix=f".{uuid.uuid4().hex[:8]}",  # two starts may share a second
        )

    def write(self, step: int, values: dict[str, float]) -> None:
        """Writes one JSON line, and one TensorBoard scalar per name."""
        if jax.process_index() == 0:
            finite = {k: v if math.isfinite(v) else None for k, v in values.items()}  # as in JSON
            self._lines.write(json.dumps({"step": step, **finite}) + "\n")
            self._lines.flush()
            # A full disk ends the writer's thread. What is added after that would keep the process
            # from ending.
            if self._events.file_writer.event_writer._worker.is_alive():
                for tag, value in values.items():
                    self._events.add_scalar(tag, value, step)

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
                with contextlib.suppress(OSError):  # a full disk may cost the events, not the run
                    self._events.close()
            self.upload()


def read_metrics(path: epath.PathLike, last_step: int) -> tuple[list[dict[str, Any]], list[int]]:
    """Reads the lines of a `metrics.jsonl` up to a step, as dicts; there are none without a file.

    Also returns the numbers, from 1, of lines that are damaged. A kill may cut off the last line,
    which does not count.
    """
    if not epath.Path(path).exists():
        return [], []
    metrics = []
    damaged = []
    *lines, _ = read_file(path).split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            values = parse_json(line, path)
        except InputError:
            values = None
        if not _are_metrics(values):
            damaged.append(number)
        elif values["step"] <= last_step:
            metrics.append(values)
    return metrics, damaged


def _are_metrics(values):
    if not isinstance(values, dict) or type(values.get("step")) is not int:
        return False
    return all(type(value) in (int, float, type(None)) for value in values.values())


class Progress:
    """Measures speed and waiting times, and prints them with the metrics.

    tqdm would count evaluations as training time.
    """

    def __init__(self, start_step: int, num_steps: int, steps_per_epoch: float, batch_size: int):
        self._num_steps = num_steps
        self._steps_per_epoch = steps_per_epoch
        self._batch_size = batch_size
        self._start_step = start_step
        self._last_step = start_step
        self._last_time = time.perf_counter()
        self._waited = dict.fromkeys(WAITS, 0.0)

    @contextlib.contextmanager
    def wait(self, name: str) -> Iterator[None]:
        """Counts the time within the context as one of `WAITS`."""
        start = time.perf_counter()
        yield
        self._waited[name] += time.perf_counter() - start

    def estimate(self, step: int, began: float) -> None:
        """Prints when the first step has ended, and from a later one on the time that is left.

        The first log line may be far away. Nothing is printed after it.
        """
        now = time.perf_counter()
        if step == self._start_step + 1:
            self._first_time = now
            print(f"first step after {now - began:.1f} s", flush=True)
        elif self._last_step == self._start_step:  # no log line yet
            seconds = (now - self._first_time) / (step - self._start_step - 1)
            left = format_duration(seconds * (self._num_steps - step))
            print(f"{seconds:.2g} s per step: {left} left, plus evaluations", flush=True)

    def measure(self, step: int) -> dict[str, float]:
        """Measures speed and waiting times since the last call.

        These are 'images_per_second', without checkpoints and evaluations, and 'data_wait',
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
        left = (self._num_steps - step) * self._batch_size / values["images_per_second"]
        print(
            f"step {step}/{self._num_steps}  epoch {step / self._steps_per_epoch:.1f}  "
            f"loss {values['train/loss']:.4f}  lr {values['train/learning_rate']:.2e}  "
            f"{values['images_per_second']:.0f} images/s  {format_duration(left)} left",
            flush=True,
        )


def format_duration(seconds: float) -> str:
    """Formats a time, for example '1:02:03'."""
    return str(datetime.timedelta(seconds=round(seconds)))


class StepTrace:
    """Records a JAX profiler trace of four steps on the first process.

    The first of them is `first_step`; None records no trace. Files for XProf and Perfetto go to
    `profile/` in the workdir, or in the working directory if the workdir is in object storage.
    clu.periodic_actions.Profile would import TensorFlow, and writes no Perfetto file.
    """

    def __init__(self, workdir: epath.PathLike, first_step: int | None):
        self._directory = Path("profile") if is_url(workdir) else Path(workdir) / "profile"
        self._first = first_step if jax.process_index() == 0 else None
        self._running = False

    def after(self, step: int, state: Any) -> None:
        """Starts the trace after the step before the first one, and stops it after the last."""
        if step + 1 == self._first:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # tracing Python calls would slow the steps down
            for folder in (".", "plugins", "plugins/profile"):  # in which JAX makes a new one
                make_folder(self._directory / folder)
            jax.profiler.start_trace(
                self._directory, create_perfetto_trace=True, profiler_options=options
            )
            self._running = True
        elif self._running and step == self._first + 3:
            jax.block_until_ready(state)
            self.close()

    def close(self) -> None:
        """Writes the trace, also of a run that ends before its last step."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
            print(
                f"wrote a trace from step {self._first} on to {self._directory}: open "
                "perfetto_trace.json.gz at https://ui.perfetto.dev, or the directory with XProf"
            )
