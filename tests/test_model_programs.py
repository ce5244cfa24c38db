import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close
from flax import nnx
from jax import export
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tiny_models import IMAGES, make, train, train_fn

from structinit_jax.models import FAMILIES, layers
from structinit_jax.training.state import split_model

pytestmark = pytest.mark.usefixtures("library_promotion")


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("vit", [0, 0, 0.5, 0.5]),
        ("swin", [0, 0, 0.25, 0.25, 0.5, 0.5]),
        ("mixer", [0.5] * 4),
        ("convmixer", [0, 0.5]),
    ],
)
def test_every_drop_path_has_its_own_key_and_its_documented_rate(family, expected, monkeypatch):
    keys, rates, drop = set(), [], layers.drop_path

    def seen(key, rate):
        keys.add(tuple(np.asarray(key)))
        rates.append(round(float(rate), 2))

    def record(x, rate, rng):
        jax.debug.callback(seen, jax.random.key_data(rng), rate, ordered=True)
        return drop(x, rate, rng)

    monkeypatch.setattr(layers, "drop_path", record)
    model = make(family)
    run = jax.jit(lambda model: model(IMAGES, rng=jax.random.key(3))[0])
    jax.block_until_ready(run(model))
    jax.effects_barrier()
    assert len(keys) == len(rates)
    assert rates == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_evaluation_draws_no_random_numbers(family):
    model = make(family)  # with drop path
    assert "random_bits" not in str(jax.make_jaxpr(model)(IMAGES))


def program(family, **changes):
    model = nnx.eval_shape(lambda: make.__wrapped__(family, **changes))
    return str(jax.make_jaxpr(lambda model: model(IMAGES)[0])(model))


@pytest.mark.parametrize("family", FAMILIES)
def test_programs_for_cuda_devices_have_no_loop_over_blocks(family):
    model = make(family, **(dict(depths=(4,), num_heads=(2,)) if family == "swin" else {}))
    gradient = jax.jit(jax.grad(lambda images: model(images)[0].sum())).trace(IMAGES)
    cuda, cpu = (
        gradient.lower(lowering_platforms=(platform,)).as_text() for platform in ("cuda", "cpu")
    )
    assert "stablehlo.while" not in cuda
    assert "stablehlo.while" in cpu


def test_blocks_one_by_one_agree_with_the_scan(monkeypatch):
    def run_cuda_branch(*args, default, cuda=None, cpu=None):
        return (cuda or cpu or default)(*args)

    expected = train("vit")
    monkeypatch.setattr(jax.lax, "platform_dependent", run_cuda_branch)
    train_one_by_one = train_fn.__wrapped__("vit", remat="full")
    found = train_one_by_one(*split_model(make("vit"))[1:], jax.random.key(0))
    assert_close(found, expected, atol=1e-5)


def test_a_scan_in_one_step_recomputes_too():
    # XLA unrolls a scan of one step and could then merge recomputed values with the originals.
    assert "prevent_cse=False" in program("vit", remat="full")
    assert "prevent_cse=False" not in program("vit", depth=1, remat="full")


def test_an_odd_stage_of_a_swin_is_scanned_by_pairs():
    # An unrolled stage would be recomputed as a whole, with the activations of all its blocks.
    one_stage = dict(num_heads=(2,), remat="full")
    assert "prevent_cse=False" in program("swin", depths=(5,), **one_stage)
    assert "prevent_cse=False" not in program("swin", depths=(3,), **one_stage)


@pytest.mark.parametrize("family", FAMILIES)
def test_models_are_exported_for_every_batch_size(family):
    model = make(family)
    images = jax.ShapeDtypeStruct(export.symbolic_shape("b, 8, 8, 1"), jnp.float32)
    evaluate = jax.jit(lambda images: model(images)[0])
    exported = export.export(evaluate, platforms=("cpu", "cuda", "tpu"))(images)
    assert str(exported.out_avals[0].shape) == "(b, 4)"


def test_models_run_on_a_mesh_of_the_users_own():
    model = make("vit", pool="class_token")
    expected = jax.jit(lambda images: model(images)[0])(IMAGES)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        logits = jax.jit(lambda images: model(images)[0])(IMAGES)
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    spec = PartitionSpec("data")
    split = jax.shard_map(lambda x: model(x)[0], mesh=mesh, in_specs=spec, out_specs=spec)
    np.testing.assert_allclose(jax.jit(split)(IMAGES), expected, atol=1e-5)
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(AxisType.Explicit,))
    images = jax.device_put(IMAGES, NamedSharding(mesh, PartitionSpec("fsdp")))
    with jax.set_mesh(mesh):
        logits = jax.jit(lambda images: model(images)[0])(images)
    np.testing.assert_allclose(logits, expected, atol=1e-5)
