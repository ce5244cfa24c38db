"""Where a run's numbers go: `metrics.jsonl` and TensorBoard event files."""

import json
import os
from pathlib import Path

import jax
import numpy as np
from tensorboardX import SummaryWriter


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
    """

    def __init__(self, workdir: Path, start_step: int):
        self._writes = jax.process_index() == 0
        if not self._writes:
            return
        self._path = workdir / "metrics.jsonl"
        self._drop_lines_after(start_step)
        self._file = self._path.open("a")
        self._tensorboard = SummaryWriter(
            str(workdir / "tensorboard"), purge_step=start_step + 1 if start_step else None
        )

    def _drop_lines_after(self, step: int) -> None:
        if not self._path.exists():
            return
        kept = []
        for line in self._path.read_text().splitlines(keepends=True):
            # A line cut short by a kill is the last one, written after the last checkpoint.
            if line.endswith("\n") and json.loads(line)["step"] <= step:
                kept.append(line)
        partial = self._path.with_suffix(".jsonl.partial")
        partial.write_text("".join(kept))
        os.replace(partial, self._path)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Writes one JSON line and one scalar per name."""
        if not self._writes:
            return
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._tensorboard.add_scalar(name, value, step)

    def close(self) -> None:
        """Writes out what is buffered."""
        if not self._writes:
            return
        self._file.close()
        self._tensorboard.close()
