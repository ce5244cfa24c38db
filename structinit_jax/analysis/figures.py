"""Draws the results of `collect`: attention maps, and measures by layer."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Array, Float
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from structinit_jax.analysis import measures
from structinit_jax.analysis.collect import Layer, Snapshot
from structinit_jax.errors import printable
from structinit_jax.figures import COLORS, add_legend, png
from structinit_jax.files import write_atomically

REACH = 4  # largest offset drawn: if a large grid were drawn whole, impulses would be too small
STEP = 1.06  # distance from one map to the next, in units of a map's side
KERNEL = 0.35  # the same for kernels
# Text to the left of a tile; users' names can contain dollar signs.
SIDEWAYS = dict(rotation=90, ha="right", va="center", parse_math=False)

PANELS = {
    "distance": "distance of attention [tokens]",
    "entropy": "entropy [nats]",
    "neighborhood_mass": "share of the 3×3 neighborhood",
    "neighbor_mass": "share of the strongest offset",
    "target_mass": "share of the head's target",
    "hit_rate": "rows that peak on the target",
    "stable_rank": "stable rank of the output",
    "input_rank": "stable rank of the input",
}


def _save(figure, title, path):
    # Titles can contain folder names, which are not always valid text; matplotlib's own wrapping
    # would parse them as markup.
    columns = max(12, int(10 * figure.get_figwidth()))
    figure.suptitle(textwrap.fill(printable(title), columns), parse_math=False)
    write_atomically(path, png(figure))


# -- maps ------------------------------------------------------------------------------------------


def draw_maps(
    maps: Mapping[str, Float[Array | np.ndarray, "L h N N"]],
    grid: tuple[int, int],
    title: str,
    path: str | Path,
) -> None:
    """Draws attention maps of any models, by model name, like `draw_snapshots`.

    The maps must be averaged over images, without class and register tokens: the N tokens are those
    of the grid (rows, columns).
    """
    snapshots = []
    for name, layers in maps.items():
        numbered = enumerate(map(np.asarray, layers), 1)
        snapshots.append(Snapshot(name, [Layer(str(i), grid, layer, {}) for i, layer in numbered]))
    draw_snapshots(snapshots, title, path)


def draw_snapshots(snapshots: Sequence[Snapshot], title: str, path: str | Path) -> None:
    """Draws the attention maps of models, as in figures 3 to 6 of the 2024 paper.

    For every head of the first layer: the map [N, N] with queries as rows and keys as columns, and
    below it the map's upper left corner (two rows of tokens). Beside them: every head of all layers
    as a convolution kernel. Each model has its own band, one below the other; the unit of length is
    the side of a map.
    """
    everything = [layer for snapshot in snapshots for layer in snapshot.layers]
    uniform = 1 / min(layer.maps.shape[-1] for layer in everything)
    # A scale of at least twice the uniform level, so that flat maps look flat.
    peak = max(2 * uniform, *(_kernels(layer).max() for layer in everything))
    scale = dict(vmin=0, vmax=peak)
    figure = Figure(layout="constrained")
    axis = figure.add_subplot()
    heads = max(len(layer.maps) for layer in everything)
    right = STEP * heads + 0.25
    for head in range(heads):
        axis.text(STEP * head + 0.5, -0.05, f"head {head + 1}", ha="center")
    axis.text(right, -0.05, "by offset")
    top = 0.0
    for name, layers in snapshots:
        height = max(2 * STEP, KERNEL * len(layers))
        axis.text(-0.3, top + height / 2, name, size=12, weight="bold", **SIDEWAYS)
        _draw_layer(axis, layers[0], top, scale)
        image = _draw_kernels(axis, layers, (right, top), scale)
        top += height + 0.1
    width = right + KERNEL * heads
    axis.set(xlim=(-0.6, width), ylim=(top - 0.15, -0.3), aspect="equal")
    axis.set_axis_off()
    bar = figure.colorbar(image, ax=axis, extend="max", shrink=0.5, aspect=30)
    bar.ax.axhline(uniform, color="white", linewidth=1.5)
    bar.set_label(f"share of attention (white line: uniform, {uniform:.2g})")
    figure.set_size_inches(width + 1.5, top + 0.1)
    _save(figure, title, path)


def _kernels(layer):
    """Returns the heads of a layer as kernels, up to the largest offset that is drawn."""
    kernels = np.asarray(measures.attention_by_offset(layer.maps, layer.grid))
    rows, cols = layer.grid
    y = min(REACH, rows - 1)
    x = min(REACH, cols - 1)
    return kernels[:, rows - 1 - y : rows + y, cols - 1 - x : cols + x]


def _draw_layer(axis, layer, top, scale):
    """Draws the map of each head of a layer, and below it the map's upper left corner."""
    rows, columns = layer.grid
    size = min(2, rows) * columns
    axis.text(-0.06, top + 0.5, f"layer {layer.name}", **SIDEWAYS)
    axis.text(-0.06, top + STEP + 0.5, "corner", color="red", **SIDEWAYS)
    for head, maps in enumerate(layer.maps):
        left = STEP * head
        _draw_tile(axis, maps, (left, top), 1, scale, [(0, 0, size)], "red")
        blocks = [(start, start, columns) for start in range(0, size, columns)]
        _draw_tile(axis, maps[:size, :size], (left, top + STEP), 1, scale, blocks)


def _draw_kernels(axis, layers, corner, scale):
    """Draws all heads as kernels: a row for each layer and a column for each head."""
    left, top = corner
    for row, layer in enumerate(layers):
        y = top + KERNEL * row
        axis.text(left - 0.04, y + KERNEL / 2, layer.name, ha="right", va="center")
        for head, kernel in enumerate(_kernels(layer)):
            place = left + KERNEL * head, y
            itself = [(kernel.shape[0] // 2, kernel.shape[1] // 2, 1)]
            image = _draw_tile(axis, kernel, place, 0.93 * KERNEL, scale, itself)
    return image


def _draw_tile(axis, array, corner, size, scale, frames, color="white"):
    """Draws a matrix in a square, with frames around square blocks of it (row, column, size)."""
    left, top = corner
    extent = (left, left + size, top + size, top)
    # A large matrix has more entries than the square has pixels.
    interpolation = "auto" if len(array) > 128 else "nearest"
    image = axis.imshow(array, extent=extent, interpolation=interpolation, **scale)
    height = size / array.shape[0]
    width = size / array.shape[1]
    for row, column, count in frames:
        place = left + width * column, top + height * row
        sides = width * count, height * count
        axis.add_patch(Rectangle(place, *sides, fill=False, color=color, linewidth=0.8))
    return image


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
        axis.axhline(0, color="black", linewidth=0.8)  # every axis includes 0
        axis.set_title(PANELS[name], size=10)
        axis.grid(alpha=0.3)
        axis.set_xticks(range(1, len(labels) + 1, every), labels[::every])
        axis.set_xlabel("layer")
    # All models have the first measure: the distance, or a ConvMixer's rank.
    add_legend(figure, figure.axes[0])
    _save(figure, title, path)


def _draw_measure(axis, name, snapshot, color, shift):
    """Draws a measure of a model; `shift` puts the dots of models side by side."""
    places = [i for i, layer in enumerate(snapshot.layers, 1) if name in layer.measures]
    values = [snapshot.layers[i - 1].measures[name] for i in places]
    for place, heads in zip(places, values, strict=True):
        axis.plot([place + shift] * len(heads), heads, ".", color=color, alpha=0.4, ms=5)
    means = [heads.mean() for heads in values]
    places = [place + shift for place in places]
    axis.plot(places, means, color=color, label=snapshot.name)
