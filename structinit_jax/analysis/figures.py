"""Draws the results of `collect`. Within a figure, equal colors mean equal values."""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Array, Float

from structinit_jax.analysis import measures
from structinit_jax.analysis.collect import Layer, Snapshot
from structinit_jax.analysis.drawing import (
    BAR_WIDTH,
    TITLE_SIZE,
    Scale,
    add_legend,
    draw_frame,
    import_pyplot,
    make_panels,
    num_letters,
    save,
    wrap,
)
from structinit_jax.errors import InputError

REACH = 4  # largest offset that is drawn: on a large grid, an impulse would be too small
MAX_FILTERS = 16  # of each layer of a ConvMixer
ZOOM_ROWS = 3  # rows of tokens in a zoom, as in the 2024 paper
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")  # Okabe & Ito
MAX_WRITTEN = 81  # similarities of a panel of cka.png that are also written as numbers

PANELS = {
    "distance": "attention distance [tokens]",
    "entropy": "attention entropy [nats]",
    "neighborhood_mass": "attention on 3×3 neighborhood",
    "neighbor_mass": "attention at strongest offset",
    "target_mass": "attention on the head's target",
    "hit_rate": "rows that peak on the target",
    "filter_cosine": "cosine of filters to their start",
    "stable_rank": "stable rank of the output",
}


# -- maps ------------------------------------------------------------------------------------------


def draw_by_offset(snapshots: Sequence[Snapshot], title: str, path: Path) -> None:
    """Draws every head as a convolution kernel; for a ConvMixer its filters."""
    models = [(s.name, {layer.name: _tiles(layer) for layer in s.layers}) for s in snapshots]
    if snapshots[0].layers[0].filters is not None:
        _draw_kernels(models, title, path, "weight", set())
        return
    sizes = {layer.maps.shape[-1] for s in snapshots for layer in s.layers}
    _draw_kernels(models, title, path, name_quantity(snapshots), sizes)


def draw_maps(
    maps: Mapping[str, Float[Array | np.ndarray, "L h N N"]],
    grid: tuple[int, int],
    title: str,
    path: Path,
) -> None:
    """Like `draw_by_offset`, for attention maps of any models.

    Args:
      maps: Maps of the N tokens of the grid, by the name of the model. Average them over images,
        and cut off class and register tokens.
      grid: Rows and columns of the tokens.
      title: Title of the figure.
      path: File to write.

    Raises:
      InputError: The maps are not of that grid.
    """
    tokens = grid[0] * grid[1]
    for name, array in maps.items():
        if array.ndim != 4 or array.shape[-1] != tokens:
            raise InputError(
                f"maps[{name!r}] has shape {array.shape}, but grid={grid} needs [layers, heads, "
                f"{tokens}, {tokens}]: cut off class and register tokens, or pass the grid"
            )
    models = [
        (name, {str(i): _crop_offsets(layer, grid) for i, layer in enumerate(layers, 1)})
        for name, layers in maps.items()
    ]
    _draw_kernels(models, title, path, "attention", {tokens})


def title_by_offset(snapshots: Sequence[Snapshot], subject: str) -> str:
    """Returns the title of `draw_by_offset`, which says what was observed."""
    if snapshots[0].layers[0].filters is not None:
        return f"First {MAX_FILTERS} filters of each layer: {subject}"
    return f"{name_quantity(snapshots).capitalize()} maps by offset: {subject}"


def name_quantity(snapshots: Sequence[Snapshot]) -> str:
    """Returns what the maps of models show, such as 'attention'."""
    return " or ".join(dict.fromkeys(snapshot.quantity for snapshot in snapshots))


def _tiles(layer: Layer) -> list[np.ndarray]:
    if layer.filters is not None:
        return list(np.moveaxis(layer.filters, -1, 0)[:MAX_FILTERS])
    return _crop_offsets(layer.maps, layer.grid)


def _crop_offsets(maps, grid):
    kernels = np.asarray(measures.attention_by_offset(maps, grid))
    rows, cols = grid
    y, x = min(REACH, rows - 1), min(REACH, cols - 1)
    return list(kernels[:, rows - 1 - y : rows + y, cols - 1 - x : cols + x])


