"""Trains a grid of initializations and other settings over several seeds, and compares them.

Here are the runs of a comparison, as its workdir records them: `compare.json` has the settings, and
each run is a workdir of its own, `SETTING/seed_K`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from structinit_jax.training.metrics import read_lines

GRID = "compare.json"
STATUS = "status.txt"  # of a run: `DONE`, or why it failed
DONE = "done"
# Fields that change the results by rounding at most; data have digests of their contents.
HARMLESS = ("checkpoint_every_steps", "keep_checkpoints", "fsdp", "data.data_dir", "model.remat")


class SeedRun:
    """One seed of one setting, as far as it has been trained.

    `facts` is the entry of its setting in `compare.json`.

    Attributes:
      folder: Workdir of the run.
      test_name: Name of the test set in the metrics.
      curve: The test accuracy by step, from 0 to 1, up to the last step of the comparison:
        `structinit_jax.main` may have trained the run longer.
      status: 'done', 'failed' or 'unfinished'.
      error: Why the run failed, in one line.
    """

    def __init__(self, workdir: Path, setting: str, seed: int, facts: Mapping[str, Any]):
        self.setting, self.seed, self.facts = setting, seed, facts
        self.folder, self.test_name = workdir / setting / f"seed_{seed}", facts["test_name"]
        metrics, status = self.folder / "metrics.jsonl", self.folder / STATUS
        texts = read_lines(metrics, facts["num_steps"]) if metrics.exists() else []
        name = f"{self.test_name}/accuracy"
        self.curve: dict[int, float] = {
            line["step"]: line[name] for line in map(json.loads, texts) if name in line
        }
        recorded = status.read_text(encoding="utf-8").strip() if status.exists() else ""
        self.error = "" if recorded == DONE else recorded
        if recorded == DONE and facts["num_steps"] not in self.curve:
            self.error = f"no result in {metrics}: delete its folder"
        self.status = "failed" if self.error else recorded or "unfinished"

    @property
    def accuracy(self) -> float:
        """The test accuracy after the last step of a run that is done."""
        return self.curve[self.facts["num_steps"]]

    @property
    def result(self) -> str:
        """How the run ended, in one line."""
        if self.status == "done":
            return f"{self.test_name} accuracy {self.accuracy:.2%}"
        return f"failed: {self.error}"

    def epoch(self, step: int) -> float:
        """Converts a step to epochs."""
        return step / self.facts["steps_per_epoch"]


class Comparison(NamedTuple):
    """All runs of a workdir."""

    info: dict[str, Any]  # content of `compare.json`
    runs: dict[str, list[SeedRun]]  # by setting, in the order of the seeds

    @property
    def metric(self) -> str:
        """Name of the compared metric, such as 'test accuracy', after the first setting's split."""
        first, *_ = self.info["settings"].values()
        return f"{first['test_name']} accuracy"

    def finished(self, setting: str | None) -> list[SeedRun]:
        """Returns the runs of a setting that are done.

        A baseline may be None, or a setting that is not in the comparison: it has no runs.
        """
        return [run for run in self.runs.get(setting, ()) if run.status == "done"]

    def accuracies(self, setting: str | None) -> dict[int, float]:
        """Returns the test accuracies of the finished runs of a setting, by seed."""
        return {run.seed: run.accuracy for run in self.finished(setting)}


def read_comparison(workdir: Path) -> Comparison:
    """Reads a comparison."""
    info = json.loads((workdir / GRID).read_text(encoding="utf-8"))
    runs = {
        setting: [SeedRun(workdir, setting, seed, facts) for seed in facts["seeds"]]
        for setting, facts in info["settings"].items()
    }
    return Comparison(info, runs)
