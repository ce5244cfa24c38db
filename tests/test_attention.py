import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close
from flax import nnx
from jax import export
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from test_layers import close, with_gradients
from tiny_models import IMAGES, make

from structinit_jax.models import attention

pytestmark = pytest.mark.usefixtures("library_promotion")
CHECK = "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version"
BF16 = dict(dtype="bfloat16")
FORWARD, BACKWARD = "__cudnn$fmhaSoftmax(", "__cudnn$fmhaSoftmaxBackward("


@pytest.fixture
def cudnn(monkeypatch):
    """Pretends that cuDNN is installed: JAX traces calls to it only then."""
    monkeypatch.setattr(CHECK, lambda: 90800)


def gradient(model):
    return jax.grad(lambda images: model(images)[0].sum())


def lower(function, *arguments, platform="cuda"):
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()


def calls(program):
    return [program.count(f"@{name}") for name in (FORWARD, BACKWARD)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [1, 1]),
        (dict(pool="class_token", positions="rope"), [1, 1]),  # an odd number of tokens
        (dict(remat="dots"), [2, 1]),
        (dict(remat="full"), [2, 1]),
    ],
)
def test_cuda_programs_call_cudnn_and_hold_no_maps(cudnn, changes, expected):
    # One block, because JAX 0.10 writes identical calls only once.
    program = lower(gradient(make("vit", **BF16, depth=1, **changes)), IMAGES)
    assert calls(program) == expected
    assert not re.search("x2x(16x16|17x17|18x18)x", program)


def test_runs_under_vmap_share_one_call(cudnn):
    model = make("vit", **BF16, depth=1, pool="class_token")
    images = jnp.stack([IMAGES, -IMAGES])
    assert calls(lower(jax.vmap(gradient(model)), images)) == [1, 1]
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), model)
    step = jax.vmap(jax.vmap(lambda model, x: gradient(model)(x), (0, None)), (None, 0))
    assert calls(lower(step, stacked, images)) == [1, 1]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("vit", dict(depth=1)),
        ("vit", dict(**BF16, depth=1, num_heads=4)),  # 4 channels per head, not a multiple of 8
        ("swin", dict(**BF16, depths=(1,), num_heads=(2,))),  # with a bias
    ],
)
def test_programs_that_cudnn_does_not_take_have_our_attention(cudnn, family, changes):
    assert "cudnn" not in lower(gradient(make(family, **changes)), IMAGES)


def test_a_machine_without_cudnn_traces_no_call(monkeypatch):
    def check():
        raise RuntimeError("cuDNN is not detected.")

    monkeypatch.setattr(CHECK, check)
    model = make("vit", **BF16, depth=1, num_heads=1)  # a size that no other test has traced
    assert "cudnn" not in lower(gradient(model), IMAGES)


def test_other_devices_and_explicit_meshes_do_not_call_it(cudnn):
    model = make("vit", **BF16, depth=1)
    assert "cudnn" not in lower(gradient(model), IMAGES, platform="cpu")
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    images = jax.device_put(IMAGES, NamedSharding(mesh, PartitionSpec("data")))
    with jax.set_mesh(mesh):
        assert "dot_product_attention" not in str(jax.make_jaxpr(gradient(model))(images))


def test_a_padded_token_changes_neither_attention_nor_gradients(monkeypatch):
    rngs = jax.random.split(jax.random.key(0), 3)
    arrays = [jax.random.normal(rng, (2, 17, 3, 8), jnp.bfloat16) for rng in rngs]

    def without_cudnn(*arrays, implementation, **lengths):
        assert implementation == "cudnn"
        return original(*arrays, **lengths)

    original = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", without_cudnn)
    found, expected = (
        with_gradients(attend)(*arrays)
        for attend in (attention._attend_with_cudnn, attention._attend_with_xla)
    )
    close(found, expected, 3e-2)


def test_second_derivatives_are_those_of_jaxs_attention():
    def derivatives(attend):
        gradients = jax.grad(lambda *arrays: jnp.sin(attend(*arrays)).sum(), range(4))
        return jax.jit(lambda *arrays: jax.jvp(gradients, arrays, arrays)[1])(*arrays)

    rngs = jax.random.split(jax.random.key(0), 4)
    arrays = [jax.random.normal(rng, (2, 16, 2, 8)) for rng in rngs[:3]]
    arrays.append(jax.random.normal(rngs[3], (1, 2, 16, 16)))
    ours = derivatives(attention.dot_product_attention)
    close(ours, derivatives(jax.nn.dot_product_attention), 1e-4)


