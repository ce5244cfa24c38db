import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from structinit_jax.augment import AugmentOptions, make_augment
from structinit_jax.errors import InputError

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
RECIPE = AugmentOptions(
    num_classes=5,
    mean=MEAN,
    std=STD,
    crop="resized",
    image_size=20,
    flip=0.5,
    rand_augment="rand-m9-mstd0.5-inc1",
    erasing=0.5,
    mixup=0.8,
    cutmix=1.0,
    mix_group=2,
    label_smoothing=0.1,
)
IMAGES = np.random.default_rng(0).integers(0, 256, (16, 16, 16, 3)).astype(np.uint8)
LABELS = np.arange(16, dtype=np.int32) % 5
whole_recipe = jax.jit(make_augment(RECIPE))


def only(**fields):
    return AugmentOptions(num_classes=5, mean=MEAN, std=STD, **fields)


def test_result_is_a_function_of_the_key():
    images, targets = whole_recipe(jax.random.key(1), IMAGES, LABELS)
    assert images.shape == (16, 20, 20, 3)
    assert images.dtype == targets.dtype == jnp.float32
    np.testing.assert_allclose(targets.sum(axis=1), 1, rtol=1e-6)
    again = whole_recipe(jax.random.key(1), IMAGES, LABELS)
    np.testing.assert_array_equal(again[0], images)
    np.testing.assert_array_equal(again[1], targets)
    assert np.any(np.asarray(whole_recipe(jax.random.key(2), IMAGES, LABELS)[0]) != images)


def test_result_is_the_same_on_one_and_on_eight_devices():
    mesh = Mesh(np.asarray(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
    sharded = NamedSharding(mesh, PartitionSpec("data"))
    batch = jax.device_put((IMAGES, LABELS), sharded)
    step = jax.jit(make_augment(RECIPE, mesh), out_shardings=sharded)
    key = jax.random.key(1)
    for a, b in zip(step(key, *batch), whole_recipe(key, IMAGES, LABELS), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    # Groups of two images lie whole on a device, so no array has to move between devices; only
    # the loop that draws λ asks all of them whether it is done.
    program = step.lower(key, *batch).compile().as_text()
    moves = "all-gather|all-reduce|all-to-all|collective-permute"
    moved = re.findall(rf"= (\S+) (?:{moves})\(", program)
    assert set(moved) <= {"pred[]"}


def test_an_image_is_changed_alike_whatever_lies_beside_it():
    options = dataclasses.replace(RECIPE, mixup=0.0, cutmix=0.0)
    augment = jax.jit(make_augment(options))
    other = IMAGES.copy()
    other[1:] = 255 - other[1:]
    a, _ = augment(jax.random.key(4), IMAGES, LABELS)
    b, _ = augment(jax.random.key(4), other, LABELS)
    np.testing.assert_array_equal(a[0], b[0])
    assert np.any(np.asarray(a[1]) != b[1])


def test_without_pieces_images_are_normalised_and_targets_smoothed():
    augment = make_augment(only(label_smoothing=0.1))
    images, targets = augment(jax.random.key(0), jnp.asarray(IMAGES), jnp.asarray(LABELS))
    np.testing.assert_allclose(images, (IMAGES / 255 - MEAN) / STD, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(targets, np.eye(5)[LABELS] * 0.9 + 0.02, atol=1e-6)


def test_colour_jitter_has_no_effect_once_rand_augment_is_on():
    key = jax.random.key(3)
    string = "rand-m9-inc1-n1"
    both = make_augment(only(rand_augment=string, color_jitter=(0.4, 0.4, 0.4)))
    alone = make_augment(only(rand_augment=string))
    a, b = (np.asarray(jax.jit(f)(key, IMAGES, LABELS)[0]) for f in (both, alone))
    np.testing.assert_array_equal(a, b)


def test_erasing_comes_before_or_after_mixing():
    recipe = dict(erasing=1.0, erasing_mode="const", mixup=5.0)
    key = jax.random.key(2)
    zeros = [
        np.mean(
            np.all(
                np.asarray(
                    make_augment(only(**recipe, erase_after_mixing=after))(
                        key, jnp.asarray(IMAGES), jnp.asarray(LABELS)
                    )[0]
                )
                == 0,
                axis=-1,
            )
        )
        for after in (True, False)
    ]
    assert zeros[0] > 0.1  # whole boxes of the mean colour
    assert zeros[1] < zeros[0] / 2  # only where two boxes meet


def test_grey_images_run_through_everything():
    options = dataclasses.replace(RECIPE, mean=(0.3,), std=(0.4,))
    images, _ = jax.jit(make_augment(options))(jax.random.key(0), IMAGES[..., :1], LABELS)
    assert images.shape == (16, 20, 20, 1)
    assert np.all(np.isfinite(images))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("flip", 1.5),
        ("crop", "centre"),
        ("interpolation", "nearest"),
        ("erasing_mode", "noise"),
        ("mixup", -0.1),
        ("label_smoothing", 1.0),
        ("crop_scale", (0.5, 0.1)),
        ("crop_ratio", (0.0, 1.0)),
        ("image_size", 0),
        ("color_jitter", (0.4, 0.4, -1.0)),
        ("color_jitter", (0.4, 0.4, 0.4, 0.6)),
        ("color_jitter", (0.4,)),
        ("rand_augment", "rand-m9-q3"),
        ("std", (0.1, 0.2)),
    ],
)
def test_unusable_fields_are_refused_by_name(field, value):
    with pytest.raises(InputError, match=rf"augment\.{field}="):
        dataclasses.replace(RECIPE, **{field: value})


def test_batches_that_do_not_fit_are_refused():
    augment = make_augment(dataclasses.replace(RECIPE, mix_group=3))
    with pytest.raises(InputError, match=r"augment\.mix_group=3 does not divide"):
        augment(jax.random.key(0), jnp.asarray(IMAGES), jnp.asarray(LABELS))
    with pytest.raises(InputError, match="images of 1 channels"):
        make_augment(RECIPE)(jax.random.key(0), jnp.asarray(IMAGES[..., :1]), jnp.asarray(LABELS))
