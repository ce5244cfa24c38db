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
from structinit_jax.models.swin import SwinTransformer
from structinit_jax.models.vit import VisionTransformer, resample_positions

INPUT = dict(image_size=8, patch_size=4, channels=1)
TABLE = "layers.0.blocks.0.attn.relative_position_bias_table"
LEARNED = dict(positions="learned", pool="class_token")


@functools.cache
def vit(width, depth, num_heads, num_classes=5, seed=0, **options):
    """A ViT in which no two values are equal."""
    sizes = dict(width=width, depth=depth, num_heads=num_heads, num_classes=num_classes)
    return filled(VisionTransformer, seed, **INPUT | LEARNED | sizes | options)


def mixer(width, depth, seed=0, **options):
    return filled(MlpMixer, seed, **INPUT | options, num_classes=3, width=width, depth=depth)


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
    student = vit(12, 2, 3, positions="sincos")
    teacher = vit(*TEACHER, positions="sincos", image_size=16)
    found = to_timm(interop.select_weights(to_timm(teacher), student))
    np.testing.assert_array_equal(found["pos_embed"][0, 1:], sincos_positions((2, 2), 12))
    np.testing.assert_array_equal(found["norm.bias"], to_timm(teacher)["norm.bias"][::2])
    with pytest.raises(InputError, match=r"pos_embed.*positions='learned'"):
        interop.select_weights(to_timm(vit(*TEACHER)), student)


def test_positions_of_another_grid_are_resampled_before_the_selection():
    teacher, student = vit(*TEACHER, image_size=16), vit(12, 2, 3, image_size=12, seed=1)
    found = interop.select_weights(teacher, student).positions[...]
    table = teacher.positions[...]
    np.testing.assert_array_equal(found[0], table[0, ::2])
    expected = resample_positions(table, (4, 4), (3, 3))[1:, ::2]
    np.testing.assert_allclose(found[1:], expected, atol=1e-6)
    uneven = to_timm(teacher) | {"pos_embed": np.ones((1, 6, 24), np.float32)}
    with pytest.raises(InputError, match=r"5 image tokens are not a square grid.* \(3, 3\)"):
        interop.select_weights(uneven, student)


def test_positions_of_another_grid_are_refused_without_a_model():
    teacher, student = vit(*TEACHER, image_size=16), vit(12, 2, 3)
    with pytest.raises(InputError, match=r"pos_embed .*\(1, 17, 24\).*\(1, 5, 12\).*as a model"):
        interop.select_weights(to_timm(teacher), to_timm(student))


def test_buffers_of_older_files_are_ignored():
    sizes = dict(INPUT, patch_size=1, num_classes=3, depths=(2,), num_heads=(2,), window_size=4)
    teacher, student = (filled(SwinTransformer, 0, **sizes, width=width) for width in (16, 8))
    names = ("attn_mask", "attn.relative_position_index")
    old = {f"layers.0.blocks.1.{name}": np.ones(1) for name in names}
    found = interop.select_weights(to_timm(teacher) | old, student)
    assert_equal(to_timm(found), to_timm(interop.select_weights(teacher, student)))


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
        (lambda t: (t, vit(12, 2, 3, patch_size=2)), r"patch_embed\S+ has .* the same patch size"),
        (lambda t: (mixer(16, 3), mixer(8, 1, image_size=4)), "use .* the same number of tokens"),
        (
            lambda t: ({TABLE: np.ones((25, 4))}, {TABLE: np.ones((9, 2))}),
            "use models of the same window size",
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
