import jax
import numpy as np
from PIL import Image, ImageOps

from structinit_jax.augment import tables


def test_autocontrast_is_pillows_for_every_darkest_and_brightest_level():
    """32,896 pairs, among them those where double precision cuts a whole quotient off one lower."""
    low, high = np.triu_indices(256)
    rows = np.clip(np.arange(256), low[:, None], high[:, None]).astype(np.uint8)
    images = np.pad(rows, ((0, -len(rows) % 3), (0, 0))).reshape(-1, 3, 256).swapaxes(1, 2)
    ours = np.asarray(jax.jit(tables.autocontrast)(images.swapaxes(1, 2)[:, :, None]))
    exact = (images.swapaxes(1, 2).astype(int) - images.min(axis=1)[..., None]) * 255
    span = (images.max(axis=1).astype(int) - images.min(axis=1))[..., None]
    lower = 0
    for i, image in enumerate(images):
        theirs = np.asarray(ImageOps.autocontrast(Image.fromarray(image[None])))[0]
        looked_up = np.take_along_axis(ours[i], image.T.astype(int), axis=1).T
        np.testing.assert_array_equal(looked_up, theirs)
        lower += np.sum((exact[i] // np.maximum(span[i], 1) > theirs.T) & (span[i] > 0))
    assert lower > 100  # so whole-number division would not do


def test_equalize_is_pillows_on_even_and_uneven_histograms():
    random = np.random.default_rng(0)
    images = [
        random.integers(0, 256, (20, 31, 3)),
        random.normal(100, 9, (20, 31, 3)).clip(0, 255),
        random.choice([3, 200], (20, 31, 3)),
        np.where(np.arange(31)[None, :, None] < 30, 7, random.integers(0, 256, (20, 31, 3))),
        np.full((20, 31, 3), 40),  # one level: stays
        random.integers(0, 40, (20, 31, 3)) ** 2 / 7,
    ]
    batch = np.stack(images).astype(np.uint8)
    equalized = jax.jit(tables.equalize)(batch.transpose(0, 3, 1, 2)).transpose(0, 2, 3, 1)
    for ours, image in zip(equalized, batch, strict=True):
        theirs = np.asarray(ImageOps.equalize(Image.fromarray(image)))
        np.testing.assert_array_equal(np.asarray(ours), theirs)
