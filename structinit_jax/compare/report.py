"""Writes results.csv, report.md, report.html and curves.png from the files of a comparison."""

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from flax.traverse_util import flatten_dict

from structinit_jax.compare import grid, page, results
from structinit_jax.compare.results import Comparison, Interval
from structinit_jax.compare.table import percent
from structinit_jax.training import workdir as workdir_lib

# What settings are compared by, what the seeds and the folders of data are, and what does not
# matter.
NOT_TOLD = ("attention_init", "seed", "data.data_dir", "data.manual_dir", *grid.HARMLESS)


def write_report(workdir: Path) -> None:
    """Writes the files; reads only what the runs have written, so it can be repeated."""
    comparison = results.read(workdir)
    sections = describe(comparison)
    files = {
        "results.csv": csv_text(comparison),
        "report.md": markdown(sections),
        "report.html": page.html(comparison, sections),
    }
    if page.has_curves(comparison):
        files[page.CURVES] = page.draw_test_curves(comparison)
    for name, content in files.items():
        workdir_lib.write_atomically(workdir / name, content)
    print(f"wrote {', '.join(files)} to {workdir}")


def csv_text(comparison: Comparison) -> str:
    """Returns one row for each run."""
    rows = []
    for setting, runs in comparison.runs.items():
        for run in runs:
            steps = [*run.test_curve]
            last = steps[-1] if steps else 0
            best = max(run.test_curve, key=run.test_curve.get) if steps else None
            seconds = run.seconds(last)
            rows.append(
                {
                    "setting": setting,
                    "seed": run.seed,
                    "status": run.status,
                    "epoch": run.epoch(last),
                    "test_accuracy": run.test_curve.get(last),
                    "best_test_accuracy": run.test_curve.get(best),
                    "best_epoch": None if best is None else run.epoch(best),
                    "training_seconds": None if math.isnan(seconds) else seconds,
                    "init_seconds": run.init_metrics.get("seconds"),
                    "init_compile_seconds": run.init_metrics.get("compile_seconds"),
                    "baseline": comparison.info["baselines"][setting],
                    "published_percent": run.info["published"],
                    "error": run.error,
                }
            )
    file = io.StringIO()
    writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


# A title, then a table (its first row is the header), a list of lines of code, or a paragraph.
Section = tuple[str, list[list[str]] | list[str] | str]


def describe(comparison: Comparison) -> list[Section]:
    """Returns the content that report.md and report.html share."""
    info, runs = comparison.info, comparison.runs
    sizes = [len(group) for group in runs.values()]
    fewest, most = min(sizes), max(sizes)
    count = f"{most} {'seeds' if most > 1 else 'seed'}"
    averaged = any(facts["config"].get("ema_decay") for facts in info["settings"].values())
    notes = [
        "Accuracy after the last epoch in percent"
        f"{', of the averaged weights where config.ema_decay is set' if averaged else ''}: "
        f"mean ± standard deviation over {count if fewest == most else f'{fewest} to {count}'}.",
        "The difference to the baseline is paired by seed, with Student's 95 % interval, which "
        "covers the variation between seeds, not that between data sets.",
        "Epochs to the baseline: the first evaluation at which a run reaches the baseline's mean "
        "final accuracy, as a mean over the runs that reach it.",
        "Seconds are those of training steps, without evaluations, checkpoints and compilation; "
        "seeds that were trained together share the device.",
    ]
    if most == 1:
        notes[1] = "With one seed there is no interval: a difference may be chance."
    notes += _other_fields(info)
    settings = info["settings"].values()  # those of older files have no notes
    notes += dict.fromkeys(facts["note"] for facts in settings if facts.get("note"))
    sections: list[Section] = [("Results", _summary(comparison)), ("", " ".join(notes))]
    if any(facts.get("published_training") for facts in info["settings"].values()):
        sections.append(("Training accuracy, %: ours / published", _training(comparison)))
    every = [run for group in runs.values() for run in group]
    failures = [[run.setting, str(run.seed), run.error] for run in every if run.error]
    if failures:
        sections.append(("Failed runs", [["setting", "seed", "error"], *failures]))
    missing = sum(run.status == "unfinished" for run in every)
    if missing:
        sections.append(("Not finished", f"{missing} runs have not finished."))
    if info["commands"]:
        sections.append(("Commands", info["commands"]))
    alone = [
        f"{facts['command']} --config.seed=SEED --workdir=DIR"
        for facts in info["settings"].values()
        if facts["command"]
    ]
    if alone:
        sections.append(("Each setting alone", alone))
    versions = ", ".join(f"{name} {number}" for name, number in info["versions"].items())
    sections.append(("Machine and versions", f"{info['machine']}; {versions}"))
    return sections


