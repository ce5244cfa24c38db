"""Where a run's numbers go: `metrics.jsonl` and TensorBoard event files."""

import contextlib
import json
from pathlib import Path

import jax
import numpy as np

from structinit_jax.training import files
from structinit_jax.training.event_file import EventFile


def average(metrics: list[dict]) -> dict[str, float]:
    """Means under 'train/' over the steps that were finite; the learning rate is the last step's.

    Args:
      metrics: of consecutive steps, fetched from the devices.
    """
    finite = [m for m in metrics if not m["nonfinite"]] or metrics
    values = {f"train/{k}": float(np.mean([m[k] for m in finite])) for k in metrics[0]}
    del values["train/nonfinite"]
    return values | {
        "train/learning_rate": float(metrics[-1]["learning_rate"]),
        "train/nonfinite_steps": sum(int(m["nonfinite"]) for m in metrics),
    }


class MetricsLog:
    """Appends to `metrics.jsonl` and to event files in `tensorboard/`, without TensorFlow.

    Of several processes the first one writes.

    Args:
      workdir: the run's folder.
      start_step: the step that the run starts or resumes from. Lines beyond it are what a killed
        run wrote after its last checkpoint; the steps will be done again, so they are taken out.

    Raises:
      InputError: as the methods do, if the folder is full or not to be written to.
    """

    def __init__(self, workdir: Path, start_step: int):
        self._writes = jax.process_index() == 0
        if not self._writes:
            return
        self._workdir = workdir
        self._on_close = contextlib.ExitStack()
        with self._explain_failure():
            path = workdir / "metrics.jsonl"
            purge_step = start_step + 1 if start_step else None
            _drop_lines_after(path, start_step)
            self._lines = self._on_close.enter_context(path.open("a"))
            events = EventFile(workdir / "tensorboard", purge_step)
            self._events = self._on_close.enter_context(contextlib.closing(events))

    def write(self, step: int, values: dict[str, float]) -> None:
        """Writes one JSON line and one scalar per name."""
        if not self._writes:
            return
        with self._explain_failure():
            self._lines.write(json.dumps({"step": step, **values}) + "\n")
            self._lines.flush()
            self._events.write(step, values)

    def close(self) -> None:
        """Ends both files."""
        if not self._writes:
            return
        with self._explain_failure():
            self._on_close.close()

    def _explain_failure(self):
        return files.explain_failure("the metrics", self._workdir)


def _drop_lines_after(path: Path, step: int) -> None:
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines(keepends=True):
        # A line cut short by a kill is the last one, written after the last checkpoint.
        if line.endswith("\n") and json.loads(line)["step"] <= step:
            kept.append(line)
    files.write_whole(path, "".join(kept))
