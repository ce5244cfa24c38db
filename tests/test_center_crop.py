import itertools

import numpy as np
import pytest
from PIL import Image

from structinit_jax.data import crops
from structinit_jax.data.crops import resize_and_center_crop


def test_resize_and_center_crop():
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (8, 8, 1), dtype=np.uint8)
    np.testing.assert_array_equal(resize_and_center_crop(image, 8), image)
    wide = np.zeros((10, 30, 3), np.uint8)
    wide[:, 10:20] = 200  # the central square
    np.testing.assert_array_equal(resize_and_center_crop(wide, 10), np.full((10, 10, 3), 200))
    for height, width in itertools.product(range(5, 40, 7), repeat=2):
        image = np.zeros((height, width, 1), np.uint8)
        assert resize_and_center_crop(image, 14, 0.875).shape == (14, 14, 1)


@pytest.mark.parametrize("size", [(8, 400), (401, 9), (30, 999)])
@pytest.mark.parametrize("image_size", [30, 64])
def test_center_crop_of_a_long_image_resizes_the_center(size, image_size, monkeypatch):
    # Low in contrast, since Pillow clips overshoots after each direction, whose order may differ.
    image = np.random.default_rng(0).integers(90, 160, (*size, 3), np.uint8)
    got = resize_and_center_crop(image, image_size, 0.95).astype(int)
    monkeypatch.setattr(crops, "LARGEST_RATIO", np.inf)
    assert np.abs(got - resize_and_center_crop(image, image_size, 0.95)).max() <= 2


@pytest.mark.parametrize("size", [(1, 20_000), (20_000, 1)])
def test_center_crop_of_a_line_takes_little_memory(size, monkeypatch):
    sizes, resize = [], Image.Image.resize

    def record(image, size, *args):
        sizes.append(size)
        return resize(image, size, *args)

    monkeypatch.setattr(Image.Image, "resize", record)
    assert resize_and_center_crop(np.zeros((*size, 3), np.uint8), 224).shape == (224, 224, 3)
    assert sizes == [(224, 224)]


@pytest.mark.parametrize(
    ("size", "image_size", "crop_fraction", "resized", "corner"),
    [  # by timm's create_transform(is_training=False); size and resized are (height, width)
        ((375, 500), 224, 0.9, (248, 330), (12, 53)),
        ((500, 375), 224, 0.875, (341, 256), (58, 16)),
        ((95, 100), 30, 0.95, (31, 32), (0, 1)),
        ((31, 38), 31, 1.0, (31, 38), (0, 4)),
    ],
)
def test_center_crop_is_timms(size, image_size, crop_fraction, resized, corner):
    from sklearn.datasets import load_sample_image

    image = Image.fromarray(load_sample_image("china.jpg")).resize(size[::-1])
    right = image.resize(resized[::-1], Image.Resampling.BICUBIC)
    right = right.crop((corner[1], corner[0], corner[1] + image_size, corner[0] + image_size))
    got = resize_and_center_crop(np.asarray(image), image_size, crop_fraction)
    np.testing.assert_array_equal(got, right)
