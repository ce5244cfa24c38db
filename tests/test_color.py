import jax
import numpy as np
from PIL import Image, ImageOps

from structinit_jax.augment import color


def test_autocontrast_matches_pillow_for_every_pair_of_lowest_and_highest_value():
    """32,896 pairs, including those for which double precision truncates an integer quotient."""
    low, high = np.triu_indices(256)
    rows = np.clip(np.arange(256), low[:, None], high[:, None]).astype(np.uint8)
    images = np.pad(rows, ((0, -len(rows) % 3), (0, 0))).reshape(-1, 3, 256)
    luts = np.asarray(jax.jit(jax.vmap(color.autocontrast_lut))(images[:, :, None]))
    ours = np.take_along_axis(luts, images.astype(int), axis=-1)
    pixels = np.ascontiguousarray(images.swapaxes(1, 2))[:, None]
    theirs = np.stack([np.asarray(ImageOps.autocontrast(Image.fromarray(x)))[0] for x in pixels])
    theirs = theirs.swapaxes(1, 2)
    np.testing.assert_array_equal(ours, theirs)
    lowest, highest = (f(images.astype(int), -1, keepdims=True) for f in (np.min, np.max))
    quotient = (images - lowest) * 255 // np.maximum(highest - lowest, 1)
    # Integer division alone would not do.
    assert np.sum((quotient > theirs) & (highest > lowest)) > 100
