import functools

import jax
import numpy as np
from PIL import Image, ImageOps
from scipy import stats

from structinit_jax.augment import transforms


def batched(function, rngs, *arrays, **options):
    return jax.jit(jax.vmap(functools.partial(function, **options)))(rngs, *arrays)


def split(count):
    return jax.random.split(jax.random.key(0), count)


def test_flips_are_mirror_images_of_half_the_batch():
    images = np.random.default_rng(0).integers(0, 256, (400, 3, 4, 1)).astype(np.uint8)
    out = np.asarray(batched(transforms.random_flip, split(400), images, probability=0.5))
    flipped = np.all(out == images[:, :, ::-1], axis=(1, 2, 3))
    assert 150 < flipped.sum() < 250
    np.testing.assert_array_equal(out[~flipped], images[~flipped])


def test_pad_crops_are_uniform_windows_of_the_padded_image():
    images = np.random.default_rng(0).integers(1, 256, (900, 5, 6, 1)).astype(np.uint8)
    out = np.asarray(batched(transforms.random_pad_crop, split(900), images))
    places = []
    for image, window in zip(images, out, strict=True):
        padded = np.pad(image, ((4, 4), (4, 4), (0, 0)))
        every = [(y, x) for y in range(9) for x in range(9)]
        places += [p for p in every if np.all(padded[p[0] :, p[1] :][:5, :6] == window)][:1]
    counts = np.bincount([9 * y + x for y, x in places], minlength=81)
    assert counts.sum() == 900
    assert stats.chisquare(counts).pvalue > 0.001


def test_autocontrast_matches_pillow_but_for_whole_quotients_that_it_truncates():
    """For every fifth of the 32,896 pairs of lowest and highest values."""
    low, high = (values[::5] for values in np.triu_indices(256))
    rows = np.clip(np.arange(256), low[:, None], high[:, None]).astype(np.uint8)
    images = np.pad(rows, ((0, -len(rows) % 3), (0, 0))).reshape(-1, 3, 256)
    luts = np.asarray(jax.jit(jax.vmap(transforms.autocontrast_lut))(images[:, :, None]))
    ours = np.take_along_axis(luts, images.astype(int), axis=-1)
    pixels = np.ascontiguousarray(images.swapaxes(1, 2))[:, None]
    theirs = np.stack([np.asarray(ImageOps.autocontrast(Image.fromarray(x)))[0] for x in pixels])
    difference = ours - theirs.swapaxes(1, 2)
    lowest, highest = (f(images.astype(int), -1, keepdims=True) for f in (np.min, np.max))
    whole = (images - lowest) * 255 % np.maximum(highest - lowest, 1) == 0
    assert set(difference[whole]) == {0, 1}
    assert not np.any(difference[~whole])
