import functools
import pathlib

import jax
import numpy as np
import pytest
import sklearn.datasets
from PIL import Image
from scipy import stats

from structinit_jax.augment import crop

REFERENCE = np.load(pathlib.Path(__file__).with_name("references") / "augment.npz")
IMAGES = np.stack(
    [
        np.asarray(Image.fromarray(image).resize((48, 32)))
        for image in sklearn.datasets.load_sample_images().images
    ]
    * 4
)


def batched(function, rngs, *arrays, **options):
    return jax.jit(jax.vmap(functools.partial(function, **options)))(rngs, *arrays)


def split(count, seed=0):
    return jax.random.split(jax.random.key(seed), count)


@pytest.mark.parametrize(
    ("name", "height", "width", "scale"),
    [("crops", 24, 40, (0.08, 1.0)), ("crops_wide", 10, 40, (0.9, 1.0))],
)
def test_crop_boxes_are_distributed_as_in_timm(name, height, width, scale):
    def with_area(top, left, height, width):
        return top, left, height, width, height * width, top + height, left + width

    theirs = REFERENCE[name]
    options = dict(height=height, width=width, scale=scale, ratio=(3 / 4, 4 / 3))
    drawn = map(np.asarray, batched(crop.crop_box, split(len(theirs)), **options))
    drawn = with_area(*drawn)
    for a, b in zip(drawn, with_area(*theirs.T.astype(int)), strict=True):
        assert stats.ks_2samp(a, b).pvalue > 0.001
    if name == "crops_wide":  # no box fits: the central one
        assert set(map(tuple, theirs)) == {tuple(int(field[0]) for field in drawn[:4])}


def test_the_central_box_of_a_tall_image_is_that_of_a_wide_one_on_its_side():
    options = dict(scale=(0.9, 1.0), ratio=(3 / 4, 4 / 3))
    boxes = (
        tuple(map(int, crop.crop_box(jax.random.key(0), height, width, **options)))
        for height, width in [(10, 40), (40, 10)]
    )
    assert list(boxes) == [(0, 13, 10, 13), (13, 0, 13, 10)]


def test_flips_are_mirror_images_of_half_the_batch():
    images = np.random.default_rng(0).integers(0, 256, (400, 3, 4, 1)).astype(np.uint8)
    out = np.asarray(batched(crop.random_flip, split(400), images, probability=0.5))
    flipped = np.all(out == images[:, :, ::-1], axis=(1, 2, 3))
    assert 150 < flipped.sum() < 250
    np.testing.assert_array_equal(out[~flipped], images[~flipped])


def test_pad_crops_are_uniform_windows_of_the_padded_image():
    images = np.random.default_rng(0).integers(1, 256, (300, 5, 6, 1)).astype(np.uint8)
    out = np.asarray(batched(crop.random_pad_crop, split(300), images, padding=2))
    places = []
    for image, window in zip(images, out, strict=True):
        padded = np.pad(image, ((2, 2), (2, 2), (0, 0)))
        every = [(y, x) for y in range(5) for x in range(5)]
        places += [p for p in every if np.all(padded[p[0] :, p[1] :][:5, :6] == window)][:1]
    counts = np.bincount([5 * y + x for y, x in places], minlength=25)
    assert counts.sum() == 300
    assert stats.chisquare(counts).pvalue > 0.001


@pytest.mark.parametrize("size", [24, 100])
def test_resized_crops_differ_from_pillow_by_one_at_most(size):
    """Smaller and larger. Pillow's weights are 22-bit integers, so it rounds halves differently."""
    count = len(IMAGES)
    options = dict(height=32, width=48, scale=(0.2, 1.0), ratio=(3 / 4, 4 / 3))
    boxes = batched(crop.crop_box, split(count, 5), **options)
    bicubic = np.arange(count) % 2 == 1
    resize = jax.vmap(crop.resize_box, in_axes=(0, 0, None, 0))
    out = jax.jit(resize, static_argnums=2)(IMAGES, boxes, size, bicubic)
    differences = []
    for i, image in enumerate(IMAGES):
        top, left, height, width = (int(field[i]) for field in boxes)
        box = Image.fromarray(image).crop((left, top, left + width, top + height))
        resample = Image.Resampling.BICUBIC if bicubic[i] else Image.Resampling.BILINEAR
        theirs = np.asarray(box.resize((size, size), resample), np.int32)
        differences.append(np.abs(np.asarray(out[i], np.int32) - theirs))
    assert np.max(differences) <= 1
    # About half of the pixels of a crop whose weights produce many halves, few of the others.
    assert np.mean(np.array(differences) > 0) < 0.05
    assert np.median(np.mean(np.array(differences) > 0, axis=(1, 2, 3))) < 0.005


@pytest.mark.parametrize(("interpolation", "overshoots"), [("bilinear", 0), ("bicubic", 1)])
def test_only_bicubic_crops_overshoot(interpolation, overshoots):
    steps = 100 + 50 * (np.arange(32) // 8 % 2)
    image = np.broadcast_to(steps[:, None, None], (32, 32, 1)).astype(np.uint8)
    count = 64
    options = dict(size=48, scale=(0.9, 1.0), ratio=(1.0, 1.0), interpolation=interpolation)
    images = np.broadcast_to(image, (count, *image.shape))
    out = np.asarray(batched(crop.random_resized_crop, split(count), images, **options))
    assert np.mean(np.any((out < 100) | (out > 150), axis=(1, 2, 3))) == overshoots
