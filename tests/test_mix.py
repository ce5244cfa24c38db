import functools
import pathlib

import jax
import numpy as np
import pytest
from scipy import stats

from structinit_jax.augment import mix as mix_lib

REFERENCE = np.load(pathlib.Path(__file__).with_name("references") / "augment.npz")
RNG = jax.random.key(0)
BATCH = 12
IMAGES = np.random.default_rng(0).normal(size=(BATCH, 6, 8, 3)).astype(np.float32)
TARGETS = np.eye(BATCH, dtype=np.float32)


def mix(images=IMAGES, targets=TARGETS, **options):
    run = jax.jit(functools.partial(mix_lib.mix, **options))
    return jax.device_get(run(RNG, images, targets))


def draw(count, **options):
    """λ, whether to use cutmix, and the fields of the boxes, each `[count]`."""
    options = dict(height=24, width=40, mixup=1.0, cutmix=1.0) | options
    function = functools.partial(mix_lib.draw_mixing, **options)
    lam, use_cutmix, box = jax.jit(jax.vmap(function))(jax.random.split(RNG, count))
    return np.asarray(lam), np.asarray(use_cutmix), [np.asarray(field) for field in box]


def test_draws_are_distributed_as_in_timm():
    theirs = REFERENCE["mix_both"]
    theirs = theirs[theirs[:, 0] < 1]  # timm left a tenth of its batches unmixed
    lam, boxed, box = draw(len(theirs), mixup=0.8, cutmix=1.0, switch=0.4)
    table = [np.bincount(flags.astype(int)) for flags in (boxed, theirs[:, 1] == 1)]
    assert stats.chi2_contingency(table).pvalue > 0.01
    ours = np.stack([lam, *box], axis=1)
    top, bottom, left, right = theirs[:, 2:].T
    sizes = np.stack([theirs[:, 0], top, left, bottom - top, right - left], axis=1)
    for a, b in zip(ours[boxed].T, sizes[theirs[:, 1] == 1].T, strict=True):
        assert stats.ks_2samp(a, b).pvalue > 0.001
    assert stats.ks_2samp(ours[~boxed, 0], theirs[theirs[:, 1] == 0, 0]).pvalue > 0.001


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_one_kind_alone_has_its_own_alpha(kind):
    theirs = REFERENCE["mix_mixup"][:, 0]  # with an alpha of 0.2
    count = len(theirs) // 2 * 2
    images, side = np.zeros((count, 24, 40, 1), np.float32), np.arange(count) * 2 // count
    _, targets = mix(images, np.eye(2, dtype=np.float32)[side], group=1, **{kind: 0.2})
    expected = theirs if kind == "mixup" else draw(count, cutmix=0.2, switch=1.0)[0]
    assert stats.ks_2samp(targets[np.arange(count), side], expected).pvalue > 0.001


def partner_of(index, group):
    if group <= 1:
        return BATCH - 1 - index
    start = index // group * group
    return start + group - 1 - (index - start)


@pytest.mark.parametrize("group", [0, 1, 2, 4])
def test_cutmix_targets_are_fractions_of_the_pixels(group):
    images, targets = mix(cutmix=1.0, group=group)
    masks = set()
    for i in range(BATCH):
        partner = partner_of(i, group)
        own = np.all(images[i] == IMAGES[i], axis=-1)
        others = np.all(images[i] == IMAGES[partner], axis=-1)
        assert np.all(own | others)
        np.testing.assert_allclose(targets[i, i], own.mean(), atol=1e-6)
        np.testing.assert_allclose(targets[i, partner], 1 - own.mean(), atol=1e-6)
        masks.add(own.tobytes())
    groups = {0: 1, 1: BATCH, 2: 6, 4: 3}[group]
    assert groups / 2 <= len(masks) <= groups


@pytest.mark.parametrize("group", [0, 1, 4])
def test_mixup_interpolates_images_like_targets(group):
    images, targets = mix(mixup=1.0, group=group)
    np.testing.assert_allclose(images, np.einsum("ij,jhwc->ihwc", targets, IMAGES), atol=1e-5)
    own = np.diag(targets)
    assert np.all((own > 0) & (own < 1))
    assert len(np.unique(own)) == {0: 1, 1: BATCH, 4: 3}[group]
    for i in range(BATCH):
        np.testing.assert_allclose(targets[i, partner_of(i, group)], 1 - own[i], atol=1e-6)


def test_groups_use_either_kind_with_equal_probability():
    images = np.repeat(np.float32([0, 1]), 200).reshape(400, 1, 1, 1)
    targets = np.eye(2, dtype=np.float32)[np.repeat([0, 1], 200)]
    mixed, _ = mix(np.tile(images, (1, 6, 8, 1)), targets, mixup=1.0, cutmix=1.0, group=1)
    boxed = np.all((mixed == 0) | (mixed == 1), axis=(1, 2, 3))
    assert 150 < boxed.sum() < 250


@pytest.mark.parametrize("alpha", [0.2, 0.8, 1.0, 4.0])
def test_quantiles_are_those_of_the_beta_distribution(alpha):
    probabilities = np.linspace(0, 1, 1001, dtype=np.float32)
    quantile = functools.partial(mix_lib.beta_quantile, alpha=alpha)
    actual = jax.jit(jax.vmap(quantile))(probabilities)
    np.testing.assert_allclose(actual, stats.beta.ppf(probabilities, alpha, alpha), atol=1e-3)


@functools.partial(jax.jit, static_argnums=1)
def erase(images, probability):
    rngs = jax.random.split(jax.random.key(0), len(images))
    return mix_lib.random_erasing(rngs, images, probability)


def test_boxes_are_distributed_as_in_timm():
    def with_area(top, left, height, width):
        return top, left, height, width, height * width, top + height, left + width

    theirs = REFERENCE["erased"]
    images = np.ones((len(theirs), 24, 40, 1), np.float32)
    erased = np.asarray(erase(images, 0.25)[..., 0] != 1)
    rows, columns = erased.any(2), erased.any(1)
    drawn = rows.argmax(1), columns.argmax(1), rows.sum(1), columns.sum(1)
    np.testing.assert_array_equal(erased.sum((1, 2)), drawn[2] * drawn[3])  # they are boxes
    for a, b in zip(with_area(*drawn), with_area(*theirs.T.astype(int)), strict=True):
        assert stats.ks_2samp(a, b).pvalue > 0.001


def test_boxes_are_filled_with_noise():
    images = np.full((64, 16, 16, 3), 5, np.float32)
    out = np.asarray(erase(images, 1.0))
    noise = out[out != 5]
    assert stats.kstest(noise, "norm").pvalue > 0.001
    assert len(np.unique(noise)) > 0.99 * len(noise)