def _draw_kernels(models, title, path, quantity, sizes):
    """Draws the kernels of each head. A model is its name and lists of them by layer.

    Models may have different numbers of layers and heads. `sizes` are the tokens of their maps.
    """
    every_layer = [kernels for _, layers in models for kernels in layers.values()]
    has_filters = quantity == "weight"
    peak = max(float(np.abs(kernel).max()) for kernels in every_layer for kernel in kernels)
    if has_filters:
        peak = peak or 1.0
        scale = Scale("PuOr", -peak, peak, quantity)
    else:
        scale = Scale.of_maps(peak, sizes, f"{quantity} by offset (frame: the token itself)")
    num_rows = max(len(layers) for _, layers in models)
    num_columns = max(map(len, every_layer))
    width = num_columns * 0.75 + 0.9
    size = (width, max(num_rows * 0.75 + 0.9, 3.0))
    figure, panels, bar = make_panels([name for name, _ in models], size, title)
    for panel, (_, layers) in zip(panels, models, strict=True):
        names, tiles = list(layers), list(layers.values())
        panel.supxlabel("channel" if has_filters else "head", size=10)
        panel.supylabel("layer", size=10)
        for (y, x), axis in np.ndenumerate(panel.subplots(num_rows, num_columns, squeeze=False)):
            if y >= len(tiles) or x >= len(tiles[y]):
                axis.set_visible(False)
                continue
            image = scale.show(axis, tiles[y][x])
            rows, cols = tiles[y][x].shape
            middle = (cols // 2 - 0.5, rows // 2 - 0.5)
            draw_frame(axis, middle, (1, 1), color="black" if has_filters else "white")
            if x == 0:
                axis.set_ylabel(names[y], rotation=0, ha="right", va="center")
            if y == len(tiles) - 1 or x >= len(tiles[y + 1]):
                axis.set_xlabel(f"{x + 1}")
    save(figure, path, bar, image, scale)


def draw_full(
    snapshots: Sequence[Snapshot],
    layers: Sequence[int],
    heads: Sequence[int],
    title: str,
    path: Path,
) -> None:
    """Draws N×N maps, each with a zoom into the rows and columns of its first tokens below it.

    Args:
      snapshots: Models with maps. Layers and heads that one of them lacks are left out.
      layers: Indices of the layers, from 0.
      heads: Indices of the heads.
      title: Title of the figure.
      path: File to write.
    """
    drawn = [s.layers[i] for s in snapshots for i in layers if i < len(s.layers)]
    # The strongest attention of a typical row. Single rows that are stronger are clipped.
    high = max(float(layer.maps.max(axis=-1).mean(axis=-1).max()) for layer in drawn)
    label = f"{name_quantity(snapshots)} of the row's token to the column's token"
    scale = Scale.of_maps(high, {layer.maps.shape[-1] for layer in drawn}, label)
    cell = min(max(len(layer.maps[0]) / 150 for layer in drawn), 3.0)  # inches; one pixel an entry
    cell = max(cell, 1.5)
    size = (len(heads) * cell + 0.6, len(layers) * 2 * (cell + 0.15) + 0.6)
    figure, panels, bar = make_panels([s.name for s in snapshots], size, title)
    for panel, snapshot in zip(panels, snapshots, strict=True):
        axes = panel.subplots(2 * len(layers), len(heads), squeeze=False)
        for (y, x), axis in np.ndenumerate(axes):
            index, head = layers[y // 2], heads[x]
            if index >= len(snapshot.layers) or head >= len(snapshot.layers[index].maps):
                axis.set_visible(False)
                continue
            layer = snapshot.layers[index]
            cols, num_tokens = layer.grid[1], len(layer.maps[head])
            side = min(ZOOM_ROWS * cols, num_tokens)
            if y % 2 == 0:
                image = scale.show(axis, layer.maps[head])
                axis.set_title(f"layer {layer.name}, head {head + 1}", size=9)
                draw_frame(axis, (-0.5, -0.5), (side, side), color="red")
                ticks = [0, num_tokens - 1]
            else:
                scale.show(axis, layer.maps[head][:side, :side])
                for start in range(0, side, cols):
                    draw_frame(axis, (start - 0.5, start - 0.5), (cols, cols), color="white")
                for spine in axis.spines.values():
                    spine.set(color="red", linewidth=1.5)
                ticks = [0, side - 1]
            axis.set(xticks=ticks, yticks=ticks if x == 0 else [])
            axis.tick_params(labelsize=7, length=2)
            if x == 0:
                axis.set_ylabel("token", size=8, labelpad=-4)
    save(figure, path, bar, image, scale, extend="max")


# -- numbers ---------------------------------------------------------------------------------------


def draw_by_layer(snapshots: Sequence[Snapshot], title: str, path: Path) -> None:
    """Draws every measure against the layer: heads as dots, their mean as a line."""
    plt = import_pyplot()
    known = [layer.measures.keys() for snapshot in snapshots for layer in snapshot.layers]
    names = [n for n in PANELS if n == "stable_rank" or any(n in keys for keys in known)]
    columns = min(len(names), 4)
    rows = math.ceil(len(names) / columns)
    size = (max(3.4 * columns, 7.0), 2.9 * rows + 0.6)
    figure, axes = plt.subplots(
        rows, columns, figsize=size, layout="constrained", squeeze=False, sharex=True
    )
    for axis in axes.flat[len(names) :]:
        axis.set_visible(False)
    quantity = name_quantity(snapshots)
    for axis, name in zip(axes.flat, names, strict=False):
        for number, snapshot in enumerate(snapshots):
            shift = 0.1 * (number - (len(snapshots) - 1) / 2)
            _draw_measure(axis, name, snapshot, COLORS[number % len(COLORS)], shift)
        axis.axhline(0, color="black", linewidth=0.8)  # all measures are seen from 0
        axis.set_title(PANELS[name].replace("attention", quantity), size=10)
        axis.grid(alpha=0.3)
    for axis in axes.flat[max(len(names) - columns, 0) : len(names)]:  # the lowest of each column
        axis.set_xlabel("layer (0: input)")
        axis.tick_params(labelbottom=True)
    _label_layers(axes[0, 0], common_layer_names(snapshots), size[0] / columns)
    lines = {}
    for axis in axes.flat:
        handles, labels = axis.get_legend_handles_labels()
        lines |= dict(zip(labels, handles, strict=True))
    order = [n for n in ("uniform map", *(s.name for s in snapshots)) if n in lines]
    add_legend(figure, [lines[name] for name in order], order, "outside lower center", 4)
    figure.suptitle(wrap(title, figure.get_figwidth(), TITLE_SIZE))
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_measure(axis, name, snapshot, color, shift):
    if name == "stable_rank":
        values = [snapshot.embedding_rank, *(layer.stable_rank for layer in snapshot.layers)]
        axis.plot(range(len(values)), values, color=color, marker="o", ms=4, label=snapshot.name)
        return
    places = [i for i, layer in enumerate(snapshot.layers, 1) if name in layer.measures]
    found = [snapshot.layers[i - 1] for i in places]
    if not found:
        return
    uniform = [layer.uniform.get(name, math.nan) for layer in found]
    if not all(map(math.isnan, uniform)):
        axis.plot(places, uniform, color="gray", linestyle="--", linewidth=1, label="uniform map")
    for place, layer in zip(places, found, strict=True):
        heads = layer.measures[name]
        # Side by side, so that no model hides another.
        axis.plot([place + shift] * len(heads), heads, ".", color=color, alpha=0.4, ms=5)
    means = [layer.measures[name].mean() for layer in found]
    axis.plot([place + shift for place in places], means, color=color, label=snapshot.name)


def common_layer_names(snapshots: Sequence[Snapshot]) -> list[str]:
    """Returns the names of the layers of the deepest model, or their numbers if others differ."""
    names = [[layer.name for layer in snapshot.layers] for snapshot in snapshots]
    deepest = max(names, key=len)
    if all(own == deepest[: len(own)] for own in names):
        return deepest
    return [str(i) for i in range(1, len(deepest) + 1)]


def _label_layers(axis, names, width):
    """Labels the layers, and their input as 0, as many as fit into a width in inches."""
    names = ["0", *names]
    step = math.ceil(len(names) * (max(map(len, names)) + 1) / num_letters(width, 10))
    axis.set_xticks(range(0, len(names), step), names[::step])


def draw_cka(snapshots: Sequence[Snapshot], title: str, path: Path) -> None:
    """Draws the CKA between the layers of every two models; 0 is the first layer's input."""
    plt = import_pyplot()
    pairs = list(itertools.combinations(snapshots, 2))
    scale = Scale("viridis", 0.0, 1.0, "CKA")
    columns = min(len(pairs), 3)
    rows = math.ceil(len(pairs) / columns)
    size = (3.6 * columns + BAR_WIDTH + 1.0, 3.5 * rows + 0.6)
    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for axis in axes.flat[len(pairs) :]:
        axis.set_visible(False)
    for axis, (a, b) in zip(axes.flat, pairs, strict=False):
        values = np.asarray(measures.cka(a.grams, b.grams))
        image = scale.show(axis, values)
        if values.size <= MAX_WRITTEN:
            for (y, x), value in np.ndenumerate(values):
                color = "black" if value > 0.5 else "white"
                axis.text(x, y, f"{value:.2f}", ha="center", va="center", size=8, color=color)
        for labels, snapshot in ((axis.set_yticks, a), (axis.set_xticks, b)):
            names = ["0", *(layer.name for layer in snapshot.layers)]
            shown = range(0, len(names), math.ceil(len(names) / 13))
            labels(list(shown), [names[i] for i in shown])
        axis.invert_yaxis()
        axis.set_ylabel(wrap(f"layer of {a.name}", 3.0, 10))
        axis.set_xlabel(wrap(f"layer of {b.name}", 3.0, 10))
    figure.colorbar(image, ax=axes, label=scale.label, shrink=0.8)
    figure.suptitle(wrap(title, size[0], TITLE_SIZE))
    figure.savefig(path, dpi=150)
    plt.close(figure)
