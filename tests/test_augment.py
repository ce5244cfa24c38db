import re

import jax
import jax.numpy as jnp
import numpy as np
import references
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from structinit_jax.augment import make_augment
from structinit_jax.augment import mix as mix_lib
from structinit_jax.config import base_config

REFERENCE = references.load("train_script")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
RECIPE = dict(crop="pad", flip=0.5, rand_augment="rand-m9-mstd0.5-inc1", erasing=0.5)
RECIPE |= dict(mixup=0.8, cutmix=1.0, mix_group=2)
IMAGES = np.random.default_rng(0).integers(0, 256, (16, 16, 16, 3)).astype(np.uint8)
LABELS = np.arange(16, dtype=np.int32) % 5


def make(num_classes=5, label_smoothing=0.0, mesh=None, **fields):
    """An augmentation with the given fields of `config.augment` and defaults for the others."""
    config = base_config().augment
    config.update(fields)
    options = dict(num_classes=num_classes, label_smoothing=label_smoothing, mesh=mesh)
    return make_augment(config, mean=MEAN, std=STD, **options)


whole_recipe = jax.jit(make(label_smoothing=0.1, **RECIPE))


def test_an_image_is_a_function_of_the_random_key_and_of_its_group():
    images, targets = whole_recipe(jax.random.key(1), IMAGES, LABELS)
    assert images.shape == (16, 16, 16, 3)
    assert images.dtype == targets.dtype == jnp.float32
    np.testing.assert_allclose(targets.sum(axis=1), 1, rtol=1e-6)
    changed = np.concatenate([IMAGES[:2], 255 - IMAGES[2:]])
    again = whole_recipe(jax.random.key(1), changed, LABELS)
    np.testing.assert_array_equal(again[0][:2], images[:2])
    np.testing.assert_array_equal(again[1], targets)
    assert np.all(np.any(np.asarray(again[0] != images)[2:], axis=(1, 2, 3)))
    assert np.any(np.asarray(whole_recipe(jax.random.key(2), IMAGES, LABELS)[0]) != images)


def test_result_is_the_same_on_one_and_on_eight_devices():
    mesh = Mesh(np.asarray(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
    sharded = NamedSharding(mesh, PartitionSpec("data"))
    batch = jax.device_put((IMAGES, LABELS), sharded)
    rng = jax.random.key(1)
    augment = make(label_smoothing=0.1, mesh=mesh, **RECIPE)
    step = jax.jit(augment, out_shardings=sharded).lower(rng, *batch).compile()
    for a, b in zip(step(rng, *batch), whole_recipe(rng, IMAGES, LABELS), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    # Both images of a group are on one device, so nothing moves between devices.
    collectives = "all-gather|all-reduce|all-to-all|collective-permute"
    assert not re.findall(rf"= (\S+) (?:{collectives})\(", step.as_text())


def test_crops_pad_by_four_pixels_flips_are_as_likely_as_given_and_warps_show_the_mean():
    def augment(images, **fields):
        labels = np.zeros(len(images), np.int32)
        images, _ = jax.jit(make(**fields))(jax.random.key(0), images, labels)
        return np.rint(255 * (np.asarray(images) * STD + MEAN))

    white = np.full((64, 16, 16, 3), 255, np.uint8)
    black = np.all(augment(white, crop="pad") == 0, axis=(2, 3)).sum(axis=1)
    assert black.max() == 4
    np.testing.assert_array_equal(augment(IMAGES, flip=1.0), IMAGES[:, :, ::-1])
    np.testing.assert_array_equal(augment(IMAGES, vertical_flip=1.0), IMAGES[:, ::-1])
    warped = augment(white, rand_augment="rand-m9-n1")
    assert np.any(np.all(warped == np.rint(255 * np.array(MEAN)), axis=-1))


def test_the_box_of_an_image_is_not_erased_in_its_partner():
    augment = jax.jit(make(erasing=1.0, mixup=1.0))
    images, _ = augment(jax.random.key(0), np.zeros_like(IMAGES), LABELS)
    erased = np.any(np.abs(np.asarray(images) + np.divide(MEAN, STD)) > 1e-5, axis=-1)
    assert np.all(np.any(erased, axis=(1, 2)))
    assert np.all(np.any(erased != erased[::-1], axis=(1, 2)))


def test_pixels_are_mixed_as_by_timms_train_script(monkeypatch):
    inputs, labels, images, targets = (
        REFERENCE[f"augmentation/{name}"] for name in ("inputs", "labels", "images", "targets")
    )
    draw = mix_lib.draw_mixing
    fixed = lambda *args, **options: (jnp.float32(0.3), *draw(*args, **options)[1:])  # noqa: E731
    monkeypatch.setattr(mix_lib, "draw_mixing", fixed)
    augment = jax.jit(make(num_classes=4, label_smoothing=0.1, mixup=0.8))
    ours = augment(jax.random.key(0), jnp.asarray(inputs), jnp.asarray(labels))
    np.testing.assert_allclose(ours[0], images, atol=2e-6)
    np.testing.assert_allclose(ours[1], targets, atol=1e-6)
