"""Draws training curves, and writes the accuracy of each class."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath
from jaxtyping import Int
from matplotlib.figure import Figure

from structinit_jax.errors import printable
from structinit_jax.files import write_atomically

COLORS = {"train": "#0072b2", "eval": "#d55e00"}


def draw_curves(lines: Iterable[Mapping[str, Any]]) -> Figure:
    """Draws loss, accuracy and learning rate by step, given the lines of `metrics.jsonl`."""
    lines = list(lines)
    figure = Figure(figsize=(12, 3.4), layout="constrained")
    panels = ("loss", "accuracy", "learning_rate")
    for axis, name in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for part, color in COLORS.items():
            key = f"{part}/{name}"
            points = [(line["step"], line[key]) for line in lines if key in line]
            if points:
                steps, values = np.array(points, float).T  # None stands for NaN and leaves a gap
                marker = "." if part == "eval" else ""
                axis.plot(steps, values, color=color, marker=marker, label=part)
        axis.set(xlabel="step", title=name.replace("_", " "))
        axis.grid(alpha=0.25)
        if axis.get_lines() and name != "learning_rate":
            axis.legend()
    return figure


def write_by_class(
    folder: epath.PathLike,
    labels: Int[np.ndarray, " n"],
    predicted: Int[np.ndarray, " n"],
    class_names: Sequence[str],
) -> epath.Path:
    """Writes the accuracy of each class to `per_class.csv`, and returns the path.

    `labels` and `predicted` are the true and predicted classes of all examples.
    """
    counts = np.bincount(labels, minlength=len(class_names))
    correct = np.bincount(labels[labels == predicted], minlength=len(class_names))
    rows = [
        # Class names can be folder names, which are not always valid text.
        [printable(name), n, k, k / n if n else ""]
        for name, n, k in zip(class_names, counts, correct, strict=True)
    ]
    path = epath.Path(folder) / "per_class.csv"
    write_atomically(path, csv_text(["class", "examples", "correct", "accuracy"], rows))
    return path


def png(figure: Figure) -> bytes:
    """Returns a figure as the content of a PNG file."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150)
    return file.getvalue()


def csv_text(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Returns a table as the content of a CSV file."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([header, *rows])
    return file.getvalue()
