import itertools

import jax
import jax.numpy as jnp
import numpy as np
import sklearn.datasets
from PIL import Image, ImageEnhance
from test_hue import pillow_turn

from structinit_jax.augment.jitter import color_jitter

STRENGTHS = (0.4, 0.3, 1.5)
ENHANCERS = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
ORDERS = [(a, b, 3 - a - b) for a in range(3) for b in range(3) if a != b]


def test_each_image_is_one_of_pillows_enhanced_in_some_order():
    """Draws are read off the keys as the function does; the images come from Pillow."""
    image = Image.fromarray(sklearn.datasets.load_sample_images().images[1]).resize((40, 30))
    count = 48
    keys = jax.random.split(jax.random.key(0), count)
    batch = jnp.broadcast_to(jnp.asarray(np.asarray(image))[None], (count, 30, 40, 3))
    out = np.asarray(jax.jit(color_jitter, static_argnums=2)(keys, batch, STRENGTHS), np.int32)
    seen, factors = set(), []
    for key, ours in zip(keys, out, strict=True):
        uniform = np.asarray(jax.random.uniform(jax.random.split(key)[1], (3,)))
        low = np.maximum(1 - np.array(STRENGTHS), 0)
        factors.append(low + (1 + np.array(STRENGTHS) - low) * uniform)
        differences = {}
        for order in ORDERS:
            theirs = image
            for i in order:
                theirs = ENHANCERS[i](theirs).enhance(float(factors[-1][i]))
            differences[order] = np.abs(np.asarray(theirs, np.int32) - ours).max()
        best = min(differences, key=differences.get)
        assert differences[best] <= 2  # a level's rounding may grow in the next change
        seen.add(best)
    assert seen == set(ORDERS)
    assert np.all(np.min(factors, axis=0) < [0.65, 0.75, 0.3])
    assert np.all(np.max(factors, axis=0) > [1.35, 1.25, 2.2])


def test_a_fourth_strength_turns_hues_in_any_order():
    image = Image.fromarray(sklearn.datasets.load_sample_images().images[1]).resize((20, 15))
    strengths, count = (0.4, 0.3, 0.5, 0.2), 72
    keys = jax.random.split(jax.random.key(1), count)
    batch = jnp.broadcast_to(jnp.asarray(np.asarray(image))[None], (count, 15, 20, 3))
    out = np.asarray(jax.jit(color_jitter, static_argnums=2)(keys, batch, strengths), np.int32)
    seen, turns = set(), []
    for key, ours in zip(keys, out, strict=True):
        uniform = np.asarray(jax.random.uniform(jax.random.split(key)[1], (4,)), np.float64)
        factors = np.array([1, 1, 1, 0]) + np.array(strengths) * (2 * uniform - 1)
        turns.append(factors[3])
        differences = {}
        for order in itertools.permutations(range(4)):
            theirs = np.asarray(image)
            for i in order:
                if i < 3:
                    enhancer = ENHANCERS[i](Image.fromarray(theirs))
                    theirs = np.asarray(enhancer.enhance(float(factors[i])))
                else:
                    theirs = pillow_turn(theirs, factors[3])
            differences[order] = np.mean(np.abs(theirs.astype(np.int32) - ours))
        best = min(differences, key=differences.get)
        assert differences[best] < 0.5
        seen.add(best)
    assert len(seen) > 18  # of 24
    assert -0.2 <= min(turns) < -0.17
    assert 0.17 < max(turns) <= 0.2


def test_one_channel_has_no_saturation_and_no_hue():
    grey = jnp.asarray(np.random.default_rng(0).integers(0, 256, (8, 5, 5, 1)).astype(np.uint8))
    out = color_jitter(jax.random.split(jax.random.key(0), 8), grey, (0.0, 0.0, 1.0, 0.5))
    np.testing.assert_array_equal(out, grey)
