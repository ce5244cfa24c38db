"""The runs of a comparison, as its workdir records them.

`compare.json` has the 'machine', by setting the 'baselines', and as 'settings' by name what
`grid.describe_setting` returns, with the 'seeds', the 'published' accuracy and the 'note'. Each run
is a workdir of its own, `SETTING/seed_K`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from structinit_jax.files import read_json
from structinit_jax.training.metrics import read_metrics

GRID = "compare.json"
ERROR = "error.txt"  # of a run that failed: why, in one line
# Fields that change the results by rounding at most; data have digests of their contents.
HARMLESS = (
    "checkpoint_every_steps",
    "keep_checkpoints",
    "log_every_steps",
    "fsdp",
    "data.data_dir",
    "model.remat",
)


def matters(field: str) -> bool:
    """Whether the results of a setting depend on a field, the seed aside."""
    return field != "seed" and field not in HARMLESS


class SeedRun:
    """One seed of one setting, as far as it has been trained.

    `facts` is the entry of its setting in `compare.json`.

    Attributes:
      folder: Workdir of the run.
      curve: The test accuracy by step, from 0 to 1, up to the last step of the comparison:
        `structinit_jax.main` may have trained the run longer.
      error: Why the run failed, in one line.
      status: 'done', 'failed' or 'unfinished'. A run is done if it has the accuracy of the last
        step.
    """

    def __init__(self, workdir: Path, setting: str, seed: int, facts: Mapping[str, Any]):
        self.setting = setting
        self.seed = seed
        self.facts = facts
        self.folder = workdir / setting / f"seed_{seed}"
        lines = read_metrics(self.folder / "metrics.jsonl", facts["num_steps"])
        self.curve: dict[int, float] = {
            line["step"]: line["eval/accuracy"] for line in lines if "eval/accuracy" in line
        }
        error = self.folder / ERROR
        self.error = error.read_text().strip() if error.exists() else ""
        self.status = "done" if facts["num_steps"] in self.curve else "unfinished"
        if self.error:
            self.status = "failed"

    @property
    def accuracy(self) -> float:
        """The test accuracy after the last step of a run that is done."""
        return self.curve[self.facts["num_steps"]]

    @property
    def result(self) -> str:
        """How the run ended, in one line."""
        if self.status == "done":
            return f"{self.facts['test_name']} accuracy {self.accuracy:.2%}"
        # A run with all of its checkpoints trains no more, and writes no metrics.
        lost = f"no result in {self.folder / 'metrics.jsonl'}: delete its folder"
        return f"failed: {self.error or lost}"

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
    """Reads a comparison; raises `InputError` if its `compare.json` is damaged."""
    info = read_json(workdir / GRID)
    runs = {
        setting: [SeedRun(workdir, setting, seed, facts) for seed in facts["seeds"]]
        for setting, facts in info["settings"].items()
    }
    return Comparison(info, runs)
