"""Draws the course of a training run and the confusion matrix of an evaluation."""

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int
from matplotlib.figure import Figure
from PIL import Image

COLORS = {"train": "#0072b2", "eval": "#d55e00"}
MAX_NAMED_CLASSES = 30  # more names and counts would overlap


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
