import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.datasets
from PIL import Image
from scipy import stats

from structinit_jax.augment import boxes, crop
from structinit_jax.augment.erase import random_erasing

REFERENCE = np.load(pathlib.Path(__file__).with_name("references") / "augment.npz")
IMAGES = np.stack(
    [
        np.asarray(Image.fromarray(image).resize((48, 32)))
        for image in sklearn.datasets.load_sample_images().images
    ]
    * 4
)


def keys(count, seed=0):
    return jax.random.split(jax.random.key(seed), count)


def same_distribution(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert stats.ks_2samp(np.asarray(a), b).pvalue > 0.001


def with_area(top, left, height, width):
    top, left, height, width = (np.asarray(x, int) for x in (top, left, height, width))
    return top, left, height, width, height * width, top + height, left + width


@pytest.mark.parametrize(
    ("name", "size", "scale"),
    [("crops", (24, 40), (0.08, 1.0)), ("crops_wide", (10, 40), (0.9, 1.0))],
)
def test_crop_boxes_are_distributed_as_timms(name, size, scale):
    theirs = REFERENCE[name]
    drawn = boxes.crop_boxes(keys(len(theirs)), *size, scale, (3 / 4, 4 / 3))
    same_distribution(with_area(*drawn), with_area(*theirs.T))
    if name == "crops_wide":  # no box fits: the central one
        assert set(map(tuple, theirs)) == {tuple(int(field[0]) for field in drawn)}


def test_erased_boxes_are_distributed_as_timms():
    theirs = REFERENCE["erased"]
    ones = jnp.ones((len(theirs), 24, 40, 1))
    out = random_erasing(keys(len(theirs)), ones, 0.25, "const")
    gone = np.asarray(out[..., 0] == 0)
    rows, columns = gone.any(2), gone.any(1)
    drawn = rows.argmax(1), columns.argmax(1), rows.sum(1), columns.sum(1)
    np.testing.assert_array_equal(gone.sum((1, 2)), drawn[2] * drawn[3])  # they are boxes
    same_distribution(with_area(*drawn), with_area(*theirs.T))


def test_what_fills_erased_boxes():
    ones = jnp.full((64, 16, 16, 3), 5.0)
    seen = {
        mode: np.asarray(random_erasing(keys(64), ones, 1.0, mode))
        for mode in ("const", "rand", "pixel")
    }
    erased = seen["const"] != 5
    assert np.all(seen["const"][erased] == 0)
    for mode in ("rand", "pixel"):
        np.testing.assert_array_equal(seen[mode] != 5, erased)
    for image, mask in zip(seen["rand"], erased, strict=True):
        assert len(np.unique(image[mask])) == 3
    assert stats.kstest(seen["pixel"][erased], "norm").pvalue > 0.001
    assert len(np.unique(seen["pixel"][erased])) > 0.99 * erased.sum()


def test_flips_are_mirror_images_of_half_the_batch():
    images = np.random.default_rng(0).integers(0, 256, (400, 3, 4, 1)).astype(np.uint8)
    out = np.asarray(crop.random_flip(keys(400), jnp.asarray(images), 0.5))
    flipped = np.all(out == images[:, :, ::-1], axis=(1, 2, 3))
    assert 150 < flipped.sum() < 250
    np.testing.assert_array_equal(out[~flipped], images[~flipped])


def test_pad_crops_are_windows_of_the_padded_image():
    images = np.random.default_rng(0).integers(1, 256, (300, 5, 6, 1)).astype(np.uint8)
    out = np.asarray(crop.random_pad_crop(keys(300), jnp.asarray(images), 2))
    places = []
    for image, window in zip(images, out, strict=True):
        padded = np.pad(image, ((2, 2), (2, 2), (0, 0)))
        every = [(y, x) for y in range(5) for x in range(5)]
        places += [p for p in every if np.all(padded[p[0] :, p[1] :][:5, :6] == window)][:1]
    counts = np.bincount([5 * y + x for y, x in places], minlength=25)
    assert counts.sum() == 300
    assert stats.chisquare(counts).pvalue > 0.001


@pytest.mark.parametrize("size", [24, 100])
def test_resized_crops_are_pillows_within_a_level(size):
    """Smaller and larger. Pillow's weights are 22-bit integers: it rounds halves differently."""
    count = len(IMAGES)
    box = boxes.crop_boxes(keys(count, 5), 32, 48, (0.2, 1.0), (3 / 4, 4 / 3))
    bicubic = np.arange(count) % 2 == 1
    out = crop.resize_boxes(jnp.asarray(IMAGES), box, size, jnp.asarray(bicubic))
    differences = []
    for i, image in enumerate(IMAGES):
        top, left, height, width = (int(field[i]) for field in box)
        cut = Image.fromarray(image).crop((left, top, left + width, top + height))
        resample = Image.Resampling.BICUBIC if bicubic[i] else Image.Resampling.BILINEAR
        theirs = np.asarray(cut.resize((size, size), resample), np.int32)
        differences.append(np.abs(np.asarray(out[i], np.int32) - theirs))
    assert np.max(differences) <= 1
    # Half the pixels or so of a crop whose weights give many halves, hardly any of the others.
    assert np.mean(np.array(differences) > 0) < 0.05
    assert np.median(np.mean(np.array(differences) > 0, axis=(1, 2, 3))) < 0.005


def test_whole_image_at_its_own_size_stays_as_it_is():
    square = jnp.asarray(IMAGES[:, :, :32])
    out = crop.random_resized_crop(
        keys(len(IMAGES)), square, 32, scale=(1.0, 1.0), ratio=(1.0, 1.0), interpolation="random"
    )
    np.testing.assert_array_equal(np.asarray(out), np.asarray(square))
