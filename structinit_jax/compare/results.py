"""Reads the runs of a comparison from their files, and computes statistics over seeds."""

import functools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from structinit_jax.errors import InputError
from structinit_jax.evaluate import deciding_accuracy
from structinit_jax.training.metrics import read_lines

GRID = "compare.json"
STATUS = "status.json"
CONFIDENCE = 0.95
TOLERANCE = 1e-9  # of accuracies: the mean of equal ones may be rounded up


class Run:
    """One seed of one setting, as far as it has been trained.

    Attributes:
      setting: Name of the setting.
      seed: The seed.
      status: 'done', 'failed' or 'unfinished'.
      error: Why the run failed.
      lines: The lines of its `metrics.jsonl`, up to the last step of the comparison:
        `structinit_jax.main` may have trained the run longer.
      info: What `compare.json` says about its setting.
    """

    def __init__(self, workdir: Path, setting: str, seed: int, info: Mapping[str, Any]):
        folder = run_folder(workdir, setting, seed)
        status = read_json(folder / STATUS) or {}
        self.setting, self.seed, self.info = setting, seed, info
        self.status = status.get("status", "unfinished")
        self.error = status.get("error", "")
        path = folder / "metrics.jsonl"
        lines = read_lines(path, info["num_steps"]) if path.exists() else []
        self.lines = [json.loads(line) for line in lines]

    def curve(self, name: str) -> dict[int, float]:
        """Returns a metric by step; accuracies are those that determine the best checkpoint."""
        split, _, kind = name.rpartition("/")
        lines = [line for line in self.lines if name in line]
        if kind == "accuracy":
            return {line["step"]: deciding_accuracy(line, split) for line in lines}
        return {line["step"]: line[name] for line in lines}

    @functools.cached_property
    def test_curve(self) -> dict[int, float]:
        """The test accuracy by step, from 0 to 1."""
        return self.curve(f"{self.info['test_name']}/accuracy")

    @property
    def accuracy(self) -> float | None:
        """The test accuracy after the last step of a run that is done."""
        return self.test_curve.get(self.info["num_steps"]) if self.status == "done" else None

    def epoch(self, step: int) -> float:
        """Converts a step to epochs."""
        return step / self.info["steps_per_epoch"]

    def seconds(self, step: int) -> float:
        """Returns the time spent in training steps up to a step."""
        speeds = self.curve("images_per_second")
        if not speeds:
            return math.nan
        steps = np.array([0, *speeds])
        times = np.diff(steps) * self.info["config"]["batch_size"] / np.array([*speeds.values()])
        return float(np.interp(step, steps, np.concatenate([[0.0], np.cumsum(times)])))

    def first_epoch(self, accuracy: float) -> float | None:
        """Returns the epoch of the first evaluation that reaches an accuracy."""
        goal = accuracy - TOLERANCE
        reached = (step for step, value in self.test_curve.items() if value >= goal)
        return next(map(self.epoch, reached), None)

    @property
    def init_metrics(self) -> dict[str, float]:
        """Cost and quality of the initialization, see `training.state.initialize_and_measure`."""
        first = self.lines[0] if self.lines else {}
        return {k.removeprefix("init/"): v for k, v in first.items() if k.startswith("init/")}


class Comparison(NamedTuple):
    """All runs of a workdir.

    Attributes:
      workdir: The workdir.
      info: Content of `compare.json`.
      runs: By setting, in the order of the seeds.
    """

    workdir: Path
    info: dict[str, Any]
    runs: dict[str, list[Run]]

    @property
    def metric(self) -> str:
        """What is compared, such as 'test accuracy', named after the split."""
        names = {facts["test_name"] for facts in self.info["settings"].values()}
        return f"{names.pop()} accuracy" if len(names) == 1 else "accuracy"

    def accuracies(self, setting: str | None) -> dict[int, float]:
        """Returns the test accuracies of the finished runs of a setting, by seed."""
        runs = self.runs.get(setting, ())  # a baseline need not be among the settings
        return {run.seed: run.accuracy for run in runs if run.accuracy is not None}

    def finished(self, setting: str) -> list[Run]:
        """Returns the runs of a setting that are done."""
        return [run for run in self.runs[setting] if run.status == "done"]

    def difference(self, setting: str) -> "Interval | None":
        """Returns the accuracy minus that of the setting's baseline."""
        baseline = self.info["baselines"][setting]
        if baseline == setting:
            return None
        return paired_difference(self.accuracies(setting), self.accuracies(baseline))

    def epochs_to_baseline(self, setting: str) -> list[float | None]:
        """Returns when each finished run reaches the baseline's mean final accuracy, if it does."""
        finals = self.accuracies(self.info["baselines"][setting])
        if not finals:
            return []
        goal = np.mean([*finals.values()])
        return [run.first_epoch(goal) for run in self.finished(setting)]


def read(workdir: Path) -> Comparison:
    """Reads a comparison; raises `InputError` if there is none."""
    info = read_grid(workdir)
    if info is None:
        raise InputError(f"--workdir={workdir} holds no comparison: there is no {GRID}")
    runs = {
        setting: [Run(workdir, setting, seed, facts) for seed in facts["seeds"]]
        for setting, facts in info["settings"].items()
    }
    return Comparison(workdir, info, runs)


def read_grid(workdir: Path) -> dict[str, Any] | None:
    """Returns the content of `compare.json`, or None if there is no such file."""
    info = read_json(workdir / GRID)
    for facts in info["settings"].values() if info else ():
        facts.setdefault("seeds", info.get("seeds"))  # older files have the same for all settings
    return info


def run_folder(workdir: Path, setting: str, seed: int) -> Path:
    """Returns the workdir of one run."""
    return workdir / setting / f"seed_{seed}"


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file, or None if there is no such file."""
    return json.loads(path.read_text()) if path.exists() else None


# -- statistics ------------------------------------------------------------------------------------


class Interval(NamedTuple):
    """A mean and the bounds of its confidence interval, None for fewer than two values."""

    mean: float
    low: float | None
    high: float | None


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float | None]:
    """Returns the mean and the sample standard deviation, None for a single value."""
    deviation = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return float(np.mean(values)), deviation


def paired_difference(
    values: Mapping[int, float], others: Mapping[int, float], confidence: float = CONFIDENCE
) -> Interval | None:
    """Returns the mean difference over common seeds with Student's interval.

    Args:
      values: Values by seed.
      others: Values to subtract, by seed.
      confidence: Probability that the interval covers the true mean, for normal differences.

    Returns:
      The interval, or None if there is no common seed.
    """
    differences = [values[seed] - others[seed] for seed in values if seed in others]
    if not differences:
        return None
    mean, deviation = mean_and_deviation(differences)
    if deviation is None:
        return Interval(mean, None, None)
    n = len(differences)
    half = stats.t.ppf((1 + confidence) / 2, n - 1) * deviation / math.sqrt(n)
    return Interval(mean, float(mean - half), float(mean + half))
