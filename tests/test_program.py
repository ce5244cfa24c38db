"""Start states; the steps themselves are tested in test_step.py."""

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from structinit_jax.data.info import CATALOG
from structinit_jax.errors import InputError
from structinit_jax.interop import to_timm
from structinit_jax.models.vit import VisionTransformer
from structinit_jax.program import build_program, initialize, make_plan

pytestmark = pytest.mark.usefixtures("library_promotion")
TEACHER = dict(
    image_size=8,
    patch_size=2,
    channels=1,
    num_classes=7,
    width=32,
    depth=3,
    num_heads=4,
    positions="learned",
)


def start_state(config):
    program = build_program(config, make_plan(config, CATALOG["digits"], 384))
    return program, initialize(config, program)


@pytest.fixture
def teacher(tmp_path):
    """A larger model's weights in timm's names, and their file."""
    weights = to_timm(VisionTransformer(**TEACHER, rngs=nnx.Rngs(5)))
    save_file(weights, tmp_path / "teacher.safetensors")
    return weights, str(tmp_path / "teacher.safetensors")


def test_a_run_starts_from_the_weights_of_a_larger_model(tiny_config, teacher, capsys):
    weights, tiny_config.start_from = teacher
    tiny_config.model.positions = "learned"
    program, state = start_state(tiny_config)
    assert f"weights selected from {tiny_config.start_from}" in capsys.readouterr().out
    student = to_timm(nnx.merge(program.graphdef, state.params, state.model_state))
    for i in range(2):
        name = f"blocks.{i}.mlp.fc1.weight"  # 128 × 32, of which the student has 64 × 16
        np.testing.assert_array_equal(student[name], weights[name][::2, ::2])
    assert student["head.weight"].shape == (10, 16)
    tiny_config.start_from = ""
    drawn = start_state(tiny_config)[1]
    np.testing.assert_array_equal(state.params["head"]["kernel"], drawn.params["head"]["kernel"])
    # Placed as the step wants it.
    expected = jax.tree.map(lambda leaf: leaf.sharding, program.abstract_state.params)
    assert jax.tree.map(lambda leaf: leaf.sharding, state.params) == expected


def test_a_file_that_cannot_be_the_start_is_refused(tiny_config, teacher, tmp_path):
    def refusal():
        with pytest.raises(InputError) as caught:
            start_state(tiny_config)
        return str(caught.value)

    tiny_config.start_from = str(tmp_path / "nothing.safetensors")
    assert "nothing.safetensors' cannot be read: " in refusal()
    (tmp_path / "text").write_text("no weights")
    tiny_config.start_from = str(tmp_path / "text")
    assert "It needs to be a safetensors file with the weights of a model of timm" in refusal()
    tiny_config.start_from = teacher[1]
    tiny_config.model.depth = 4
    assert "does not fit the model: student has blocks.3." in refusal()
