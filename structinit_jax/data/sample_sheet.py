"""Pictures of examples in rows, each with a caption."""

import numpy as np
from PIL import Image, ImageDraw

from structinit_jax.data.examples import fit_image
from structinit_jax.data.source import Source

COLUMNS, ROWS = 8, 6
TILE, CAPTION = 112, 16
MARGIN = 4


def draw_sheet(source: Source, class_names: list[str]) -> Image.Image:
    """Draws examples of a split taken at even distances, with the names of their classes.

    Args:
      source: A split.
      class_names: The name of each label.

    Returns:
      An RGB image of up to 8 × 6 examples.
    """
    number = min(COLUMNS * ROWS, len(source))
    indices = np.linspace(0, len(source) - 1, number).round().astype(int).tolist()
    examples = source.read(indices)
    return draw_tiles([e["image"] for e in examples], [class_names[e["label"]] for e in examples])


def draw_tiles(images: list[np.ndarray], captions: list[str]) -> Image.Image:
    """Draws images, cropped to squares, in rows of eight.

    Args:
      images: uint8 [h, w, C], of one or three channels.
      captions: A line below each, cut where it is too long.

    Returns:
      An RGB image.
    """
    rows = -(-len(images) // COLUMNS)
    pitch = (TILE + MARGIN, TILE + CAPTION + MARGIN)
    sheet = Image.new("RGB", (COLUMNS * pitch[0] + MARGIN, rows * pitch[1] + MARGIN), "white")
    draw = ImageDraw.Draw(sheet)
    for place, (image, caption) in enumerate(zip(images, captions, strict=True)):
        left = MARGIN + place % COLUMNS * pitch[0]
        top = MARGIN + place // COLUMNS * pitch[1]
        tile = fit_image(image, TILE, 1.0)
        sheet.paste(Image.fromarray(np.repeat(tile, 3 // tile.shape[-1], axis=-1)), (left, top))
        while draw.textlength(caption) > TILE:
            caption = caption[:-1]
        draw.text((left, top + TILE + 1), caption, fill="black")
    return sheet
