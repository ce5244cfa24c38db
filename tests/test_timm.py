"""ViT conversion and weight selection; the other families' tests cover their conversion."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from conftest import assert_close
from flax import nnx
from references.vit_cases import CASES, SMALL

from structinit_jax.attention_init import sincos_positions
from structinit_jax.errors import InputError
from structinit_jax.models.convmixer import ConvMixer
from structinit_jax.models.mixer import MlpMixer
from structinit_jax.models.swin import SwinTransformer
from structinit_jax.models.timm import from_timm, select_weights, to_timm
from structinit_jax.models.vit import VisionTransformer


def make(family=VisionTransformer, seed=0, **options):
    """A model in which no two values are equal."""
    rng = np.random.default_rng(seed)
    model = nnx.eval_shape(lambda: family(**options, rngs=nnx.Rngs(0)))
    normal = lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape, np.float32))  # noqa: E731
    nnx.update(model, jax.tree.map(normal, nnx.state(model)))
    return model


def make_timm(**options):
    return make(**(SMALL | dict(positions="learned") | options))


assert_equal = functools.partial(assert_close, rtol=0)


@pytest.fixture(scope="module")
def state_dicts():
    """timm's state dicts by case."""
    recorded = references.load("vit")
    return {case: references.part(recorded, f"{case}/state") for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_export_returns_the_loaded_state_dict(state_dicts, case):
    model = make_timm(**CASES[case])
    wrapped = {f"module._orig_mod.{name}": array for name, array in state_dicts[case].items()}
    from_timm(model, wrapped)
    assert_equal(to_timm(model), state_dicts[case])


def test_loaded_weights_keep_the_sharding_of_the_model(state_dicts):
    mesh = jax.make_mesh((8,), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    model = make_timm(**CASES["mean"])
    nnx.update(model, jax.device_put(nnx.state(model), sharding))
    from_timm(model, state_dicts["mean"])
    assert all(leaf.sharding == sharding for leaf in jax.tree.leaves(nnx.state(model)))


def test_a_state_dict_that_does_not_fit_is_refused_and_changes_nothing(state_dicts):
    state_dict, model = state_dicts["mean"], make_timm(**CASES["mean"])
    before = to_timm(model)
    missing = {k: v for k, v in state_dict.items() if k != "blocks.1.mlp.fc1.bias"}
    with pytest.raises(InputError, match=r"has no blocks\.1\.mlp\.fc1\.bias"):
        from_timm(model, missing)
    with pytest.raises(InputError, match=r"\['pos_embed'\].*9, 16.*4, 16.*select_weights"):
        from_timm(model, state_dict | {"pos_embed": np.ones((1, 9, 16))})
    for name in ("reg_token", "blocks.0.attn.q_norm.weight"):
        for convert in (from_timm, lambda model, state_dict: select_weights(state_dict, model)):
            with pytest.raises(InputError, match=f"no place for {name}"):
                convert(model, state_dict | {name: np.ones(8, np.float32)})
    assert_equal(to_timm(model), before)


REPLACED = {
    "LoRA": lambda head: nnx.LoRA(16, 2, 5, base_module=head, rngs=nnx.Rngs(0)),
    "two layers": lambda head: nnx.Sequential(head, nnx.relu),
}


@pytest.mark.parametrize("kind", REPLACED)
def test_a_replaced_head_is_named_by_conversions_and_kept_by_selection(kind):
    weights = to_timm(make_timm(**CASES["mean"]))
    student = make_timm(**CASES["mean"], seed=1)
    student.head = REPLACED[kind](student.head)
    for convert in (to_timm, lambda model: from_timm(model, weights)):
        with pytest.raises(InputError, match=r"^model: head/kernel=None .* timm's head\.weight"):
            convert(student)
    found = select_weights(weights, student)
    assert_equal(nnx.state(found.head), nnx.state(student.head))
    np.testing.assert_array_equal(found.norm.scale[...], weights["fc_norm.weight"])


def test_added_layers_keep_their_values_and_are_not_dropped():
    weights = to_timm(make_timm(**CASES["mean"]))
    model = make_timm(**CASES["mean"], seed=1)
    model.dropout = nnx.Dropout(0.1, rngs=nnx.Rngs(0))  # its random state is not a weight
    from_timm(model, weights)
    assert_equal(to_timm(model), weights)
    model.adapter = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    from_timm(model, weights)
    with pytest.raises(InputError, match=r"^model: adapter/bias=.* must be left out"):
        to_timm(model)


def test_fixed_positions_are_timms_pos_embed():
    model = make_timm(positions="sincos", image_size=8)
    state_dict = to_timm(model)
    assert state_dict["pos_embed"].shape == (1, 4, 16)
    from_timm(model, {name: array.astype(jnp.bfloat16) for name, array in state_dict.items()})
    with pytest.raises(InputError, match="not the sin-cos encoding"):
        from_timm(model, state_dict | {"pos_embed": state_dict["pos_embed"] + np.float32(1e-4)})


INPUT = dict(image_size=8, patch_size=4, channels=1)
LEARNED = dict(positions="learned", pool="class_token")


@functools.cache
def vit(width, depth, num_heads, num_classes=5, seed=0, **options):
    sizes = dict(width=width, depth=depth, num_heads=num_heads, num_classes=num_classes)
    return make(VisionTransformer, seed, **INPUT | LEARNED | sizes | options)


def mixer(width, depth, seed=0, **options):
    return make(MlpMixer, seed, **INPUT | options, num_classes=3, width=width, depth=depth)


def convmixer(width, **options):
    return make(ConvMixer, **INPUT | options, num_classes=3, width=width, depth=1, kernel_size=3)


def swin(width, window_size=4):
    sizes = dict(INPUT, patch_size=1, num_classes=3, depths=(2,), num_heads=(2,))
    return make(SwinTransformer, **sizes, width=width, window_size=window_size)


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


TEACHER = (24, 4, 3)


@pytest.mark.parametrize(
    "make_models",
    [
        lambda: (vit(*TEACHER), vit(12, 2, 3, seed=1)),
        lambda: (vit(*TEACHER), vit(16, 3, 4, num_classes=7, seed=1)),
        lambda: (mixer(16, 3), mixer(12, 2, seed=1)),
    ],
    ids=["half", "other heads and classes", "mixer"],
)
def test_selection_equals_that_on_timms_weights(make_models):
    teacher, student = make_models()
    large, small = to_timm(teacher), to_timm(student)
    expected = by_hand(large, small)
    buffers = dict.fromkeys(("blocks.1.attn_mask", "blocks.1.attn.relative_position_index"))
    assert_equal(to_timm(select_weights(large | buffers, student)), expected)  # as in older files
    assert_equal(to_timm(student), small)  # not changed
    assert not np.array_equal(small["norm.weight"], expected["norm.weight"])


def test_fixed_positions_stay_the_students():
    student = vit(12, 2, 3, positions="sincos")
    teacher = vit(*TEACHER, positions="sincos", image_size=16)
    found = to_timm(select_weights(to_timm(teacher), student))
    np.testing.assert_array_equal(found["pos_embed"][0, 1:], sincos_positions((2, 2), 12))
    np.testing.assert_array_equal(found["norm.bias"], to_timm(teacher)["norm.bias"][::2])
    larger = vit(12, 2, 3, positions="sincos", image_size=24)
    found = to_timm(select_weights(to_timm(teacher), larger))
    np.testing.assert_array_equal(found["pos_embed"][0, 1:], sincos_positions((6, 6), 12))
    with pytest.raises(InputError, match=r"pos_embed.*positions='learned'"):
        select_weights(to_timm(vit(*TEACHER)), student)


SMALL_PATCHES = dict(image_size=4, patch_size=2)  # the same number of patches
UNFIT = {  # how to make teacher and student from a teacher, and what the message says
    "deeper": (lambda t: (t, vit(12, 5, 3)), r"has no blocks\.4\.\S+, .* depth"),
    "pool": (lambda t: (t, vit(12, 2, 3, pool="mean")), r"has no fc_norm.* pool"),
    "tokens": (lambda t: (mixer(16, 3), mixer(8, 1, image_size=4)), "number of tokens"),
    "grid": (lambda t: (vit(*TEACHER, image_size=(8, 12)), vit(12, 2, 3)), "number of tokens"),
    "patches of a ViT": (lambda t: (t, vit(12, 2, 3, **SMALL_PATCHES)), "patch size"),
    "patches of a mixer": (lambda t: (mixer(16, 3), mixer(8, 1, **SMALL_PATCHES)), "patch size"),
    "patches of a CNN": (lambda t: (convmixer(16), convmixer(8, **SMALL_PATCHES)), "patch size"),
    "windows": (lambda t: (swin(8), swin(8, window_size=2)), "window size"),
    "channels": (lambda t: (vit(*TEACHER, channels=3), vit(12, 2, 3)), "same channels"),
    "family": (lambda t: (t, mixer(8, 1)), "of the same family"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_larger_students_and_other_families_are_refused(case):
    make_models, message = UNFIT[case]
    teacher, student = make_models(vit(*TEACHER))
    with pytest.raises(InputError, match=message):
        select_weights(to_timm(teacher), student)
