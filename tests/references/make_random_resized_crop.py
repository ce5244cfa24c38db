"""1,000 boxes (top, left, height, width) that timm's random resized crop draws, by image size."""

import random

import numpy as np
from PIL import Image
from timm.data.transforms import RandomResizedCropAndInterpolation


def make():
    """All arrays by name, such as '375x500'."""
    random.seed(0)
    boxes = {}
    for height, width in [(375, 500), (64, 64), (300, 60)]:
        image = Image.new("L", (width, height))
        draw = RandomResizedCropAndInterpolation.get_params
        drawn = [draw(image, (0.08, 1.0), (3 / 4, 4 / 3)) for _ in range(1000)]
        boxes[f"{height}x{width}"] = np.array(drawn, np.int16)
    return boxes
