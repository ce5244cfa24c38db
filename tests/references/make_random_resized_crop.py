"""Records crops drawn by timm's RandomResizedCropAndInterpolation for tests/test_crop.py.

Run it with timm 1.0.31 and torchvision: python tests/references/make_random_resized_crop.py
Writes random_resized_crop.npz beside itself: for each image size (height x width) 1,000 boxes
(top, left, height, width), int16.
"""

import random
from pathlib import Path

import import_torchvision  # noqa: F401
import numpy as np
import torch
from PIL import Image
from timm.data.transforms import RandomResizedCropAndInterpolation

SIZES = [(375, 500), (64, 64), (300, 60)]

random.seed(0)
torch.manual_seed(0)
boxes = {}
for height, width in SIZES:
    image = Image.new("L", (width, height))
    draw = RandomResizedCropAndInterpolation.get_params
    drawn = [draw(image, (0.08, 1.0), (3 / 4, 4 / 3)) for _ in range(1000)]
    boxes[f"{height}x{width}"] = np.array(drawn, np.int16)
np.savez_compressed(Path(__file__).with_name("random_resized_crop.npz"), **boxes)
