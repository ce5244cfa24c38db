"""The training crop of large images: a random part of random shape, resized (Szegedy et al. 2015).

The same distribution as timm's RandomResizedCropAndInterpolation, drawn from the seed and the
position in the training stream: a resumed run, or one on more processes, sees the same crops.
"""

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from structinit_jax.data.decode import EncodedImage
from structinit_jax.data.resize import INTERPOLATIONS, Region, resize
from structinit_jax.errors import InputError

ATTEMPTS = 10
# Counters of one Philox key; the shuffles of the stream have another.
CROP_COUNTER = np.array([0, 0, 0, 1], np.uint64)
COIN_COUNTER = np.array([0, 0, 0, 2], np.uint64)


class Box(NamedTuple):
    """A part of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


@dataclasses.dataclass(frozen=True)
class CropOptions:
    """What to draw a crop from; the defaults are those of timm and torchvision.

    Attributes:
      seed: Non-negative seed of the draws.
      scale: Smallest and largest part of the image's area.
      ratio: Smallest and largest width / height; drawn uniformly in the logarithm.
      interpolation: 'bicubic' or 'bilinear', both antialiased, or 'random', which tosses a coin
        for each image.
    """

    seed: int
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    interpolation: str = "bicubic"

    def __post_init__(self):
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise InputError(f"crop scale={self.scale}: needs 0 < smallest <= largest <= 1.")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise InputError(f"crop ratio={self.ratio}: needs 0 < smallest <= largest.")
        choices = (*INTERPOLATIONS, "random")
        if self.interpolation not in choices:
            raise InputError(
                f"crop interpolation={self.interpolation!r}: must be one of"
                f" {', '.join(map(repr, choices))}."
            )


def draw_box(size: tuple[int, int], options: CropOptions, position: int) -> Box:
    """Draws a box inside an image; the largest central one of a permitted ratio if ten draws fail.

    Args:
      size: Height and width of the image.
      options: What to draw from.
      position: Where in the training stream the image stands.

    Returns:
      The box, at least one pixel high and wide.
    """
    height, width = size
    for area, ratio, down, across in _uniforms(options.seed, position):
        area = height * width * (options.scale[0] + area * (options.scale[1] - options.scale[0]))
        low, high = map(math.log, options.ratio)
        ratio = math.exp(low + ratio * (high - low))
        box_height, box_width = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < box_height <= height and 0 < box_width <= width:
            top = int(down * (height - box_height + 1))
            left = int(across * (width - box_width + 1))
            return Box(top, left, box_height, box_width)
    box_height = min(height, max(1, round(width / options.ratio[0])))
    box_width = min(width, max(1, round(height * options.ratio[1])))
    return Box((height - box_height) // 2, (width - box_width) // 2, box_height, box_width)


def draw_interpolation(options: CropOptions, position: int) -> str:
    """The name of the interpolation for the image at a position of the training stream."""
    if options.interpolation != "random":
        return options.interpolation
    key = np.array([options.seed, position], np.uint64)
    coin = int(np.random.Philox(key=key, counter=COIN_COUNTER).random_raw()) >> 63
    return ("bilinear", "bicubic")[coin]


def _uniforms(seed: int, position: int) -> list[list[float]]:
    """Four numbers in [0, 1) for each attempt.

    From raw Philox output, whose stream NumPy promises to keep; 53 bits make a float.
    """
    key = np.array([seed, position], np.uint64)
    raw = np.random.Philox(key=key, counter=CROP_COUNTER).random_raw(4 * ATTEMPTS)
    return ((raw >> np.uint64(11)) * 2.0**-53).reshape(ATTEMPTS, 4).tolist()


def crop_and_resize(
    image: EncodedImage, box: Box, image_size: int, interpolation: str
) -> np.ndarray:
    """Decodes a box of an image and brings it to a square.

    A JPEG is decoded at a half, a quarter or an eighth of its size where the box still has
    `image_size` pixels each way.

    Args:
      image: The image.
      box: A part of it.
      image_size: Height and width of the result, in pixels.
      interpolation: One of `INTERPOLATIONS`.

    Returns:
      uint8 [image_size, image_size, C].
    """
    full = image.size
    pixels = image.decode(
        at_least=(
            math.ceil(full[0] * image_size / box.height),
            math.ceil(full[1] * image_size / box.width),
        )
    )
    # A scaled size is rounded up, but its pixels are so many eighths apart.
    scale = round(8 * max(pixels.shape) / max(full)) / 8
    top, bottom = box.top * scale, (box.top + box.height) * scale
    left, right = box.left * scale, (box.left + box.width) * scale
    # Cut out first, as timm does: what lies outside the box must not bleed in at its edge.
    inside = pixels[
        math.floor(top) : min(math.ceil(bottom), pixels.shape[0]),
        math.floor(left) : min(math.ceil(right), pixels.shape[1]),
    ]
    offset = math.floor(left), math.floor(top)
    region = Region(
        left - offset[0],
        top - offset[1],
        min(right, pixels.shape[1]) - left,
        min(bottom, pixels.shape[0]) - top,
    )
    return resize(inside, region, image_size, interpolation)
