"""Draws training curves, and holds what all figures share."""

import io
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's colors, which color-blind readers can tell apart.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")


def draw_curves(lines: Iterable[Mapping[str, Any]]) -> Figure:
    """Draws loss, accuracy and learning rate by step, given the lines of `metrics.jsonl`."""
    lines = list(lines)
    figure = Figure(figsize=(12, 3.4), layout="constrained")
    panels = ("loss", "accuracy", "learning_rate")
    for axis, name in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for part, color in zip(("train", "eval"), COLORS, strict=False):
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


def add_legend(figure: Figure, axis: Axes) -> None:
    """Adds the legend of an axis below the figure and makes the figure taller to fit it."""
    handles, labels = axis.get_legend_handles_labels()
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.22 * len(labels))
    legend = figure.legend(handles, labels, loc="outside lower center", frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)


def png(figure: Figure) -> bytes:
    """Renders a figure as PNG bytes."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150)
    return file.getvalue()
