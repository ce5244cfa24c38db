import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from structinit_jax import interop
from structinit_jax.attention_init import sincos_positions
from structinit_jax.errors import InputError
from structinit_jax.interop import to_timm
from structinit_jax.models.mixer import MlpMixer
from structinit_jax.models.vit import VisionTransformer

INPUT = dict(image_size=8, patch_size=4, channels=1)
LEARNED = dict(positions="learned", pool="class_token")


@functools.cache
def vit(width, depth, num_heads, num_classes=5, seed=0, **options):
    """A ViT in which no two values are equal."""
    sizes = dict(width=width, depth=depth, num_heads=num_heads, num_classes=num_classes)
    return filled(VisionTransformer, seed, **INPUT | LEARNED | sizes | options)


def mixer(width, depth, seed=0):
    return filled(MlpMixer, seed, **INPUT, num_classes=3, width=width, depth=depth)


def filled(family, seed, **options):
    rng = np.random.default_rng(seed)
    model = nnx.eval_shape(lambda: family(**options, rngs=nnx.Rngs(0)))
    normal = lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape, np.float32))  # noqa: E731
    nnx.update(model, jax.tree.map(normal, nnx.state(model)))
    return model


def by_hand(teacher, student):
    """Xu et al.'s selection from torch's weights, written independently."""
    expected = {}
    for name, old in student.items():
        if name.startswith("head"):
            expected[name] = old
            continue
        grid = []
        for n, m in zip(teacher[name].shape, old.shape, strict=True):
            if n % m:
                grid.append([round(i * (n - 1) / (m - 1)) for i in range(m)])
            else:
                grid.append(range(0, n, n // m))
        expected[name] = teacher[name][np.ix_(*grid)]
    return expected


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


TEACHER = (24, 4, 3)
STUDENTS = {
    "half": lambda: (vit(*TEACHER), vit(12, 2, 3, seed=1)),
    "other_number_of_heads": lambda: (vit(*TEACHER), vit(16, 3, 4, seed=1)),
    "other_head": lambda: (vit(*TEACHER), vit(20, 4, 2, num_classes=7, seed=1)),
    "mixer": lambda: (mixer(16, 3), mixer(12, 2, seed=1)),
}


@pytest.mark.parametrize("case", STUDENTS)
def test_selection_equals_that_on_timms_weights(case):
    teacher, student = STUDENTS[case]()
    large, small = to_timm(teacher), to_timm(student)
    expected = by_hand(large, small)
    found = interop.select_weights(teacher, student)
    assert type(found) is type(student)
    assert_equal(to_timm(found), expected)
    assert_equal(interop.select_weights(large, small), expected)
    assert_equal(to_timm(interop.select_weights(large, student)), expected)
    assert_equal(to_timm(student), small)  # not changed
    assert not np.array_equal(small["norm.weight"], expected["norm.weight"])


def test_fixed_positions_stay_the_students():
    teacher, student = (vit(*sizes, positions="sincos") for sizes in (TEACHER, (12, 2, 3)))
    found = to_timm(interop.select_weights(to_timm(teacher), student))
    np.testing.assert_array_equal(found["pos_embed"][0, 1:], sincos_positions((2, 2), 12))
    np.testing.assert_array_equal(found["norm.bias"], to_timm(teacher)["norm.bias"][::2])
    with pytest.raises(InputError, match=r"pos_embed.*positions='learned'"):
        interop.select_weights(to_timm(vit(*TEACHER)), student)


def test_integers_stay_the_students_and_dtypes_are_kept():
    teacher = {"norm.weight": np.arange(8.0), "norm.num_batches_tracked": np.array(7)}
    student = {
        "norm.weight": np.zeros(4, np.float16),
        "norm.num_batches_tracked": np.array(0),
    }
    found = interop.select_weights(teacher, student)
    assert found["norm.num_batches_tracked"] == 0
    assert found["norm.weight"].dtype == np.float16
    assert found["norm.weight"].tolist() == [0, 2, 4, 6]


def without(model, dropped):
    return {name: array for name, array in to_timm(model).items() if name != dropped}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda t: (t, vit(12, 5, 3)), r"student has blocks\.4\.\S+, a layer that teacher lacks"),
        (lambda t: (t, vit(32, 2, 4)), r"student needs \d+ elements along axis \d of .*teacher ha"),
        (lambda t: (t, vit(12, 2, 3, pool="mean")), r"student has fc_norm\.weight, which teacher"),
        (lambda t: (vit(24, 4, 3, pool="mean"), vit(12, 2, 3)), r"student has cls_token, which"),
        (
            lambda t: (to_timm(t), without(vit(12, 2, 3), "cls_token")),
            r"teacher has cls_token, which student lacks",
        ),
        (lambda t: (t, mixer(8, 1)), r"teacher is a VisionTransformer and student a MlpMixer"),
        (
            lambda t: (without(t, "blocks.0.norm1.bias"), to_timm(vit(12, 2, 3))),
            r"student has blocks\.0\.norm1\.bias, a layer",
        ),
        (
            lambda t: ({"norm.weight": np.ones((4, 1))}, {"norm.weight": np.ones(2)}),
            r"norm\.weight has shape \(4, 1\) in teacher and \(2,\) in student",
        ),
        (
            lambda t: (dict(norm=memoryview(b"1")), dict(norm=np.ones(1))),
            r"teacher: norm is a builtins\.memoryview",
        ),
    ],
)
def test_larger_students_and_other_families_are_refused(make, message):
    with pytest.raises(InputError, match=message):
        interop.select_weights(*make(vit(*TEACHER)))
