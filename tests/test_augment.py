import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from structinit_jax.augment import AugmentConfig, AugmentOptions, describe, make_augment, pipeline
from structinit_jax.augment import mix as mix_lib
from structinit_jax.errors import InputError, check_fields

REFERENCE = references.load("train_script")
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


def test_result_is_a_function_of_the_random_key():
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
    rng = jax.random.key(1)
    step = jax.jit(make_augment(RECIPE, mesh), out_shardings=sharded).lower(rng, *batch).compile()
    for a, b in zip(step(rng, *batch), whole_recipe(rng, IMAGES, LABELS), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    # A group of two images is on one device, so nothing moves between devices.
    collectives = "all-gather|all-reduce|all-to-all|collective-permute"
    assert not re.findall(rf"= (\S+) (?:{collectives})\(", step.as_text())


def test_an_image_does_not_depend_on_the_images_of_other_groups():
    other = IMAGES.copy()
    other[2:] = 255 - other[2:]
    a, _ = whole_recipe(jax.random.key(4), IMAGES, LABELS)
    b, _ = whole_recipe(jax.random.key(4), other, LABELS)
    np.testing.assert_array_equal(a[:2], b[:2])
    assert np.all(np.any(np.asarray(a[2:]) != b[2:], axis=(1, 2, 3)))


def test_defaults_normalize_images_and_smooth_targets():
    augment = jax.jit(make_augment(only(label_smoothing=0.1)))
    images, targets = augment(jax.random.key(0), IMAGES, LABELS)
    np.testing.assert_allclose(images, (IMAGES / 255 - MEAN) / STD, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(targets, np.eye(5)[LABELS] * 0.9 + 0.02, atol=1e-6)


def test_rand_augment_fills_with_the_mean_color_and_resamples_as_the_crop(monkeypatch):
    passed = []

    def rand_augment(rngs, images, spec, **options):
        passed.append(options)
        return images

    monkeypatch.setattr(pipeline, "rand_augment", rand_augment)
    options = only(rand_augment="rand-m9", interpolation="bicubic")
    make_augment(options)(jax.random.key(0), IMAGES, LABELS)
    assert passed == [dict(fill=(124, 116, 104), interpolation="bicubic")]


def test_color_jitter_is_ignored_if_rand_augment_is_set():
    def program(**fields):
        options = only(rand_augment="rand-m9-inc1-n1", **fields)
        return jax.jit(make_augment(options)).lower(jax.random.key(3), IMAGES, LABELS).as_text()

    assert program(color_jitter=(0.4, 0.4, 0.4)) == program()


def test_erasing_comes_before_or_after_mixing():
    def erased(after):
        options = only(erasing=1.0, erasing_mode="const", mixup=5.0, erase_after_mixing=after)
        images, _ = jax.jit(make_augment(options))(jax.random.key(2), IMAGES, LABELS)
        return np.mean(np.all(np.asarray(images) == 0, axis=-1))

    before, after = erased(False), erased(True)
    assert after > 0.1  # whole boxes of the mean color
    assert before < after / 2  # only where two boxes overlap


def test_erasing_after_mixing_is_the_order_of_timms_train_script():
    order = {
        "RandomResizedCropAndInterpolation": "crop",
        "RandomHorizontalFlip": "flip",
        "RandAugment": "rand-m9-mstd0.5-inc1",
        "MaybePILToTensor": None,
        "FastCollateMixup": "mixup",
        "normalized": "normalize",
        "RandomErasing": "erase",
    }
    theirs = [order[name] for name in REFERENCE["augmentation/order"].tolist() if order[name]]
    ours = describe(dataclasses.replace(RECIPE, erase_after_mixing=True))
    assert [text.split()[0] for text in ours] == theirs
    mixing = "mixup 0.8, cutmix 1, one lambda per 2"
    assert ours[-3:] == [mixing, "normalize", "erase 0.5 pixel"]
    assert describe(RECIPE)[-3:] == ["normalize", "erase 0.5 pixel", mixing]
    assert describe(only()) == ["normalize"]


def test_pixels_are_mixed_as_by_timms_train_script(monkeypatch):
    inputs, labels, images, targets = (
        REFERENCE[f"augmentation/{name}"] for name in ("inputs", "labels", "images", "targets")
    )
    draw = mix_lib.draw_mixing
    fixed = lambda *args, **options: (jnp.float32(0.3), *draw(*args, **options)[1:])  # noqa: E731
    monkeypatch.setattr(mix_lib, "draw_mixing", fixed)
    options = dataclasses.replace(only(label_smoothing=0.1, mixup=0.8), num_classes=4)

    def augmented(**changes):
        augment = jax.jit(make_augment(dataclasses.replace(options, **changes)))
        return augment(jax.random.key(0), jnp.asarray(inputs), jnp.asarray(labels))

    ours = augmented(erase_after_mixing=True)
    np.testing.assert_allclose(ours[0], images, atol=2e-6)
    np.testing.assert_allclose(ours[1], targets, atol=1e-6)
    levels = 255 * np.asarray(STD) * np.abs(augmented()[0] - images)
    assert 0.4 < levels.max() < 0.501  # without the prefetcher, pixels are not rounded


def test_gray_images_pass_through_everything():
    recipe = dataclasses.replace(RECIPE, mean=(0.3,), std=(0.4,))
    batch = jax.random.key(0), IMAGES[..., :1], LABELS
    images, _ = jax.eval_shape(make_augment(recipe), *batch)
    assert images.shape == (16, 20, 20, 1)
    jitter = dataclasses.replace(
        recipe, crop="pad", rand_augment="", color_jitter=(0.4, 0.4, 0.4, 0.1)
    )
    images, _ = jax.jit(make_augment(jitter))(*batch)
    assert images.shape == (16, 16, 16, 1)
    assert np.all(np.isfinite(images))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("crop", "center"),
        ("crop_scale", (0.5, 0.1)),
        ("crop_ratio", (0.0, 1.0)),
        ("color_jitter", (0.4,)),
        ("color_jitter", (0.4, 0.4, 0.4, 0.6)),
        ("color_jitter", (0.4, 0.4, float("nan"))),
        ("erasing", float("nan")),
        ("mix_group", -1),
    ],
)
def test_invalid_fields_are_refused_by_name(field, value):
    with pytest.raises(InputError, match=rf"^config\.augment\.{field}="):
        check_fields(AugmentConfig, {field: value}, "config.augment.")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(flip=1.5), r"^config\.augment\.flip=1\.5"),
        (dict(rand_augment="rand-m9-q3"), r"^config\.augment\.rand_augment="),
        (dict(image_size=0), r"^config\.data\.image_size=0"),
        (dict(mean=(0.5, 0.5), std=(0.2, 0.2)), r"^config\.data\.mean="),
    ],
)
def test_options_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(RECIPE, **fields)


@pytest.mark.parametrize(
    ("images", "labels"),
    [
        (IMAGES / 255, LABELS),
        (IMAGES[0], LABELS[:1]),
        (IMAGES[..., :1], LABELS),
        (IMAGES, np.eye(5)[LABELS]),
        (IMAGES, LABELS[:8]),
    ],
)
def test_batches_of_other_types_or_shapes_are_refused(images, labels):
    with pytest.raises(InputError, match=r"pass uint8 pixels \[B, H, W, 3\]"):
        make_augment(RECIPE)(jax.random.key(0), images, labels)


def test_a_group_must_divide_the_batch():
    augment = make_augment(dataclasses.replace(RECIPE, mix_group=3))
    with pytest.raises(InputError, match=r"config\.augment\.mix_group=3"):
        augment(jax.random.key(0), IMAGES, LABELS)
