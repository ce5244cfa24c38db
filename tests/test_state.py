import jax
import numpy as np
import pytest
from conftest import assert_close
from flax import nnx
from safetensors.numpy import save_file
from tiny_models import make

from structinit_jax.errors import InputError
from structinit_jax.models.timm import to_timm
from structinit_jax.rngs import split_seed
from structinit_jax.training import build
from structinit_jax.training.sharding import make_mesh
from structinit_jax.training.state import make_initializer

pytestmark = pytest.mark.usefixtures("library_promotion")


def start(config, mesh=None):
    model = build.make_model(config, mesh or make_mesh())
    return make_initializer(config, model)()


def test_the_keys_of_a_run_do_not_depend_on_jaxs_default():
    expected = split_seed(3)
    with jax.default_prng_impl("rbg"):
        found = split_seed(3)
    assert all(jax.random.key_impl(rng) == "threefry2x32" for rng in found)
    assert_close(*(jax.tree.map(jax.random.key_data, x) for x in (found, expected)), rtol=0)


def test_programs_for_gpus_draw_initial_weights_by_calls(tiny_config, monkeypatch):
    lowered = []
    lower = jax.stages.Traced.lower

    def lower_for_gpus(traced):
        lowered.append(lower(traced, lowering_platforms=("cuda",)).as_text())
        raise InterruptedError  # instead of compiling

    monkeypatch.setattr(jax.stages.Traced, "lower", lower_for_gpus)
    tiny_config.attention_init = dict(name="default")
    for fsdp in (1, 2):
        with pytest.raises(InterruptedError):
            start(tiny_config, make_mesh(fsdp))
    assert ["threefry2x32_ffi" in program for program in lowered] == [True, False]


@pytest.fixture
def teacher(tmp_path):
    """Weights of a larger model with timm's names, and the path of their file."""
    weights = to_timm(make("vit", width=32, depth=3, num_heads=4, positions="learned"))
    save_file(weights, tmp_path / "teacher.safetensors")
    return weights, str(tmp_path / "teacher.safetensors")


def test_weights_are_selected_from_a_larger_model(tiny_config, teacher):
    weights, path = teacher
    tiny_config.seed = 1
    tiny_config.attention_init = dict(name="default")
    tiny_config.model.positions = "learned"
    mesh = make_mesh(fsdp=2)
    model = build.make_model(tiny_config, mesh)
    drawn, _ = start(tiny_config, mesh).weights
    tiny_config.start_from = path
    params, model_state = start(tiny_config, mesh).weights
    student = to_timm(nnx.merge(model.graphdef, params, model_state))
    for i in range(2):
        name = f"blocks.{i}.mlp.fc1.weight"  # 128 × 32; the student's is 64 × 16
        np.testing.assert_array_equal(student[name], weights[name][::2, ::2])
    assert student["head.weight"].shape == (10, 16)
    assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding == b.sharding, params, model.params))
    np.testing.assert_array_equal(params["head"]["kernel"], drawn["head"]["kernel"])


def test_weights_are_the_same_with_xla_options_for_programs_that_run_once(tiny_config, monkeypatch):
    tiny_config.attention_init = dict(name="default")
    expected = start(tiny_config).weights
    monkeypatch.delenv("XLA_FLAGS")  # its options would take precedence
    found = start(tiny_config).weights
    assert_close(found, expected, atol=1e-7)


def test_a_seed_gives_the_same_weights_on_any_number_of_devices(tiny_config):
    tiny_config.model.update(width=64, depth=4, num_heads=4)
    meshes = make_mesh(devices=jax.devices()[:1]), make_mesh(fsdp=4)
    one, several = (start(tiny_config, mesh).weights for mesh in meshes)
    assert_close(one, several, atol=1e-5)


def test_targets_out_of_reach_are_reported_once(tiny_config, capsys):
    tiny_config.model.update(num_heads=8, depth=1)
    tiny_config.attention_init.target_mass = 0.9
    start(tiny_config)
    assert capsys.readouterr().out.count("warning: only") == 1


def test_a_file_that_does_not_fit_is_refused(tiny_config, teacher, tmp_path):
    tiny_config.model.depth = 4
    (tmp_path / "text").write_text("not weights")
    for path, message in (
        (f"{tmp_path}/nothing", r"config\.start_from=.*nothing' must be an existing"),
        (f"{tmp_path}/text", r"config\.start_from=.*text' cannot be read.* a safetensors file"),
        (teacher[1], r"does not fit the model: .*blocks\.3\."),
    ):
        tiny_config.start_from = path
        with pytest.raises(InputError, match=message):
            start(tiny_config)
