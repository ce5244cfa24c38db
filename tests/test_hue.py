import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from structinit_jax.augment.hue import turn_hue

RNG = np.random.default_rng(0)
COLOURS = RNG.integers(0, 256, (50, 1000, 3), dtype=np.uint8)
# Few levels, so that greys, primary colours and ties between channels are among them.
EDGES = RNG.choice(np.array([0, 1, 127, 128, 254, 255], np.uint8), (50, 1000, 3))


def pillow_turn(pixels, turn):
    """torchvision's adjust_hue of a Pillow image."""
    hue, *others = Image.fromarray(pixels).convert("HSV").split()
    turned = np.asarray(hue) + np.int32(255 * turn).astype(np.uint8)
    return np.asarray(Image.merge("HSV", [Image.fromarray(turned), *others]).convert("RGB"))


@jax.jit
def our_turn(images, turn):
    return turn_hue(images.transpose(0, 3, 1, 2), turn).transpose(0, 2, 3, 1)


@pytest.mark.parametrize("turn", [-0.5, -0.1, 0.0, 0.37, 0.5])
def test_hues_turn_as_in_pillow(turn):
    images = np.stack([COLOURS, EDGES])
    ours = our_turn(jnp.asarray(images), jnp.full(2, turn, jnp.float32))
    for got, pixels, share in zip(np.asarray(ours, np.int32), images, (0.003, 0.02), strict=True):
        difference = np.abs(got - pillow_turn(pixels, turn)).max(axis=-1)
        assert difference.max() <= 6  # one hue level
        assert np.mean(difference > 0) < share


def test_each_image_turns_by_its_own_part_and_grey_stays():
    turns = jnp.asarray([0.0, 0.25], jnp.float32)
    images = jnp.broadcast_to(jnp.asarray(EDGES)[None], (2, *EDGES.shape))
    out = np.asarray(our_turn(images, turns))
    assert (out[0] == EDGES).mean() > 0.5 > (out[1] == EDGES).mean()
    np.testing.assert_array_equal(our_turn(images[..., :1], turns), images[..., :1])
    grey = EDGES.min(axis=-1) == EDGES.max(axis=-1)
    assert grey.sum() > 100
    np.testing.assert_array_equal(out[:, grey], np.stack([EDGES[grey]] * 2))
