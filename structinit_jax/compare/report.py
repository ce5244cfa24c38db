"""Reads the runs of a comparison from its workdir and writes the report.

`compare.json` holds the 'machine' and the 'settings' by name. The entry of a setting is what
`grid.describe_setting` returns, with 'seeds', 'baseline', 'published' accuracy and 'note'. Each run
has its own workdir, `SETTING/seed_K`. The report (results.csv, report.md and curves.png) needs only
these files, so it can be written again at any time.
"""

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict
from matplotlib.figure import Figure
from scipy import special

from structinit_jax.figures import COLORS, add_legend, png
from structinit_jax.files import csv_text, read_json, write_atomically
from structinit_jax.training.metrics import read_metrics
from structinit_jax.training.workdir import COMPARISON

# File of a run that is not done: empty, or the reason in one line if the run has failed.
ERROR = "error.txt"
CURVES = "curves.png"
DESCRIBED = ("data.name", "data.train_split", "data.eval_split", "data.data_dir")
LINES = ("-", "--", ":", "-.")  # a style for each pass through the colors

# -- runs ------------------------------------------------------------------------------------------


class SeedRun:
    """One seed of one setting, as far as it has been trained.

    `facts` is the setting's entry in `compare.json`.

    Attributes:
      folder: Workdir of the run.
      split: Split on which the run is evaluated.
      curve: Accuracy on this split, from 0 to 1, by step, up to the comparison's last step:
        `structinit_jax.main` may have trained the run for longer.
      error: Why the run failed, in one line.
      status: 'done', 'failed' or 'unfinished'. A run is done if it has the accuracy of the last
        step, and was not killed before the checkpoint of that step.
    """

    def __init__(self, workdir: Path, setting: str, seed: int, facts: Mapping[str, Any]):
        self.setting = setting
        self.seed = seed
        self.facts = facts
        self.folder = workdir / setting / f"seed_{seed}"
        self.split = facts["config"]["data"]["eval_split"]
        lines = read_metrics(self.folder / "metrics.jsonl", facts["num_steps"])
        self.curve: dict[int, float] = {
            line["step"]: line["eval/accuracy"] for line in lines if "eval/accuracy" in line
        }
        error = self.folder / ERROR
        self.error = error.read_text("utf-8").strip() if error.exists() else ""
        has_ended = self.folder.exists() and not error.exists()
        if has_ended and facts["num_steps"] not in self.curve:
            self.error = "metrics.jsonl has no result: if a retry does not help, delete the run"
        self.status = "done" if has_ended else "unfinished"
        if self.error:
            self.status = "failed"

    @property
    def accuracy(self) -> float:
        """The accuracy after the last step of a run that is done."""
        return self.curve[self.facts["num_steps"]]

    @property
    def result(self) -> str:
        """How the run ended, in one line."""
        if self.status == "done":
            return f"{self.split} accuracy {self.accuracy:.2%}"
        return f"failed: {self.error}"

    def epoch(self, step: int) -> float:
        """Converts a step to epochs."""
        return step / self.facts["steps_per_epoch"]


Runs = Mapping[str, Sequence[SeedRun]]  # by setting, in the order of the seeds


def read_comparison(workdir: Path) -> tuple[dict[str, Any], Runs]:
    """Returns the content of `compare.json`, and the runs of each setting by seed."""
    info = read_json(workdir / COMPARISON)
    runs = {
        setting: [SeedRun(workdir, setting, seed, facts) for seed in facts["seeds"]]
        for setting, facts in info["settings"].items()
    }
    return info, runs


def _metric(runs: Runs) -> str:
    """Returns the label for accuracies, which names their split if all have the same."""
    splits = {run.split for group in runs.values() for run in group}
    return f"{splits.pop()} accuracy, %" if len(splits) == 1 else "accuracy, %"


def _accuracies(runs: Iterable[SeedRun]) -> dict[int, float]:
    """Returns the accuracies of the runs that are done, by seed."""
    return {run.seed: run.accuracy for run in runs if run.status == "done"}


# -- text ------------------------------------------------------------------------------------------


def markdown(info: Mapping[str, Any], runs: Runs) -> str:
    """Returns the report in Markdown."""
    every = [run for group in runs.values() for run in group]
    interval = (
        "The difference from the baseline is paired by seed, with Student's 95 % interval, which "
        "covers the variation between seeds, not between data sets."
    )
    if len({run.seed for run in every}) == 1:
        interval = "With one seed there is no interval: a difference may be due to chance."
    parts = [
        "# Comparison",
        *_descriptions(info["settings"]),
        _table(_summary(info, runs)),
        "Accuracy after the last epoch in percent: mean ± standard deviation over seeds. "
        + interval,
        *_other_fields(info["settings"]),
        *(f"{name}: {fact['note']}" for name, fact in info["settings"].items() if fact["note"]),
        f"![Accuracy by epoch]({CURVES})",
    ]
    failures = [[run.setting, str(run.seed), run.error] for run in every if run.status == "failed"]
    if failures:
        parts += ["## Failed runs", _table([["setting", "seed", "error"], *failures])]
    parts += ["## Machine and versions", info["machine"], "results.csv lists every run."]
    return "\n\n".join(parts) + "\n"


def _group(values: Mapping[str, str]) -> dict[str, str]:
    """Returns the names of the settings that have each value, as text."""
    groups: dict[str, list[str]] = {}
    for name, value in values.items():
        groups.setdefault(value, []).append(name)
    return {value: "; ".join(names) for value, names in groups.items()}


