"""Parts of figures: color scales, panels, legends, and text that fits."""

import math
import os
import textwrap
from typing import NamedTuple

import numpy as np

BAR_WIDTH = 1.5  # inches
MAX_WIDTH = 17  # inches; further models are drawn below the first
TITLE_SIZE = 12  # points


def import_pyplot():
    """Imports matplotlib's pyplot for drawing to files."""
    os.environ.setdefault("MPLBACKEND", "Agg")  # needs no display; a notebook keeps its own
    import matplotlib.pyplot as plt

    return plt


class Scale(NamedTuple):
    """What the colors of a figure mean."""

    cmap: str
    low: float
    high: float
    label: str

    @classmethod
    def of_maps(cls, high: float, sizes: set[int], label: str):
        """Returns a scale on which uniform maps of these sizes do not look like strong ones."""
        uniform = [1 / size for size in sorted(sizes, reverse=True)]
        values = ", ".join(f"{value:.2g}" for value in uniform)
        return cls("viridis", 0.0, max(high, 2 * uniform[-1]), f"{label}; uniform: {values}")

    def show(self, axis, image: np.ndarray):
        """Draws an array without smoothing and without ticks."""
        axis.set(xticks=[], yticks=[])
        limits = dict(vmin=self.low, vmax=self.high)
        return axis.imshow(image, cmap=self.cmap, interpolation="nearest", **limits)


def make_panels(names, size, title):
    """Returns a figure, a part of it of `size` for each name, and one for the color bar."""
    plt = import_pyplot()
    rows = math.ceil(len(names) / max(MAX_WIDTH // size[0], 1))
    columns = math.ceil(len(names) / rows)
    width = max(size[0] * columns, 5.0)
    title = wrap(title, width + BAR_WIDTH, TITLE_SIZE)
    names = [wrap(name, width / columns - 0.2, 11) for name in names]
    num_lines = title.count("\n") + rows * max(name.count("\n") for name in names)
    height = size[1] * rows + 0.4 + 0.2 * num_lines
    figure = plt.figure(figsize=(width + BAR_WIDTH, height), layout="constrained")
    figure.suptitle(title)
    left, bar = figure.subfigures(1, 2, width_ratios=[width, BAR_WIDTH])
    panels = left.subfigures(rows, columns, squeeze=False).ravel()[: len(names)]
    for panel, name in zip(panels, names, strict=True):
        panel.suptitle(name, size=11)
    return figure, panels, bar


def add_legend(figure, handles, labels, loc: str, max_columns: int, **options) -> None:
    """Adds a legend outside of the axes in as many columns as fit; the figure grows by it."""
    for columns in range(max_columns, 0, -1):
        legend = figure.legend(handles, labels, loc=loc, ncols=columns, **options)
        box = legend.get_window_extent()
        if columns == 1 or box.width <= figure.bbox.width:
            break
        legend.remove()
    width, height = figure.get_size_inches()
    needed_width = box.width / figure.dpi + 0.2
    figure.set_size_inches(max(width, needed_width), height + box.height / figure.dpi)


def wrap(text, width, size):
    """Breaks the lines of a text that would be wider, in inches, at a size in points."""
    return textwrap.fill(text, num_letters(width, size))


def num_letters(width, size):
    """Returns how many letters of a size in points fit into a width in inches."""
    return int(width * 72 / (0.56 * size))  # a letter is about as wide as this part of its height


def draw_frame(axis, corner, size, color):
    """Frames the pixels of an image from a corner (x, y) on, `size` (width, height) of them."""
    from matplotlib.patches import Rectangle

    axis.add_patch(Rectangle(corner, *size, fill=False, edgecolor=color, linewidth=0.8))


def save(figure, path, bar, image, scale, extend="neither"):
    """Writes a figure of `make_panels`, with the color bar of one of its images."""
    axis = bar.subplots()
    # In a tall figure, the width that the aspect gives would leave no place for the label.
    axis.set_box_aspect(max(12, figure.get_figheight() / 0.3))
    label = wrap(scale.label, figure.get_figheight() - 0.5, 10)
    figure.colorbar(image, cax=axis, label=label, extend=extend)
    figure.savefig(path, dpi=150)
    import_pyplot().close(figure)
