"""Draws the course of a run, and writes the results of an evaluation by class."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath
from jaxtyping import Int
from matplotlib.figure import Figure
from PIL import Image

from structinit_jax.errors import printable
from structinit_jax.files import write_atomically

COLORS = {"train": "#0072b2", "eval": "#d55e00"}
MAX_NAMED_CLASSES = 30  # more names and counts would overlap
MAX_CONFUSED_CLASSES = 1000  # with more, a confusion matrix would be too large to be of use


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
                steps, values = np.array(points, float).T  # None, for NaN, leaves a gap
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
) -> list[str]:
    """Writes the accuracy of each class and the confusion matrix, and returns the files' names.

    `labels` and `predicted` are classes of examples; a label that is no class does not count.
    `per_class.csv` has a row for each class. In `confusion.csv` and `confusion.png` rows are true
    classes and columns predicted ones; more than 1,000 classes get neither.
    """
    class_names = list(map(printable, class_names))  # of folders, whose names need not be text
    num_classes = len(class_names)
    known = (labels >= 0) & (labels < num_classes)
    labels = labels[known]
    predicted = predicted[known]
    counts = np.bincount(labels, minlength=num_classes)
    correct = np.bincount(labels[labels == predicted], minlength=num_classes)
    rows = [
        [name, n, k, k / n if n else ""]
        for name, n, k in zip(class_names, counts, correct, strict=True)
    ]
    files = {"per_class.csv": csv_text(["class", "examples", "correct", "accuracy"], rows)}
    if num_classes <= MAX_CONFUSED_CLASSES:
        pairs = np.bincount(labels * num_classes + predicted, minlength=num_classes**2)
        confusion = pairs.reshape(num_classes, num_classes)
        rows = [[name, *row] for name, row in zip(class_names, confusion.tolist(), strict=True)]
        files["confusion.csv"] = csv_text(["true class", *class_names], rows)
        files["confusion.png"] = png(draw_confusion(confusion, class_names))
    for name, content in files.items():
        write_atomically(epath.Path(folder) / name, content)
    return list(files)


def draw_confusion(counts: Int[np.ndarray, "C C"], class_names: Sequence[str]) -> Figure:
    """Draws the share of each true class, by row, that is predicted as each class, by column."""
    num_classes = len(class_names)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    named = num_classes <= MAX_NAMED_CLASSES
    side = 3 + 0.34 * num_classes if named else 8
    figure = Figure(figsize=(side + 0.6, side), layout="constrained")
    axis = figure.subplots()
    image = axis.imshow(shares, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    figure.colorbar(image, label="share of the true class", shrink=0.8)
    axis.set(xlabel="predicted class", ylabel="true class")
    if named:
        names = [name[:24] for name in class_names]
        # A name is not markup, even with dollar signs.
        axis.set_xticks(range(num_classes), names, rotation=90, parse_math=False)
        axis.set_yticks(range(num_classes), names, parse_math=False)
        for row, column in np.argwhere(counts):
            color = "white" if shares[row, column] > 0.5 else "black"
            place = dict(ha="center", va="center", fontsize=7)
            axis.text(column, row, counts[row, column], color=color, **place)
    return figure


def png(figure: Figure) -> bytes:
    """Returns a figure as the content of a PNG file."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150)
    # With a palette, a figure takes half of the space, and the maps of many tokens a third.
    image = Image.open(file).convert("RGB").quantize(method=Image.Quantize.MAXCOVERAGE)
    file = io.BytesIO()
    image.save(file, format="png", optimize=True)
    return file.getvalue()


def csv_text(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Returns a table as the content of a CSV file."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([header, *rows])
    return file.getvalue()
