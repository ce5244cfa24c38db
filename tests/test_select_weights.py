import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from structinit_jax import interop
from structinit_jax.errors import InputError
from structinit_jax.interop import to_timm
from structinit_jax.models.mixer import MlpMixer
from structinit_jax.models.vit import VisionTransformer
from structinit_jax.training.state import split_model

INPUT = dict(image_size=8, patch_size=4, channels=1)
LEARNED = dict(positions="learned", pool="class_token")


def vit(width, depth, num_heads, num_classes=5, seed=0, **options):
    """A ViT in which no two values are alike."""
    options = INPUT | dict(num_classes=num_classes) | LEARNED | options
    sizes = dict(width=width, depth=depth, num_heads=num_heads)
    return filled(lambda: VisionTransformer(**sizes, **options, rngs=nnx.Rngs(0)), seed)


def mixer(width, depth, seed=0):
    sizes = INPUT | dict(num_classes=3, width=width, depth=depth)
    return filled(lambda: MlpMixer(**sizes, rngs=nnx.Rngs(0)), seed)


def filled(make, seed):
    rng = np.random.default_rng(seed)
    model = nnx.eval_shape(make)
    state = nnx.state(model)
    nnx.update(
        model,
        jax.tree.map(lambda a: jnp.asarray(rng.standard_normal(a.shape, np.float32)), state),
    )
    return model


def by_hand(teacher, student):
    """Xu et al.'s selection on state dicts of torch's flat weights, written independently."""
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


@pytest.fixture(scope="module")
def teacher():
    return vit(24, 4, 3)


# A half with other heads, one that does not divide, one with wider heads and another head.
@pytest.mark.parametrize("sizes", [(12, 2, 3, 5), (16, 3, 4, 5), (20, 4, 2, 7)])
def test_models_agree_with_selection_on_timms_flat_weights(teacher, sizes):
    student = vit(*sizes, seed=1)
    expected = by_hand(to_timm(teacher), to_timm(student))
    found = interop.select_weights(teacher, student)
    assert type(found) is VisionTransformer
    assert_equal(to_timm(found), expected)
    assert_equal(interop.select_weights(to_timm(teacher), to_timm(student)), expected)
    assert not np.array_equal(to_timm(student)["norm.weight"], expected["norm.weight"])


def test_parameter_dicts_give_parameter_dicts(teacher):
    student = vit(12, 2, 3, seed=1)
    found = interop.select_weights(split_model(teacher)[1], split_model(student)[1])
    expected = split_model(interop.select_weights(teacher, student))[1]
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_mixers_are_selected_from_mixers():
    teacher, student = mixer(16, 3), mixer(12, 2, seed=1)
    expected = by_hand(to_timm(teacher), to_timm(student))
    assert_equal(to_timm(interop.select_weights(teacher, student)), expected)


def test_integers_stay_the_students_and_types_are_kept():
    teacher = {"norm.weight": np.arange(8.0), "norm.num_batches_tracked": np.array(7)}
    student = {
        "norm.weight": np.zeros(4, np.float16),
        "norm.num_batches_tracked": np.array(0),
    }
    found = interop.select_weights(teacher, student)
    assert found["norm.num_batches_tracked"] == 0
    assert found["norm.weight"].dtype == np.float16
    assert found["norm.weight"].tolist() == [0, 2, 4, 6]


def drop(state, pattern):
    return {name: array for name, array in state.items() if not re.match(pattern, name)}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda t: (t, vit(12, 5, 3)), r"needs 5 layers along axis 0 of blocks/.*teacher has 4"),
        (lambda t: (t, vit(32, 2, 4)), r"student needs \d+ elements along axis \d of .*teacher ha"),
        (
            lambda t: (to_timm(t), to_timm(vit(12, 5, 3))),
            r"student has blocks/4/\S+, a layer that teacher lacks",
        ),
        (
            lambda t: (t, vit(12, 2, 3, pool="mean")),
            r"teacher has class_token, which student lacks: .*within a family",
        ),
        (
            lambda t: (vit(24, 4, 3, pool="mean"), vit(12, 2, 3)),
            r"student has class_token, which teacher lacks: .*within a family",
        ),
        (
            lambda t: (t, mixer(8, 1)),
            r"teacher is a VisionTransformer and student a MlpMixer",
        ),
        (
            lambda t: (drop(to_timm(t), "blocks.0.norm1.bias"), to_timm(vit(12, 2, 3))),
            r"student has blocks/0/norm1/bias, a layer",
        ),
        (
            lambda t: ({"norm.weight": np.ones((4, 1))}, {"norm.weight": np.ones(2)}),
            r"norm/weight has shape \(4, 1\) in teacher and \(2,\) in student",
        ),
        (
            lambda t: (dict(norm=memoryview(b"1")), dict(norm=np.ones(1))),
            r"norm is a builtins\.memoryview, not a NumPy or JAX array",
        ),
    ],
)
def test_what_is_larger_or_of_another_family_is_refused_by_name(teacher, make, message):
    with pytest.raises(InputError, match=message):
        interop.select_weights(*make(teacher))
