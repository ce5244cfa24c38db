import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from structinit_jax.augment.mix import (
    MixOptions,
    beta_quantile,
    draw_mixing,
    mix,
    smooth_one_hot,
)

REFERENCE = np.load(pathlib.Path(__file__).with_name("references") / "augment.npz")
KEY = jax.random.key(0)
BATCH = 12
IMAGES = jnp.asarray(np.random.default_rng(0).normal(size=(BATCH, 6, 8, 3)), jnp.float32)
TARGETS = jnp.eye(BATCH)


def test_draws_are_distributed_as_timms():
    theirs = REFERENCE["mix_both"]
    options = MixOptions(mixup=0.8, cutmix=1.0, probability=0.9, switch=0.4)
    drawn = draw_mixing(KEY, len(theirs), 24, 40, options)
    # timm counts a batch that is not mixed as mixup.
    boxed = np.asarray(drawn.use_cutmix & (drawn.kept < 1))
    table = [np.bincount(flags.astype(int)) for flags in (boxed, theirs[:, 1] == 1)]
    assert stats.chi2_contingency(table).pvalue > 0.01
    ours = np.stack([np.asarray(drawn.kept), *map(np.asarray, drawn.boxes)], axis=1)
    top, bottom, left, right = theirs[:, 2:].T
    sizes = np.stack([theirs[:, 0], top, left, bottom - top, right - left], axis=1)
    for a, b in zip(ours[boxed].T, sizes[(theirs[:, 1] == 1) & (theirs[:, 0] < 1)].T, strict=True):
        assert stats.ks_2samp(a, b).pvalue > 0.001
    assert stats.ks_2samp(ours[~boxed, 0], theirs[theirs[:, 1] == 0, 0]).pvalue > 0.001


@pytest.mark.parametrize("alpha", [0.2])
def test_mixup_alone_is_distributed_as_timms(alpha):
    theirs = REFERENCE["mix_mixup"][:, 0]
    drawn = draw_mixing(KEY, len(theirs), 24, 40, MixOptions(mixup=alpha))
    assert not drawn.use_cutmix.any()
    assert stats.ks_2samp(np.asarray(drawn.kept), theirs).pvalue > 0.001


def test_a_batch_is_mixed_as_by_timm(monkeypatch):
    from structinit_jax.augment import mix as module

    def fixed(key, num_groups, height, width, options):
        drawn = draw_mixing(key, num_groups, height, width, options)
        return drawn._replace(kept=jnp.full(num_groups, 0.3))

    monkeypatch.setattr(module, "draw_mixing", fixed)
    targets = smooth_one_hot(jnp.asarray(REFERENCE["mixed_labels"]), 4, 0.1)
    inputs = jnp.asarray(REFERENCE["mixed_inputs"])
    images, targets = mix(KEY, inputs, targets, MixOptions(mixup=0.8))
    np.testing.assert_allclose(images, REFERENCE["mixed_images"], atol=1e-6)
    np.testing.assert_allclose(targets, REFERENCE["mixed_targets"], atol=1e-6)


def partner_of(index, group):
    if group <= 1:
        return BATCH - 1 - index
    start = index // group * group
    return start + group - 1 - (index - start)


@pytest.mark.parametrize("group", [0, 1, 2, 4])
def test_cutmix_targets_are_the_shares_of_the_pixels(group):
    images, targets = mix(KEY, IMAGES, TARGETS, MixOptions(cutmix=1.0, group=group))
    shares = set()
    for i in range(BATCH):
        partner = partner_of(i, group)
        own = np.all(np.asarray(images[i] == IMAGES[i]), axis=-1)
        others = np.all(np.asarray(images[i] == IMAGES[partner]), axis=-1)
        assert np.all(own | others)
        np.testing.assert_allclose(targets[i, i], own.mean(), atol=1e-6)
        np.testing.assert_allclose(targets[i, partner], 1 - own.mean(), atol=1e-6)
        shares.add(own.tobytes())
    groups = {0: 1, 1: BATCH, 2: 6, 4: 3}[group]
    assert groups / 2 <= len(shares) <= groups


@pytest.mark.parametrize("group", [0, 1, 4])
def test_mixup_mixes_images_as_targets(group):
    images, targets = mix(KEY, IMAGES, TARGETS, MixOptions(mixup=1.0, group=group))
    expected = jnp.einsum("ij,jhwc->ihwc", targets, IMAGES)
    np.testing.assert_allclose(images, expected, atol=1e-5)
    own = np.diag(targets)
    assert np.all((own > 0) & (own < 1))
    assert len(np.unique(own)) == {0: 1, 1: BATCH, 4: 3}[group]
    for i in range(BATCH):
        np.testing.assert_allclose(targets[i, partner_of(i, group)], 1 - own[i], atol=1e-6)


def test_probability_zero_mixes_nothing():
    options = MixOptions(mixup=0.8, cutmix=1.0, probability=0.0, group=1)
    images, targets = mix(KEY, IMAGES, TARGETS, options)
    np.testing.assert_array_equal(images, IMAGES)
    np.testing.assert_array_equal(targets, TARGETS)


@pytest.mark.parametrize("alpha", [0.2, 0.8, 1.0, 4.0])
def test_quantiles_are_those_of_the_beta_distribution(alpha):
    levels = np.linspace(0, 1, 1001, dtype=np.float32)
    actual = jax.vmap(lambda level: beta_quantile(level, alpha))(jnp.asarray(levels))
    np.testing.assert_allclose(actual, stats.beta.ppf(levels, alpha, alpha), atol=1e-3)