def _descriptions(settings) -> list[str]:
    """Describes what settings train on, and for how long."""
    texts = {}
    for name, facts in settings.items():
        data = facts["config"]["data"]
        epochs = facts["num_steps"] / facts["steps_per_epoch"]
        texts[name] = (
            f"{facts['config']['model']['name']} on {facts['num_examples']:,} examples of "
            f"{data['name']} {data['train_split']}, {epochs:.4g} epochs, evaluated on "
            f"{data['eval_split']}"
        )
    groups = _group(texts)
    return list(groups) if len(groups) == 1 else [f"{n}: {text}" for text, n in groups.items()]


def _other_fields(settings) -> list[str]:
    """Lists the fields in which settings differ, and their options, that no name shows."""
    configs = {name: flatten_dict(facts["config"], sep=".") for name, facts in settings.items()}
    lines = []
    for field in sorted(set().union(*configs.values()) - {"seed", "attention_init.name"}):
        unnamed = {
            name: json.dumps(config[field])
            for name, config in configs.items()
            if field in config and f"{field}=" not in name
        }
        groups = _group(unnamed)
        is_option = groups and field.startswith("attention_init.")
        if field not in DESCRIBED and (len(groups) > 1 or is_option):
            lines.append(f"- {field}: {', '.join(f'{v} ({names})' for v, names in groups.items())}")
    return ["\n".join(["Other fields:\n", *lines])] if lines else []


def _table(rows: list[list[str]]) -> str:
    header, *rows = [[cell.replace("|", r"\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *rows])


def _summary(info, runs) -> list[list[str]]:
    """Returns a header, and a row for each setting."""
    published = {name: facts["published"] for name, facts in info["settings"].items()}
    baselines = {name: facts["baseline"] for name, facts in info["settings"].items()}
    rows = [["setting", "seeds", _metric(runs), "difference from the baseline (95 %)"]]
    for setting, group in runs.items():
        percent = [100 * accuracy for accuracy in _accuracies(group).values()]
        text = f"{np.mean(percent):.2f}" if percent else "–"
        if len(percent) > 1:
            text += f" ± {np.std(percent, ddof=1):.2f}"
        seeds = f"{len(percent)} of {len(group)}"
        rows.append([setting, seeds, text, _difference(baselines, runs, setting)])
    if any(published.values()):
        for row, value in zip(rows, ["published, %", *published.values()], strict=True):
            row.insert(3, value or "–")
    return rows


def _difference(baselines, runs, setting) -> str:
    """Formats the difference from the baseline in percentage points, '+1.20 [+0.40, +2.00]'."""
    baseline = baselines[setting]
    if baseline == setting:
        return "baseline"
    own = _accuracies(runs[setting])
    other = _accuracies(runs.get(baseline, ()))  # the baseline may be None or not trained
    differences = [100 * (own[seed] - other[seed]) for seed in own if seed in other]
    pairs = len(differences)
    if not pairs:
        return "–"
    mean = np.mean(differences)
    if pairs == 1:
        text = f"{mean:+.2f} (one seed)"
    else:
        half = half_interval(differences)
        text = f"{mean:+.2f} [{mean - half:+.2f}, {mean + half:+.2f}]"
    text += f" ({pairs} common seeds)" if 1 < pairs < len(runs[setting]) else ""
    return f"{text} vs. {baseline}" if len({*baselines.values()} - {None}) > 1 else text


def half_interval(values: Sequence[float]) -> float:
    """Returns half of Student's 95 % interval for the mean of two or more normal values."""
    n = len(values)
    return float(special.stdtrit(n - 1, 0.975) * np.std(values, ddof=1) / math.sqrt(n))


# -- files -----------------------------------------------------------------------------------------


def write_report(workdir: Path) -> None:
    """Writes the files of the report."""
    info, runs = read_comparison(workdir)
    files: dict[str, str | bytes] = {
        "results.csv": csv_of(runs),
        "report.md": markdown(info, runs),
        CURVES: png(draw_curves(runs)),
    }
    for name, content in files.items():
        write_atomically(workdir / name, content)
    print(f"wrote {', '.join(files)} to {workdir}", flush=True)


def csv_of(runs: Runs) -> str:
    """Returns the text of results.csv, which has one row for each run."""
    header = ["setting", "seed", "status", "epoch", "accuracy", "baseline", "published", "error"]
    rows = []
    for run in itertools.chain.from_iterable(runs.values()):
        last = max(run.curve, default=0)
        measured = [run.status, run.epoch(last), run.curve.get(last)]
        facts = [run.facts["baseline"], run.facts["published"]]
        rows.append([run.setting, run.seed, *measured, *facts, run.error])
    return csv_text(header, rows)


def draw_curves(runs: Runs) -> Figure:
    """Draws the accuracy by epoch of the settings with finished runs.

    Lines are means over the finished seeds, bands one standard deviation on either side.
    """
    figure = Figure(figsize=(7, 3.9), layout="constrained")
    axis = figure.subplots()
    for number, (setting, group) in enumerate(runs.items()):
        done = [run for run in group if run.status == "done"]
        if not done:
            continue
        # `structinit_jax.main` may have evaluated some runs at other steps, too.
        steps = sorted(set.intersection(*(set(run.curve) for run in done)))
        curves = 100 * np.array([[run.curve[step] for step in steps] for run in done])
        epochs = [done[0].epoch(step) for step in steps]
        mean = curves.mean(axis=0)
        color = COLORS[number % len(COLORS)]
        line = LINES[number // len(COLORS) % len(LINES)]
        axis.plot(epochs, mean, color=color, linestyle=line, marker=".", label=setting)
        if len(done) > 1:
            deviation = curves.std(axis=0, ddof=1)
            band = mean - deviation, mean + deviation
            axis.fill_between(epochs, *band, alpha=0.15, color=color, linewidth=0)
    axis.set(xlabel="epoch", ylabel=_metric(runs))
    axis.grid(alpha=0.25)
    add_legend(figure, axis)
    return figure