def _other_fields(info) -> list[str]:
    """Lists fields that differ from the baseline's, such as those of an earlier command."""
    fields = {
        name: flatten_dict(facts["config"], sep=".") for name, facts in info["settings"].items()
    }
    names = {}
    for name, baseline in info["baselines"].items():
        if baseline not in fields:
            continue
        for field in sorted(fields[name].keys() | fields[baseline].keys()):
            own, other = (fields[setting].get(field) for setting in (name, baseline))
            if own != other and not field.startswith(NOT_TOLD) and f",{field}=" not in name:
                names.setdefault((field, repr(own), repr(other)), []).append(name)
    return [
        f"config.{field} is {own} for {'; '.join(group)}, but {other} for the baseline."
        for (field, own, other), group in names.items()
    ]


def _summary(comparison: Comparison) -> list[list[str]]:
    published = any(f["published"] is not None for f in comparison.info["settings"].values())
    rows = [
        [
            *("setting", "seeds", f"{comparison.metric}, %"),
            *(["published, %"] if published else []),
            *("difference to the baseline (95 %)", "epochs to the baseline"),
            *("training, s", "initialization, s (compilation)"),
        ]
    ]
    baselines = comparison.info["baselines"]
    several = len({*baselines.values()}) > 1
    for setting, runs in comparison.runs.items():
        accuracies = comparison.accuracies(setting)
        done = comparison.finished(setting)
        facts = comparison.info["settings"][setting]
        seconds = [run.seconds(facts["num_steps"]) for run in done]
        if setting == baselines[setting]:
            difference = "baseline"
        else:
            interval = comparison.difference(setting)
            pairs = len(accuracies.keys() & comparison.accuracies(baselines[setting]).keys())
            difference = format_interval(interval)
            difference += f" ({pairs} common seeds)" if 1 < pairs < len(runs) else ""
            difference += f" to {baselines[setting]}" if several and interval else ""
        figure = facts["published"]
        rows.append(
            [
                setting,
                f"{len(done)} of {len(runs)}",
                percent([*accuracies.values()]) if accuracies else "–",
                *([f"{figure:.2f}" if figure is not None else "–"] if published else []),
                difference,
                _epochs(comparison.epochs_to_baseline(setting)),
                f"{np.mean(seconds):.1f}" if seconds else "–",
                _init_cost([run.init_metrics for run in done]),
            ]
        )
    return rows


def _training(comparison: Comparison) -> list[list[str]]:
    """Returns the training accuracies (ours unaugmented) at the epochs of the published ones."""
    published = {
        setting: dict(facts["published_training"])
        for setting, facts in comparison.info["settings"].items()
        if facts.get("published_training")
    }
    epochs = sorted(set().union(*published.values()))
    rows = [["setting", *(f"epoch {epoch}" for epoch in epochs)]]
    for setting, figures in published.items():
        ours = [
            {round(run.epoch(step)): x for step, x in run.curve("train_eval/accuracy").items()}
            for run in comparison.runs[setting]
        ]
        rows.append([setting])
        for epoch in epochs:
            values = [curve[epoch] for curve in ours if epoch in curve]
            figure = f"{figures[epoch]:.2f}" if epoch in figures else "–"
            rows[-1].append(f"{percent(values) if values else '–'} / {figure}")
    return rows


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


def _init_cost(metrics: Sequence[dict[str, float]]) -> str:
    # The first run compiles, the others find the program in the cache.
    found = [values for values in metrics if values]
    if not found:
        return "–"
    seconds = np.mean([values["seconds"] for values in found])
    return f"{seconds:.2f} ({max(values['compile_seconds'] for values in found):.1f})"


def markdown(sections: Sequence[Section]) -> str:
    """Formats the sections as Markdown."""
    parts = ["# Comparison"]
    for title, content in sections:
        if title:
            parts.append(f"## {title}")
        if isinstance(content, str):
            parts.append(content)
        elif isinstance(content[0], str):
            parts.append("```bash\n" + "\n".join(content) + "\n```")
        else:
            header, *rows = [[cell.replace("|", r"\|") for cell in row] for row in content]
            lines = [header, ["---"] * len(header), *rows]
            parts.append("\n".join(f"| {' | '.join(row)} |" for row in lines))
    parts.append("Figures: curves.png and report.html. Every run: results.csv.")
    return "\n\n".join(parts) + "\n"
