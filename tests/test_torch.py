import jax
import numpy as np
import pytest
from foreign_models import normal_scheme, state_dict

from structinit_jax.errors import InputError
from structinit_jax.interop import initialize, torch_maps

torch = pytest.importorskip("torch")


def test_tensors_of_all_dtypes_become_what_arrays_become():
    arrays = state_dict("timm")
    given = dict(attention_init=normal_scheme, rng=jax.random.key(0), num_heads=3)
    expected = initialize(arrays, **given)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        tensors = {name: torch.from_numpy(array).to(dtype) for name, array in arrays.items()}
        new = initialize(tensors, **given)
        for name, tensor in new.items():
            assert tensor.dtype == dtype
            assert torch.equal(tensor, torch.from_numpy(expected[name]).to(dtype))
        assert torch.equal(tensors["pos_embed"], torch.from_numpy(arrays["pos_embed"]).to(dtype))


def test_other_tensors_stay_what_they_are():
    arrays = dict(reversed(state_dict("timm").items()))
    tensors = {k: torch.nn.Parameter(torch.from_numpy(array)) for k, array in arrays.items()}
    new = initialize(tensors, normal_scheme, jax.random.key(0), num_heads=3)
    assert list(new) == list(tensors)
    assert new["norm.weight"] is tensors["norm.weight"]


def test_a_sharded_tensor_is_refused():
    tensors = {name: torch.from_numpy(array) for name, array in state_dict("timm").items()}
    tensors["norm.weight"].full_tensor = None  # as a DTensor
    with pytest.raises(InputError, match=r"DTensor.* before fully_shard"):
        initialize(tensors, normal_scheme, jax.random.key(0), num_heads=3)


def test_tensors_without_values_are_refused():
    tensors = {name: torch.from_numpy(a).to("meta") for name, a in state_dict("timm").items()}
    with pytest.raises(InputError, match=r"qkv\.weight has type Tensor"):
        initialize(tensors, normal_scheme, jax.random.key(0), num_heads=3)


class Backbone(torch.nn.TransformerEncoder):
    def train(self, mode=True):
        super().train(mode)  # returns None, as in OpenMMLab


def test_maps_are_recorded_in_inference_mode_too():
    layer = torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True, norm_first=True)
    model = Backbone(layer, 2, enable_nested_tensor=False)
    tokens = torch.randn(3, 5, 8)
    model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    expected = torch_maps(model, tokens)
    assert [module.training for module in model.modules()] == modes
    assert torch.backends.mha.get_fastpath_enabled()
    assert [maps.shape for maps in expected] == [(3, 2, 5, 5)] * 2
    with torch.inference_mode():
        found = torch_maps(model, tokens)
    # PyTorch can round differently in the two modes.
    for maps, same in zip(expected, found, strict=True):
        np.testing.assert_allclose(maps, same, atol=1e-6)


class Flex(torch.nn.Module):
    def forward(self, x):
        from torch.nn.attention.flex_attention import flex_attention

        return flex_attention(x, x, x)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("model", [torch.nn.Linear(4, 4), Flex()])
def test_a_model_without_maps_is_refused(model):
    with pytest.raises(InputError, match=r"^model: the call computed no softmax"):
        torch_maps(model, torch.ones(2, 1, 4, 4))
