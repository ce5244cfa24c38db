"""Conversion of a ViT; `test_swin`, `test_mixer` and `test_convmixer` convert their family."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from flax import nnx
from references.vit_cases import CASES, SMALL

from structinit_jax.errors import InputError
from structinit_jax.interop import from_timm, to_timm
from structinit_jax.models.vit import VisionTransformer


def make(**options):
    """A ViT of zeros."""
    options = SMALL | dict(positions="learned") | options
    model = nnx.eval_shape(lambda: VisionTransformer(**options, rngs=nnx.Rngs(0)))
    nnx.update(model, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), nnx.state(model)))
    return model


@pytest.fixture(scope="module")
def state_dicts():
    """timm's state dicts by case."""
    recorded = references.load("vit")
    prefixes = {case: f"{case}/state/" for case in CASES}
    return {
        case: {k.removeprefix(p): v for k, v in recorded.items() if k.startswith(p)}
        for case, p in prefixes.items()
    }


@pytest.mark.parametrize("case", CASES)
def test_export_returns_the_loaded_state_dict(state_dicts, case):
    model = make(**CASES[case])
    from_timm(model, state_dicts[case])
    back = to_timm(model)
    assert back.keys() == state_dicts[case].keys()
    for name, array in state_dicts[case].items():
        np.testing.assert_array_equal(back[name], array, err_msg=name)


def test_loaded_weights_keep_the_sharding_of_the_model(state_dicts):
    mesh = jax.make_mesh((8,), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    model = make(**CASES["mean"])
    nnx.update(model, jax.device_put(nnx.state(model), sharding))
    from_timm(model, state_dicts["mean"])
    assert all(leaf.sharding == sharding for leaf in jax.tree.leaves(nnx.state(model)))


def test_a_state_dict_that_does_not_fit_is_refused_and_changes_nothing(state_dicts):
    state_dict, model = state_dicts["mean"], make(**CASES["mean"])
    before = to_timm(model)
    missing = {k: v for k, v in state_dict.items() if k != "blocks.1.mlp.fc1.bias"}
    with pytest.raises(InputError, match=r"no 'blocks\.1\.mlp\.fc1\.bias'"):
        from_timm(model, missing)
    with pytest.raises(InputError, match=r"no place for: extra\.weight"):
        from_timm(model, state_dict | {"extra.weight": np.ones(3)})
    with pytest.raises(InputError, match=r"\['pos_embed'\].*9, 16.*4, 16.*start_from"):
        from_timm(model, state_dict | {"pos_embed": np.ones((1, 9, 16))})
    after = to_timm(model)
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_fixed_positions_are_timms_pos_embed():
    model = make(positions="sincos", image_size=8)
    state_dict = to_timm(model)
    assert state_dict["pos_embed"].shape == (1, 4, 16)
    for dtype in (np.float32, np.float16, jax.numpy.bfloat16):
        from_timm(model, {name: array.astype(dtype) for name, array in state_dict.items()})
    with pytest.raises(InputError, match="not the sin-cos encoding"):
        from_timm(model, state_dict | {"pos_embed": np.ones((1, 4, 16), np.float32)})


def test_a_family_without_a_converter_is_refused():
    with pytest.raises(InputError, match=r"Linear.*VisionTransformer"):
        to_timm(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