def test_one_product_projects_like_three():
    options = dict(dtype=jnp.bfloat16, bias_init=nnx.initializers.normal())
    layers = tuple(nnx.LinearGeneral(16, (2, 8), **options, rngs=nnx.Rngs(i)) for i in range(3))
    x = jax.random.normal(jax.random.key(3), (2, 5, 16), jnp.bfloat16)
    close(attention._project_at_once(x, layers), [layer(x) for layer in layers], 3e-2)


class Doubled(nnx.LinearGeneral):
    """Has a kernel and a bias, but is called otherwise, as LoRA's layers are."""

    def __call__(self, x):
        return 2 * super().__call__(x)


def test_layers_that_are_not_ours_are_called_on_cuda_devices_too():
    ours = [nnx.LinearGeneral(16, (2, 8), dtype=jnp.bfloat16, rngs=nnx.Rngs(i)) for i in range(3)]
    other = Doubled(16, (2, 8), dtype=jnp.bfloat16, rngs=nnx.Rngs(3))
    unbiased = nnx.LinearGeneral(16, (2, 8), use_bias=False, dtype=jnp.bfloat16, rngs=nnx.Rngs(4))
    x = jnp.ones((2, 5, 16), jnp.bfloat16)
    for first, expected in ((ours[0], 1), (other, 3), (unbiased, 3)):
        layers = (first, *ours[1:])
        program = lower(lambda x, layers=layers: attention.project(x, layers), x)
        assert program.count("dot_general") == expected
        close(attention.project(x, layers)[0], first(x), 3e-2)


@pytest.mark.parametrize(("capability", "old"), [("7.5", True), ("10.0", False), ("gfx942", False)])
def test_gpus_older_than_ampere_run_xlas_attention(monkeypatch, capability, old):
    device = types.SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert attention._has_old_gpu() == old


LARGE = list(
    map(jnp.asarray, np.random.default_rng(0).standard_normal((3, 16, 128, 8, 4), np.float32))
)


def test_cpus_compute_large_maps_image_by_image():
    run = with_gradients(attention.dot_product_attention)
    assert_close(run(*LARGE), with_gradients(jax.nn.dot_product_attention)(*LARGE), atol=2e-5)
    assert "while" in run.lower(*LARGE).as_text()
    assert "while" not in lower(run, *LARGE)
    assert "while" not in run.lower(*(x[:, :127] for x in LARGE)).as_text()


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_devices_compute_their_own_images(axis_type):
    run = with_gradients(attention.dot_product_attention)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(axis_type,))
    split = [jax.device_put(x, NamedSharding(mesh, PartitionSpec("data"))) for x in LARGE]
    with jax.set_mesh(mesh):
        found = run(*split)
        program = run.lower(*split).compile().as_text()
    assert_close(found, run(*LARGE), atol=1e-5)
    assert "while" in program
    assert not re.search("all-gather|all-reduce|all-to-all|collective-permute", program)


def test_a_bias_that_mapped_devices_share_has_the_gradient_of_the_whole_batch():
    rngs = jax.random.split(jax.random.key(0), 4)
    images = [jax.random.normal(rng, (4, 16, 2, 8)) for rng in rngs[:3]]
    bias = jax.random.normal(rngs[3], (1, 2, 16, 16))

    def loss(bias, *images):
        return jnp.sin(attention.dot_product_attention(*images, bias)).mean()

    def loss_over_devices(bias, *images):
        return jax.lax.pmean(loss(bias, *images), "data")

    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    specs = (PartitionSpec(), *[PartitionSpec("data")] * 3)
    mapped = jax.shard_map(
        jax.grad(loss_over_devices), mesh=mesh, in_specs=specs, out_specs=PartitionSpec()
    )
    found = jax.jit(mapped)(bias, *images)
    np.testing.assert_allclose(found, jax.grad(loss)(bias, *images), atol=1e-7)


def test_large_maps_are_exported_for_every_batch_size():
    arrays = [jax.ShapeDtypeStruct(export.symbolic_shape("b, 128, 8, 4"), jnp.float32)] * 3
    exported = export.export(jax.jit(attention.dot_product_attention))(*arrays)
    found = exported.call(*LARGE)
    np.testing.assert_allclose(found, attention.dot_product_attention(*LARGE), atol=1e-5)
