"""Color operations against Pillow and torchvision's definitions."""

import functools
import itertools

import jax
import numpy as np
import pytest
import sklearn.datasets
from PIL import Image, ImageEnhance, ImageOps

from structinit_jax.augment import color

RNG = np.random.default_rng(0)
COLORS = RNG.integers(0, 256, (50, 1000, 3), dtype=np.uint8)
# Few values, so that grays, primary colors and ties between channels occur.
EDGES = RNG.choice(np.array([0, 1, 127, 128, 254, 255], np.uint8), (50, 1000, 3))
ENHANCERS = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)


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


def pillow_adjust_hue(pixels, shift):
    """torchvision's adjust_hue of a Pillow image."""
    hue, *others = Image.fromarray(pixels).convert("HSV").split()
    shifted = np.asarray(hue) + np.int32(255 * shift).astype(np.uint8)
    return np.asarray(Image.merge("HSV", [Image.fromarray(shifted), *others]).convert("RGB"))


@jax.jit
def adjust_hue(images, shifts):
    return jax.vmap(color.adjust_hue)(images.transpose(0, 3, 1, 2), shifts).transpose(0, 2, 3, 1)


@pytest.mark.parametrize("shift", [-0.5, -0.1, 0.0, 0.37, 0.5])
def test_hue_shift_matches_pillow(shift):
    images = np.stack([COLORS, EDGES])
    ours = adjust_hue(images, np.full(2, shift, np.float32))
    for got, pixels, rate in zip(np.asarray(ours, np.int32), images, (0.003, 0.02), strict=True):
        difference = np.abs(got - pillow_adjust_hue(pixels, shift)).max(axis=-1)
        assert difference.max() <= 6  # one hue step
        assert np.mean(difference > 0) < rate


@functools.partial(jax.jit, static_argnums=2)
def color_jitter(rngs, images, strengths):
    jitter = functools.partial(color.color_jitter, strengths=strengths)
    return jax.vmap(jitter)(rngs, images)


def pillow_jitter(pixels, order, factors):
    for i in order:
        if i < 3:
            enhancer = ENHANCERS[i](Image.fromarray(pixels))
            pixels = np.asarray(enhancer.enhance(float(factors[i])))
        else:
            pixels = pillow_adjust_hue(pixels, factors[3])
    return pixels.astype(np.int32)


@pytest.mark.parametrize(
    ("strengths", "count"), [((0.4, 0.3, 1.5), 48), ((0.4, 0.3, 0.5, 0.2), 72)]
)
def test_color_jitter_matches_pillow_in_some_order(strengths, count):
    """Factors are drawn from the random keys as in the function; images come from Pillow."""
    image = Image.fromarray(sklearn.datasets.load_sample_images().images[1]).resize((20, 15))
    pixels, num = np.asarray(image), len(strengths)
    rngs = jax.random.split(jax.random.key(0), count)
    out = np.asarray(color_jitter(rngs, np.stack([pixels] * count), strengths), np.int32)
    uniform = jax.vmap(lambda rng: jax.random.uniform(jax.random.split(rng)[1], (num,)))(rngs)
    center, strength = np.array([1, 1, 1, 0])[:num], np.array(strengths)
    low, high = center - strength, center + strength
    low[:3] = np.maximum(low[:3], 0)
    factors = low + (high - low) * np.asarray(uniform)
    seen = set()
    for ours, drawn in zip(out, factors, strict=True):
        differences = {
            order: np.abs(pillow_jitter(pixels, order, drawn) - ours)
            for order in itertools.permutations(range(num))
        }
        best = min(differences, key=lambda order: differences[order].mean())
        # Rounding differences of 1 may grow in the next operation.
        assert differences[best].max() <= 2 if num == 3 else differences[best].mean() < 0.5
        seen.add(best)
    assert len(seen) == 6 if num == 3 else len(seen) > 18  # of 24
    assert np.all(factors.min(axis=0) < low + 0.15 * (high - low))
    assert np.all(factors.max(axis=0) > high - 0.15 * (high - low))


def test_without_hue_colors_take_no_way_through_hsv():
    pixels = RNG.integers(0, 256, (2, 8, 8, 3)).astype(np.uint8)
    rngs = jax.random.split(jax.random.key(0), 2)
    np.testing.assert_array_equal(color_jitter(rngs, pixels, (0.0, 0.0, 0.0, 0.0)), pixels)
    three, four = (color_jitter(rngs, pixels, (0.4, 0.3, 0.5, *hue)) for hue in ((), (0.0,)))
    np.testing.assert_array_equal(three, four)
