"""Writes the report of a comparison.

The report is results.csv, report.md and curves.png. It needs only the files that the runs have
written, so it can be repeated.
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from scipy import special

from structinit_jax.analysis.figures import COLORS, add_legend
from structinit_jax.compare.records import Comparison, read_comparison
from structinit_jax.files import write_atomically
from structinit_jax.training.figures import csv_text, png

CURVES = "curves.png"
LINES = ("-", "--", ":", "-.")  # a style for each pass through the colors

# -- text ------------------------------------------------------------------------------------------


def markdown(comparison: Comparison) -> str:
    """Returns the report in Markdown."""
    info = comparison.info
    runs = comparison.runs
    every = [run for group in runs.values() for run in group]
    interval = (
        "The difference to the baseline is paired by seed, with Student's 95 % interval, which "
        "covers the variation between seeds, not between data sets."
    )
    if len({run.seed for run in every}) == 1:
        interval = "With one seed there is no interval: a difference may be chance."
    parts = [
        "# Comparison",
        _table(_summary(comparison)),
        "Accuracy after the last epoch in percent: mean ± standard deviation over seeds. "
        + interval,
        *(f"{name}: {fact['note']}" for name, fact in info["settings"].items() if fact.get("note")),
    ]
    if any(run.status == "done" for run in every):
        parts.append(f"![Accuracy by epoch]({CURVES})")
    failures = [[run.setting, str(run.seed), run.error] for run in every if run.status == "failed"]
    if failures:
        parts += ["## Failed runs", _table([["setting", "seed", "error"], *failures])]
    parts += ["## Machine and versions", info["machine"], "Every run: results.csv."]
    return "\n\n".join(parts) + "\n"


def _table(rows: list[list[str]]) -> str:
    header, *rows = [[cell.replace("|", r"\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *rows])


def _summary(comparison: Comparison) -> list[list[str]]:
    published = {name: fact["published"] for name, fact in comparison.info["settings"].items()}
    rows = [["setting", "seeds", f"{comparison.metric}, %", "difference to the baseline (95 %)"]]
    for setting, runs in comparison.runs.items():
        seeds = f"{len(comparison.finished(setting))} of {len(runs)}"
        accuracy = _format_percent(comparison.accuracies(setting).values())
        rows.append([setting, seeds, accuracy, _format_difference(comparison, setting)])
    if any(published.values()):
        for row, value in zip(rows, ["published, %", *published.values()], strict=True):
            row.insert(3, value or "–")
    return rows


def _format_percent(accuracies: Iterable[float]) -> str:
    percent = [100 * accuracy for accuracy in accuracies]
    if not percent:
        return "–"
    deviation = f" ± {np.std(percent, ddof=1):.2f}" if len(percent) > 1 else ""
    return f"{np.mean(percent):.2f}{deviation}"


def _format_difference(comparison: Comparison, setting: str) -> str:
    """Formats the difference to the baseline in percentage points, '+1.20 [+0.40, +2.00]'."""
    baselines = comparison.info["baselines"]
    if (baseline := baselines.get(setting)) == setting:
        return "baseline"
    own = comparison.accuracies(setting)
    other = comparison.accuracies(baseline)
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
    text += f" ({pairs} common seeds)" if 1 < pairs < len(comparison.runs[setting]) else ""
    return f"{text} to {baseline}" if len({*baselines.values()}) > 1 else text


def half_interval(values: Sequence[float]) -> float:
    """Returns half of Student's 95 % interval of the mean of two or more normal values."""
    n = len(values)
    return float(special.stdtrit(n - 1, 0.975) * np.std(values, ddof=1) / math.sqrt(n))


# -- files -----------------------------------------------------------------------------------------


def write_report(workdir: Path) -> None:
    """Writes the files of the report."""
    comparison = read_comparison(workdir)
    files: dict[str, str | bytes] = {
        "results.csv": csv_of(comparison),
        "report.md": markdown(comparison),
    }
    if figure := draw_curves(comparison):
        files[CURVES] = png(figure)
    for name, content in files.items():
        write_atomically(workdir / name, content)
    print(f"wrote {', '.join(files)} to {workdir}", flush=True)


def csv_of(comparison: Comparison) -> str:
    """Returns the text of results.csv, which has one row for each run."""
    header = ["setting", "seed", "status", "epoch", "test_accuracy"]
    header += ["baseline", "published", "error"]
    rows = []
    for setting, runs in comparison.runs.items():
        baseline = comparison.info["baselines"].get(setting)
        for run in runs:
            last = max(run.curve, default=0)
            measured = [run.status, run.epoch(last), run.curve.get(last)]
            rows.append([setting, run.seed, *measured, baseline, run.facts["published"], run.error])
    return csv_text(header, rows)


def draw_curves(comparison: Comparison) -> Figure | None:
    """Draws the test accuracy by epoch; None if no run has finished.

    Lines are means over the finished seeds, bands one standard deviation on either side.
    """
    finished = {name: comparison.finished(name) for name in comparison.runs}
    if not any(finished.values()):
        return None
    figure = Figure(figsize=(7, 3.9), layout="constrained")
    axis = figure.subplots()
    for number, (setting, runs) in enumerate(finished.items()):
        if not runs:
            continue
        # `structinit_jax.main` may have evaluated some of them at other steps, too.
        steps = sorted(set.intersection(*(set(run.curve) for run in runs)))
        curves = 100 * np.array([[run.curve[step] for step in steps] for run in runs])
        epochs = [runs[0].epoch(step) for step in steps]
        mean = curves.mean(axis=0)
        color = COLORS[number % len(COLORS)]
        line = LINES[number // len(COLORS) % len(LINES)]
        axis.plot(epochs, mean, color=color, linestyle=line, marker=".", label=setting)
        if len(runs) > 1:
            deviation = curves.std(axis=0, ddof=1)
            band = mean - deviation, mean + deviation
            axis.fill_between(epochs, *band, alpha=0.15, color=color, linewidth=0)
    axis.set(xlabel="epoch", ylabel=f"{comparison.metric}, %")
    axis.grid(alpha=0.25)
    add_legend(figure, *axis.get_legend_handles_labels())
    return figure
