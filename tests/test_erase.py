import functools
import pathlib

import jax
import numpy as np
from scipy import stats

from structinit_jax.augment.mix import random_erasing

REFERENCE = np.load(pathlib.Path(__file__).with_name("references") / "augment.npz")


@functools.partial(jax.jit, static_argnums=(1, 2))
def erase(images, probability, mode):
    rngs = jax.random.split(jax.random.key(0), len(images))
    return random_erasing(rngs, images, probability, mode)


def test_boxes_are_distributed_as_in_timm():
    def with_area(top, left, height, width):
        return top, left, height, width, height * width, top + height, left + width

    theirs = REFERENCE["erased"]
    images = np.ones((len(theirs), 24, 40, 1), np.float32)
    erased = np.asarray(erase(images, 0.25, "const")[..., 0] == 0)
    rows, columns = erased.any(2), erased.any(1)
    drawn = rows.argmax(1), columns.argmax(1), rows.sum(1), columns.sum(1)
    np.testing.assert_array_equal(erased.sum((1, 2)), drawn[2] * drawn[3])  # they are boxes
    for a, b in zip(with_area(*drawn), with_area(*theirs.T.astype(int)), strict=True):
        assert stats.ks_2samp(a, b).pvalue > 0.001


def test_modes_fill_the_same_boxes_with_zeros_colors_or_noise():
    images = np.full((64, 16, 16, 3), 5, np.float32)
    out = {mode: np.asarray(erase(images, 1.0, mode)) for mode in ("const", "rand", "pixel")}
    erased = out["const"] != 5
    assert np.all(out["const"][erased] == 0)
    for mode in ("rand", "pixel"):
        np.testing.assert_array_equal(out[mode] != 5, erased)
    for image, mask in zip(out["rand"], erased, strict=True):
        assert len(np.unique(image[mask])) == 3
    assert stats.kstest(out["pixel"][erased], "norm").pvalue > 0.001
    assert len(np.unique(out["pixel"][erased])) > 0.99 * erased.sum()
