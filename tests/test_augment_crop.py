import functools

import jax
import numpy as np
from scipy import stats

from structinit_jax.augment import crop


def batched(function, rngs, *arrays, **options):
    return jax.jit(jax.vmap(functools.partial(function, **options)))(rngs, *arrays)


def split(count):
    return jax.random.split(jax.random.key(0), count)


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
