"""Every model family: random numbers, bfloat16, recomputation, export, meshes."""

import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export
from jax.sharding import AxisType, PartitionSpec
from tiny_models import IMAGES, make, train

from structinit_jax.models import FAMILIES, default_config, layers
from structinit_jax.models import model as model_lib
from structinit_jax.training.state import split_model

pytestmark = pytest.mark.usefixtures("library_promotion")


@pytest.mark.parametrize("family", ["vit", "swin", "mixer"])
def test_every_dropout_and_drop_path_of_every_layer_has_its_own_key(family, monkeypatch):
    keys, drop = [], layers._drop

    def record(x, rate, rng, mask_shape):
        jax.debug.callback(
            lambda key: keys.append(tuple(np.asarray(key))), jax.random.key_data(rng)
        )
        return drop(x, rate, rng, mask_shape)

    monkeypatch.setattr(layers, "_drop", record)
    model = make(family, dropout=0.1)
    jax.block_until_ready(jax.jit(lambda x: model(x, rng=jax.random.key(3))[0])(IMAGES))
    jax.effects_barrier()
    # In each block one after attention in ViT and Swin, two in each MLP, and two drop paths.
    expected = {"vit": 2 * 5 + 1, "swin": 3 * 5, "mixer": 2 * 6}
    assert len(set(keys)) == len(keys) == expected[family]


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("vit", [[0, 0.5]]),
        ("swin", [[0, 0.25], [0.5]]),
        ("mixer", [[0.5, 0.5]]),
        ("convmixer", [[0, 0.5]]),
    ],
)
def test_drop_path_has_the_documented_rates(family, expected, monkeypatch):
    rates = []
    module = sys.modules[FAMILIES[family].__module__]

    def run_stack(*args, drop_path_rates, **options):
        rates.append(drop_path_rates.tolist())
        return model_lib.run_stack(*args, drop_path_rates=drop_path_rates, **options)

    monkeypatch.setattr(module, "run_stack", run_stack)
    model = make(family)
    jax.eval_shape(lambda images: model(images)[0], IMAGES)
    assert rates == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_training_is_random_by_rng(family):
    runs = [train(family, rng, dtype="bfloat16") for rng in (1, 1, 2)]
    one, again, other = (out["pooled"].astype(jnp.float32) for (_, (_, out, _)), _ in runs)
    np.testing.assert_array_equal(one, again)
    assert np.abs(one - other).max() > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_evaluation_draws_no_random_numbers(family):
    model = make(family)  # with drop path, and dropout in some
    assert "random_bits" not in str(jax.make_jaxpr(model)(IMAGES))


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_computed_in_bfloat16_and_stays_close_to_float32(family):
    graphdef, *start = split_model(make(family))
    run = jax.jit(lambda *start: nnx.merge(graphdef, *start)(IMAGES, rng=jax.random.key(0))[0])
    (_, (logits, out, _)), _ = train(family, dtype="bfloat16")
    blocks = out["stages"][0]["blocks"] if family == "swin" else out["blocks"]
    assert (blocks["output"].dtype, logits.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(logits, run(*start), atol=0.03)


def test_unrolled_and_rematerialized_stacks_agree_with_the_scan():
    expected, found = train("swin"), train("swin", unroll=0, remat="full")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), found, expected)


def gradient_program(family, **changes):
    model = make(family, **changes)
    program = str(jax.make_jaxpr(jax.grad(lambda x: model(x)[0].sum()))(IMAGES))
    return re.sub("0x[0-9a-f]+", "", program)


def test_a_scan_in_one_step_recomputes_too():
    # XLA could merge the copies of an unrolled loop.
    assert "prevent_cse=False" in gradient_program("vit", unroll=1, remat="full")
    assert "prevent_cse=False" not in gradient_program("vit", unroll=100, remat="full")


def test_a_model_with_remat_auto_recomputes_as_with_none():
    assert default_config("vit")["remat"] == "auto"
    assert gradient_program("vit") == gradient_program("vit", remat="none")


@pytest.mark.parametrize("family", FAMILIES)
def test_models_are_exported_for_every_batch_size(family):
    model = make(family)
    images = jax.ShapeDtypeStruct(export.symbolic_shape("b, 8, 8, 1"), jnp.float32)
    exported = export.export(jax.jit(lambda images: model(images)[0]))(images)
    assert str(exported.out_avals[0].shape) == "(b, 4)"


def test_models_run_on_a_mesh_of_the_users_own():
    model = make("vit")
    expected = model(IMAGES)[0]
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        logits = jax.jit(lambda images: model(images)[0])(IMAGES)
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    spec = PartitionSpec("data")
    split = jax.shard_map(lambda x: model(x)[0], mesh=mesh, in_specs=spec, out_specs=spec)
    np.testing.assert_allclose(jax.jit(split)(IMAGES), expected, atol=1e-5)
