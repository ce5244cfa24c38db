"""Draws the results of `collect`: heads as convolution kernels, and measures by layer."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Array, Float
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from structinit_jax.analysis import measures
from structinit_jax.analysis.collect import Snapshot
from structinit_jax.errors import InputError

REACH = 4  # largest offset that is drawn: on a large grid, an impulse would be too small
MAX_WIDTH = 17.0  # inches; further models are drawn below the first
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")  # Okabe & Ito

PANELS = {
    "distance": "distance of attention [tokens]",
    "entropy": "entropy [nats]",
    "neighborhood_mass": "share of the 3×3 neighborhood",
    "neighbor_mass": "share of the strongest offset",
    "target_mass": "share of the head's target",
    "hit_rate": "rows that peak on the target",
    "stable_rank": "stable rank of the output",
    "shift_distance": "distance from shift equivariance",
}


def add_legend(figure, handles, labels) -> None:
    """Adds a legend below the axes, in as many columns as fit; the figure grows by it."""
    width, height = figure.get_size_inches()
    columns = max(1, min(4, int(width / (0.09 * max(map(len, labels)) + 0.6))))
    figure.set_size_inches(width, height + 0.22 * math.ceil(len(labels) / columns))
    legend = figure.legend(
        handles, labels, loc="outside lower center", ncols=columns, frameon=False
    )
    for text in legend.get_texts():
        text.set_parse_math(False)


def _wrap(text, width):
    """Breaks a title of 12 points into lines of a width in inches."""
    text = text.encode("utf-8", "backslashreplace").decode()  # the name of a folder may be bytes
    return textwrap.fill(text, max(12, int(width * 10)))


def _save(figure, title, path):
    figure.suptitle(_wrap(title, figure.get_figwidth()), parse_math=False)
    figure.savefig(path, dpi=150)


# -- maps ------------------------------------------------------------------------------------------


def draw_by_offset(snapshots: Sequence[Snapshot], title: str, path: Path) -> None:
    """Draws every head as a convolution kernel."""
    models = {s.name: {each.name: (each.maps, each.grid) for each in s.layers} for s in snapshots}
    _draw_kernels(models, title, path)


def draw_maps(
    maps: Mapping[str, Float[Array | np.ndarray, "L h N N"]],
    grid: tuple[int, int],
    title: str,
    path: str | Path,
) -> None:
    """Like `draw_by_offset`, for attention maps of any models, by the name of the model.

    Average the maps over images, and cut off class and register tokens: the N tokens that are left
    are those of the grid (rows, columns). Raises `InputError` for maps of another grid.
    """
    tokens = grid[0] * grid[1]
    for name, array in maps.items():
        if array.shape[2:] != (tokens, tokens):
            raise InputError(
                f"maps[{name!r}] has shape {array.shape}, but grid={grid} needs [layers, heads, "
                f"{tokens}, {tokens}]: cut off class and register tokens, or pass the grid"
            )
    models = {
        name: {str(i): (layer, grid) for i, layer in enumerate(layers, 1)}
        for name, layers in maps.items()
    }
    _draw_kernels(models, title, path)


def _crop_offsets(maps, grid):
    kernels = np.asarray(measures.attention_by_offset(maps, grid))
    rows, cols = grid
    y, x = min(REACH, rows - 1), min(REACH, cols - 1)
    return kernels[:, rows - 1 - y : rows + y, cols - 1 - x : cols + x]


def _draw_kernels(models, title, path):
    """Draws one picture for each model, with a row for each layer and a column for each head.

    `models` holds the maps [h, N, N] and the grid by model and layer. All share one color scale.
    """
    sizes = {maps.shape[-1] for layers in models.values() for maps, _ in layers.values()}
    models = {
        name: {layer: _crop_offsets(maps, grid) for layer, (maps, grid) in layers.items()}
        for name, layers in models.items()
    }
    kernels = [each for layers in models.values() for each in layers.values()]
    side = max(max(each.shape[1:]) for each in kernels) + 1  # one pixel lies between kernels
    # A scale of at least twice the uniform level, so that flat maps look flat.
    peak = max(2 / min(sizes), *(float(each.max()) for each in kernels))
    uniform = ", ".join(f"{1 / size:.2g}" for size in sorted(sizes, reverse=True))
    label = f"share by offset; uniform: {uniform}"
    heads = max(len(each) for each in kernels)
    width, height = 0.6 * heads + 1.0, 0.6 * max(map(len, models.values())) + 0.9
    columns = min(len(models), max(1, int(MAX_WIDTH / width)))
    rows = math.ceil(len(models) / columns)
    size = max(width * columns, 4.5) + 1, max(height * rows, 3.0)
    figure = Figure(size, layout="constrained")
    for number, (name, layers) in enumerate(models.items(), 1):
        axis = figure.add_subplot(rows, columns, number)
        canvas = np.full((side * len(layers) - 1, side * heads - 1), np.nan)
        for y, each in enumerate(layers.values()):
            for x, kernel in enumerate(each):
                top, left = y * side, x * side
                canvas[top : top + kernel.shape[0], left : left + kernel.shape[1]] = kernel
                corner = (left + kernel.shape[1] // 2 - 0.5, top + kernel.shape[0] // 2 - 0.5)
                # A frame around the token itself.
                axis.add_patch(Rectangle(corner, 1, 1, fill=False, color="white", linewidth=0.7))
        image = axis.imshow(canvas, interpolation="nearest", vmin=0, vmax=peak)
        axis.spines[:].set_visible(False)
        axis.set_xticks([x * side + side / 2 - 1 for x in range(heads)], range(1, heads + 1))
        axis.set_yticks([y * side + side / 2 - 1 for y in range(len(layers))], [*layers])
        axis.tick_params(length=0)
        axis.set(xlabel="head", ylabel="layer")
        axis.set_title(_wrap(name, width), size=10, parse_math=False)
    figure.colorbar(image, ax=figure.axes, label=_wrap(label, figure.get_figheight()))
    _save(figure, title, path)


# -- numbers ---------------------------------------------------------------------------------------


def draw_by_layer(snapshots: Sequence[Snapshot], title: str, path: Path) -> None:
    """Draws every measure against the layer: heads as dots, their mean as a line."""
    known = {name for s in snapshots for layer in s.layers for name in layer.measures}
    names = [name for name in PANELS if name in known]
    columns = min(len(names), 4)
    rows = math.ceil(len(names) / columns)
    figure = Figure((max(3.4 * columns, 6.0), 2.9 * rows + 0.8), layout="constrained")
    deepest = max(snapshots, key=lambda snapshot: len(snapshot.layers))
    labels = [layer.name for layer in deepest.layers]
    every = math.ceil(len(labels) / 8)
    for place, name in enumerate(names, 1):
        axis = figure.add_subplot(rows, columns, place)
        for number, snapshot in enumerate(snapshots):
            shift = 0.1 * (number - (len(snapshots) - 1) / 2)
            _draw_measure(axis, name, snapshot, COLORS[number % len(COLORS)], shift)
        axis.axhline(0, color="black", linewidth=0.8)  # all measures are seen from 0
        axis.set_title(PANELS[name], size=10)
        axis.grid(alpha=0.3)
        axis.set_xticks(range(1, len(labels) + 1, every), labels[::every])
        axis.set_xlabel("layer")
    # All models have the first measure, the distance.
    add_legend(figure, *figure.axes[0].get_legend_handles_labels())
    _save(figure, title, path)


def _draw_measure(axis, name, snapshot, color, shift):
    """Draws a measure of a model; `shift` puts the dots of models side by side."""
    places = [i for i, layer in enumerate(snapshot.layers, 1) if name in layer.measures]
    values = [snapshot.layers[i - 1].measures[name] for i in places]
    for place, heads in zip(places, values, strict=True):
        axis.plot([place + shift] * len(heads), heads, ".", color=color, alpha=0.4, ms=5)
    means, places = [heads.mean() for heads in values], [place + shift for place in places]
    axis.plot(places, means, color=color, label=snapshot.name)
