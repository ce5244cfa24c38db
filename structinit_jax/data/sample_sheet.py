"""A picture of some examples of a split, each with the name of its class."""

import numpy as np
from PIL import Image, ImageDraw

from structinit_jax.data.examples import fit_image
from structinit_jax.data.source import Source

COLUMNS, ROWS = 8, 6
TILE, CAPTION = 112, 16
MARGIN = 4


def draw_sheet(source: Source, class_names: list[str]) -> Image.Image:
    """Draws examples taken at even distances, cropped to squares.

    Args:
      source: A split.
      class_names: The name of each label.

    Returns:
      An RGB image of up to 8 × 6 examples.
    """
    number = min(COLUMNS * ROWS, len(source))
    rows = -(-number // COLUMNS)
    pitch = (TILE + MARGIN, TILE + CAPTION + MARGIN)
    sheet = Image.new("RGB", (COLUMNS * pitch[0] + MARGIN, rows * pitch[1] + MARGIN), "white")
    draw = ImageDraw.Draw(sheet)
    indices = np.linspace(0, len(source) - 1, number).round().astype(int).tolist()
    for place, example in enumerate(source.read(indices)):
        left = MARGIN + place % COLUMNS * pitch[0]
        top = MARGIN + place // COLUMNS * pitch[1]
        tile = fit_image(example["image"], TILE, 1.0)
        sheet.paste(Image.fromarray(np.repeat(tile, 3 // tile.shape[-1], axis=-1)), (left, top))
        caption = class_names[example["label"]]
        while draw.textlength(caption) > TILE:
            caption = caption[:-1]
        draw.text((left, top + TILE + 1), caption, fill="black")
    return sheet
