"""Which modules beside an attention layer are the MLP."""

import numpy as np
import pytest
from foreign_models import LAYERS, state_dict

from structinit_jax import interop
from structinit_jax.attention_init import AttentionWeights
from structinit_jax.errors import InputError

WIDTH = 192
OUTPUTS_AND_INPUTS = {  # of an MLP as wide as the model
    "timm": ("fc2", "fc1"),
    "timm_gates": ("fc2", "fc1_g", "fc1_x"),
    "swiglu": ("w3", "w1", "w2"),
    "swiglu_packed": ("w3", "w12"),
    "sequential": ("10", "2"),
    "big_vision": ("Dense_1", "Dense_0"),
    "huggingface": ("down_proj", "gate_proj", "up_proj"),
    "huggingface_file": ("output.dense", "intermediate.dense"),
    "open_clip": ("c_proj", "c_fc"),
}


def with_square_mlps(*modules):
    params = {k: v for k, v in state_dict("timm").items() if ".mlp." not in k}
    for layer in range(LAYERS):
        for module in modules:
            outputs = (1 + (module == "w12")) * WIDTH  # w12 is two of them
            params[f"blocks.{layer}.mlp.{module}.weight"] = np.ones((outputs, WIDTH), np.float32)
            params[f"blocks.{layer}.mlp.{module}.bias"] = np.ones(outputs, np.float32)
    return params


@pytest.mark.parametrize("name", OUTPUTS_AND_INPUTS)
def test_the_output_layer_of_an_mlp_as_wide_as_the_model(name):
    output, *inputs = OUTPUTS_AND_INPUTS[name]
    params = with_square_mlps(*OUTPUTS_AND_INPUTS[name])
    new = interop.write(params, AttentionWeights(mlp_scale=0), num_heads=3)
    for layer in range(LAYERS):
        assert not new[f"blocks.{layer}.mlp.{output}.weight"].any()
        assert all(new[f"blocks.{layer}.mlp.{module}.weight"].all() for module in inputs)
    changed = [key for key in params if not np.array_equal(new[key], params[key])]
    assert len(changed) == LAYERS


@pytest.mark.parametrize("names", [("expand", "shrink"), ("fc1", "mix2"), ("fc1",)])
def test_square_layers_that_names_do_not_tell_apart_are_refused(names):
    with pytest.raises(InputError, match=r"which of blocks\.0\.mlp\..*, if any, is the output"):
        interop.write(with_square_mlps(*names), AttentionWeights(mlp_scale=0), num_heads=3)
