"""Reads the runs of a comparison, computes statistics over seeds, and writes the report.

The report is results.csv, report.md, curves.png and report.html, which holds the other two. It
needs only the files that the runs have written, so it can be repeated.
"""

import base64
import csv
import functools
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict
from markdown_it import MarkdownIt
from scipy import stats

from structinit_jax.analysis.figures import COLORS, add_legend, import_pyplot
from structinit_jax.errors import InputError
from structinit_jax.evaluate import deciding_accuracy
from structinit_jax.training.metrics import read_lines
from structinit_jax.training.workdir import write_atomically

GRID = "compare.json"
STATUS = "status.json"
CURVES = "curves.png"
FORMAT = 2  # of compare.json; those of earlier versions have none
CONFIDENCE = 0.95
LINES = ("-", "--", ":", "-.")  # a style for each pass through the colors
TOLERANCE = 1e-9  # of accuracies: the mean of equal ones may be rounded up
# Fields that change the results by rounding at most; the content of data is compared by digests.
HARMLESS = (
    *("checkpoint_every_steps", "keep_checkpoints", "fsdp", "data.data_dir", "data.manual_dir"),
    *("model.attention_implementation", "model.remat", "model.unroll"),
)
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; display: block;
        overflow-x: auto }
th, td { text-align: left; padding: .3em .9em .3em 0; border-bottom: 1px solid #ccc }
pre { background: #f4f4f4; padding: 1em; overflow-x: auto }
img { max-width: 100% }
"""

# -- runs ------------------------------------------------------------------------------------------


class SeedRun:
    """One seed of one setting, as far as it has been trained.

    A run is done if it was recorded as such and `metrics.jsonl` has the accuracy of its last step.
    It has failed if it ended with an error or if most of its steps were not finite.

    Attributes:
      setting: Name of the setting.
      seed: The seed.
      folder: Its workdir.
      status: 'done', 'failed' or 'unfinished'.
      error: Why the run failed, in one line.
      lines: The lines of its `metrics.jsonl` up to the last step of the comparison:
        `structinit_jax.main` may have trained the run longer.
      nonfinite_steps: Number of steps whose loss or gradient was not finite.
      info: Entry of its setting in `compare.json`.
    """

    def __init__(self, workdir: Path, setting: str, seed: int, grid: Mapping[str, Any]):
        self.setting, self.seed, self.info = setting, seed, grid["settings"][setting]
        self.folder = workdir / setting / f"seed_{seed}"
        num_steps, path = self.info["num_steps"], self.folder / "metrics.jsonl"
        lines = read_lines(path, num_steps) if path.exists() else []
        self.lines: list[dict[str, float]] = [json.loads(line) for line in lines]
        self.nonfinite_steps = sum(line.get("train/nonfinite_steps", 0) for line in self.lines)
        status = _read_status(self.folder / STATUS)
        self.status, self.error = status.get("status", "unfinished"), status.get("error", "")
        if self.status == "done" and num_steps not in self.test_curve:
            self.status = "unfinished"  # its metrics have been lost
        elif self.status == "done" and 2 * self.nonfinite_steps > num_steps:
            self.status = "failed"
            self.error = f"diverged: {self.nonfinite_steps} of {num_steps} steps were not finite"

    def curve(self, name: str) -> dict[int, float]:
        """Returns a metric by step; accuracies are those that determine the best checkpoint."""
        split, _, kind = name.rpartition("/")
        lines = [line for line in self.lines if line.get(name) is not None]
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
        return self.test_curve[self.info["num_steps"]] if self.status == "done" else None

    def epoch(self, step: int) -> float:
        """Converts a step to epochs."""
        return step / self.info["steps_per_epoch"]

    @property
    def seconds(self) -> float | None:
        """Time spent in training steps, without evaluations, checkpoints and compilation."""
        speeds = self.curve("images_per_second")
        images = np.diff([0, *speeds]) * self.info["config"]["batch_size"]
        return float(np.sum(images / [*speeds.values()])) if speeds else None

    def first_epoch(self, accuracy: float) -> float | None:
        """Returns the epoch of the first evaluation that reaches an accuracy."""
        goal = accuracy - TOLERANCE
        reached = (step for step, value in self.test_curve.items() if value >= goal)
        return next(map(self.epoch, reached), None)


class Comparison(NamedTuple):
    """All runs of a workdir.

    Attributes:
      info: Content of `compare.json`.
      runs: By setting, in the order of the seeds.
    """

    info: dict[str, Any]
    runs: dict[str, list[SeedRun]]

    @property
    def metric(self) -> str:
        """What is compared, such as 'test accuracy', named after the split."""
        names = {facts["test_name"] for facts in self.info["settings"].values()}
        return f"{names.pop()} accuracy" if len(names) == 1 else "accuracy"

    def finished(self, setting: str | None) -> list[SeedRun]:
        """Returns the runs of a setting that are done; a baseline need not be a setting."""
        return [run for run in self.runs.get(setting, ()) if run.status == "done"]

    def accuracies(self, setting: str | None) -> dict[int, float]:
        """Returns the test accuracies of the finished runs of a setting, by seed."""
        return {run.seed: run.accuracy for run in self.finished(setting)}

    def epochs_to_baseline(self, setting: str) -> list[float | None]:
        """Returns when each finished run reaches the baseline's mean final accuracy, if it does."""
        finals = [*self.accuracies(self.info["baselines"][setting]).values()]
        runs = self.finished(setting) if finals else []
        return [run.first_epoch(float(np.mean(finals))) for run in runs]


def read(workdir: Path) -> Comparison:
    """Reads a comparison; raises `InputError` if there is none."""
    info = read_grid(workdir)
    if info is None:
        raise InputError(f"--workdir={workdir} holds no comparison: there is no {GRID}")
    runs = {
        setting: [SeedRun(workdir, setting, seed, info) for seed in facts["seeds"]]
        for setting, facts in info["settings"].items()
    }
    return Comparison(info, runs)


def read_grid(workdir: Path) -> dict[str, Any] | None:
    """Returns the content of `compare.json`, or None if there is no such file.

    Raises:
      InputError: The file is damaged, or of an earlier version of this package.
    """
    path = workdir / GRID
    if not path.exists():
        return None
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
        version = info.get("format", 1)
    except (ValueError, AttributeError) as error:
        raise InputError(f"{path} is damaged ({error}): use another --workdir") from error
    if version != FORMAT:
        raise InputError(
            f"{path} has format {version}, but this version of the package needs {FORMAT}: "
            "use another --workdir"
        )
    return info


def _read_status(path: Path) -> dict[str, str]:
    """Returns how a run ended; nothing if that was not recorded, or if a crash cut the file."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


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


# -- text ------------------------------------------------------------------------------------------


def markdown(comparison: Comparison) -> str:
    """Returns the report in Markdown."""
    info, runs = comparison.info, comparison.runs
    sizes = {len(group) for group in runs.values()}
    count = " to ".join(map(str, sorted({min(sizes), max(sizes)})))
    notes = [
        f"Accuracy after the last epoch in percent: mean ± standard deviation over {count} "
        f"{'seeds' if max(sizes) > 1 else 'seed'}. "
        + (
            "The difference to the baseline is paired by seed, with Student's 95 % interval, which "
            "covers the variation between seeds, not between data sets."
            if max(sizes) > 1
            else "With one seed there is no interval: a difference may be chance."
        ),
        "Epochs to the baseline: the first evaluation at which a run reaches the baseline's mean "
        "final accuracy, averaged over the runs that reach it. Seconds are spent in training "
        "steps, without evaluations, checkpoints and compilation.",
        *_other_fields(info),
        *dict.fromkeys(facts["note"] for facts in info["settings"].values() if facts["note"]),
    ]
    if any(facts["config"].get("ema_decay") for facts in info["settings"].values()):
        notes.append("Settings with config.ema_decay are evaluated with the averaged weights.")
    parts = ["# Comparison", _table(_summary(comparison)), *notes]
    if any(comparison.finished(setting) for setting in runs):
        parts.append(f"![Accuracy by epoch]({CURVES})")
    every = [run for group in runs.values() for run in group]
    failures = [[run.setting, str(run.seed), run.error] for run in every if run.status == "failed"]
    if failures:
        parts += ["## Failed runs", _table([["setting", "seed", "error"], *failures])]
    if missing := sum(run.status == "unfinished" for run in every):
        parts += ["## Not finished", f"{missing} runs have not finished."]
    if info["commands"]:
        parts += ["## Commands", "```bash\n" + "\n".join(info["commands"]) + "\n```"]
    parts += ["## Machine and versions", info["machine"], "Every run: results.csv."]
    return "\n\n".join(parts) + "\n"


def _table(rows: list[list[str]]) -> str:
    header, *rows = [[cell.replace("|", r"\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *rows])


def _summary(comparison: Comparison) -> list[list[str]]:
    facts, baselines = comparison.info["settings"], comparison.info["baselines"]
    published = any(fact["published"] for fact in facts.values())
    header = ["setting", "seeds", f"{comparison.metric}, %"]
    header += ["published, %"] if published else []
    header += ["difference to the baseline (95 %)", "epochs to the baseline", "training, s"]
    rows = [header]
    for setting, runs in comparison.runs.items():
        done = comparison.finished(setting)
        seconds = [run.seconds for run in done if run.seconds is not None]
        rows.append([setting, f"{len(done)} of {len(runs)}", _accuracy(done)])
        rows[-1] += [facts[setting]["published"] or "–"] if published else []
        rows[-1] += [
            _difference(comparison, setting, several=len({*baselines.values()}) > 1),
            _epochs(comparison.epochs_to_baseline(setting)),
            f"{np.mean(seconds):.1f}" if seconds else "–",
        ]
    return rows


def _accuracy(runs: Sequence[SeedRun]) -> str:
    """Formats the accuracies of finished runs, with the number of steps that were not finite."""
    if not runs:
        return "–"
    text, bad = percent([run.accuracy for run in runs]), sum(run.nonfinite_steps for run in runs)
    steps = sum(run.info["num_steps"] for run in runs)
    return f"{text} ({bad} of {steps} steps were not finite)" if bad else text


def _difference(comparison: Comparison, setting: str, several: bool) -> str:
    baseline = comparison.info["baselines"][setting]
    if baseline == setting:
        return "baseline"
    accuracies, others = comparison.accuracies(setting), comparison.accuracies(baseline)
    interval = paired_difference(accuracies, others)
    pairs = len(accuracies.keys() & others.keys())
    text = format_interval(interval)
    text += f" ({pairs} common seeds)" if 1 < pairs < len(comparison.runs[setting]) else ""
    return f"{text} to {baseline}" if several and interval else text


def _other_fields(info: Mapping[str, Any]) -> list[str]:
    """Describes fields that differ from those of the baseline and are not in the name."""
    fields = {
        name: {
            field: value
            for field, value in flatten_dict(facts["config"], sep=".").items()
            if not field.startswith(("attention_init", *HARMLESS))
        }
        for name, facts in info["settings"].items()
    }
    names: dict[tuple[str, str, str], list[str]] = {}
    for name, baseline in info["baselines"].items():
        others = fields.get(baseline, fields[name])  # a baseline need not be a setting
        for field in sorted(fields[name].keys() | others.keys()):
            own, other = fields[name].get(field), others.get(field)
            if own != other and f",{field}=" not in name:
                names.setdefault((field, repr(own), repr(other)), []).append(name)
    return [
        f"config.{field} is {own} for {'; '.join(group)}, but {other} for the baseline."
        for (field, own, other), group in names.items()
    ]


def percent(accuracies: Sequence[float]) -> str:
    """Formats accuracies from 0 to 1 as mean and standard deviation in percent."""
    mean, deviation = mean_and_deviation([100 * value for value in accuracies])
    return f"{mean:.2f}" if deviation is None else f"{mean:.2f} ± {deviation:.2f}"


def format_interval(interval: Interval | None) -> str:
    """Formats a difference of accuracies in percentage points, '+1.20 [+0.40, +2.00]'."""
    if interval is None:
        return "–"
    if interval.low is None:
        return f"{100 * interval.mean:+.2f} (one seed)"
    mean, low, high = (f"{100 * x:+.2f}" for x in interval)
    return f"{mean} [{low}, {high}]"


def _epochs(values: Sequence[float | None]) -> str:
    reached = [value for value in values if value is not None]
    if not reached:
        return "not reached" if values else "–"
    text = f"{np.mean(reached):.1f}"
    return text if len(reached) == len(values) else f"{text} ({len(reached)} of {len(values)} runs)"


# -- files -----------------------------------------------------------------------------------------


def write_report(workdir: Path) -> None:
    """Writes the files of the report."""
    comparison = read(workdir)
    text, curves = markdown(comparison), draw_curves(comparison)
    files: dict[str, str | bytes] = {"results.csv": csv_text(comparison), "report.md": text}
    files |= {CURVES: curves} if curves else {}
    files["report.html"] = html(text, curves)
    for name, content in files.items():
        if isinstance(content, str):  # names of files in commands need not be text
            content = content.encode("utf-8", "backslashreplace")
        write_atomically(workdir / name, content)
    print(f"wrote {', '.join(files)} to {workdir}", flush=True)


def csv_text(comparison: Comparison) -> str:
    """Returns one row for each run."""
    rows = []
    for setting, runs in comparison.runs.items():
        for run in runs:
            last = max(run.test_curve, default=0)
            rows.append(
                {
                    "setting": setting,
                    "seed": run.seed,
                    "status": run.status,
                    "epoch": run.epoch(last),
                    "test_accuracy": run.test_curve.get(last),
                    "best_test_accuracy": max(run.test_curve.values(), default=None),
                    "nonfinite_steps": run.nonfinite_steps,
                    "training_seconds": run.seconds,
                    "init_seconds": run.curve("init/seconds").get(0),
                    "baseline": comparison.info["baselines"][setting],
                    "published": run.info["published"],
                    "error": run.error,
                }
            )
    file = io.StringIO()
    writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def draw_curves(comparison: Comparison) -> bytes | None:
    """Draws the test accuracy by epoch as a PNG; None if no run has finished.

    Lines are means over the finished seeds, bands one standard deviation on either side.
    """
    plt = import_pyplot()
    figure, axis = plt.subplots(figsize=(7, 3.9), layout="constrained")
    for number, setting in enumerate(comparison.runs):
        runs = comparison.finished(setting)
        # The steps at which all of them were evaluated; a point alone needs a marker.
        steps = sorted(set.intersection(*(set(run.test_curve) for run in runs))) if runs else []
        if not steps:
            continue
        values = 100 * np.array([[run.test_curve[step] for step in steps] for run in runs])
        epochs, mean = [runs[0].epoch(step) for step in steps], values.mean(axis=0)
        color = COLORS[number % len(COLORS)]
        line = LINES[number // len(COLORS) % len(LINES)]
        marker = "o" if len(steps) == 1 else None
        axis.plot(epochs, mean, color=color, linestyle=line, marker=marker, label=setting)
        if len(runs) > 1:
            deviation = values.std(axis=0, ddof=1)
            band = mean - deviation, mean + deviation
            axis.fill_between(epochs, *band, alpha=0.15, color=color, linewidth=0)
    axis.set(xlabel="epoch", ylabel=f"{comparison.metric}, %")
    axis.grid(alpha=0.25)
    handles, labels = axis.get_legend_handles_labels()
    file = io.BytesIO()
    if handles:
        add_legend(figure, handles, labels)
        figure.savefig(file, format="png", dpi=150)
    plt.close(figure)
    return file.getvalue() or None


def html(text: str, curves: bytes | None) -> str:
    """Renders the report as a page that needs neither a network nor other files."""
    body = MarkdownIt("js-default").render(text)  # escapes HTML in names and errors
    if curves:
        data = f"data:image/png;base64,{base64.b64encode(curves).decode()}"
        body = body.replace(f'src="{CURVES}"', f'src="{data}"')
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>Comparison</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}</body>\n"
        "</html>\n"
    )
