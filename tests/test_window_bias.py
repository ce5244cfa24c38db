"""Position biases that an MLP makes, as in Swin Transformer V2."""

import functools
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from structinit_jax import interop
from structinit_jax.attention_init import AttentionWeights, impulse, mimetic
from structinit_jax.attention_init.windows import bias_maps, bias_of_kernels
from structinit_jax.errors import InputError
from structinit_jax.interop.window_bias import fit_mlp

RNG = jax.random.key(0)
NAMES = json.loads(
    (pathlib.Path(__file__).parent / "references" / "state_dict_names.json").read_text()
)
SCALE = "layers.0.blocks.0.attn.logit_scale"


def coordinates(window):
    """Liu et al. 2022, section 3.3, in units of timm: +-1 at the ends of the offsets -7 to 7."""
    axes = [np.linspace(-8, 8, 2 * side - 1) for side in window]
    linear = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1)
    return np.sign(linear) * np.log2(1 + np.abs(linear)) / 3


@functools.cache
def swinv2(project):
    """The arrays of a fresh model and its buffers, by name."""
    params, buffers = (
        {name: np.full(shape, 0.1, np.float32) for name, shape in NAMES[key].items()}
        for key in (f"swinv2_{project}", f"swinv2_{project}_buffers")
    )
    for arrays in (params, buffers):
        for name, array in arrays.items():
            if name.endswith("relative_coords_table"):
                sides = (array.shape[1] // 2 + 1, array.shape[2] // 2 + 1)
                arrays[name] = coordinates(sides)[None].astype(np.float32)
            elif "norm" in name:  # torchvision and timm start them at 0
                arrays[name] = np.zeros_like(array)
            elif name.endswith("index"):
                arrays[name] = np.zeros(array.shape, np.int64)
    return params, buffers


def mlp(weight, bias, out, table):
    hidden = np.maximum(table.reshape(-1, 2) @ weight.T + bias, 0)
    return jnp.asarray(16 / (1 + np.exp(-hidden @ out.T)), jnp.float32)


@functools.cache
def weights_for(site):
    return impulse()(RNG, site)


@pytest.mark.parametrize("project", ["timm", "huggingface", "torchvision"])
def test_bias_is_that_of_the_scheme(project):
    params, buffers = swinv2(project)
    called = []

    def scheme(rng, site):
        called.append((site, weights_for(site)))
        return called[-1][1]

    new = interop.initialize(params, scheme, RNG, buffers=buffers)
    assert new.keys() == params.keys()
    assert [site.grid for site, _ in called] == [(8, 8), (4, 4)][: len(called)]
    scales = [name for name in params if name.endswith("logit_scale")]
    layers = [(site, bias) for site, weights in called for bias in weights.bias]
    changed = set()
    for scale, (site, bias) in zip(scales, layers, strict=True):
        module = scale.removesuffix("logit_scale")
        name = f"{module}continuous_position_bias_mlp"
        name = name if f"{name}.0.weight" in params else f"{module}cpb_mlp"
        names = [f"{name}.{part}" for part in ("0.weight", "0.bias", "2.weight")]
        table = (buffers | params)[f"{module}relative_coords_table"]
        found = mlp(*(new[n] for n in names), table)
        np.testing.assert_allclose(
            bias_maps(found, site.grid), bias_maps(bias, site.grid), atol=1e-4
        )
        np.testing.assert_array_equal(new[scale], 0)
        changed |= {scale, *names}
    for name, array in new.items():
        assert (array.dtype, array.shape) == (params[name].dtype, params[name].shape)
        if name in changed:
            assert not np.array_equal(array, params[name]), name
        elif not re.search(r"\.(qkv|proj|q_bias|v_bias|query|key|value|output\.dense)\b", name):
            np.testing.assert_array_equal(array, params[name], err_msg=name)


@pytest.mark.parametrize(("window", "tolerance"), [((5, 7), 1e-4), ((16, 16), 0.03)])
def test_fit_of_the_mlp(window, tolerance):
    kernels = np.zeros((2, 3, 3))
    kernels[0, 0, 1] = kernels[1, 2, 2] = 1
    bias = bias_of_kernels(kernels, window, 0.5).T
    table = coordinates(window)
    found = mlp(*fit_mlp(table.reshape(-1, 2), bias, 512, "out"), table)
    difference = bias_maps(found, window) - bias_maps(jnp.asarray(bias), window)
    assert jnp.abs(difference).sum(axis=-1).mean() / 2 < tolerance


def without(*parts):
    params, _ = swinv2("timm")
    return {name: v for name, v in params.items() if not any(part in name for part in parts)}


def constant(rng, site, spread=1.0):
    bias = np.zeros((2, np.prod([2 * side - 1 for side in site.grid]), site.num_heads))
    bias[:, 0] = spread
    return AttentionWeights(bias=jnp.asarray(bias, jnp.float32))


@pytest.mark.parametrize(
    ("params", "scheme", "options", "message"),
    [
        (without, constant, {}, r"buffers: .*hold layers\.0\.blocks\.0\.attn\.relative_coords_"),
        (without, mimetic(), None, r"attention_init: .*no position bias.*logit_scale.*impulse\(\)"),
        (
            without,
            constant,
            dict(grid=(8, 4)),
            r"grid=\(8, 4\) is none of .*\(8, 8\) of .*\(4, 4\)",
        ),
        (
            without,
            functools.partial(constant, spread=15.5),
            None,
            r"differ by 15\.5, but layers\.0\.blocks\.0\.attn\.cpb_mlp\.2\.weight .*target_mass",
        ),
        (lambda: without("cpb_mlp"), constant, None, rf"{SCALE} rescales .*SwinV2"),
        (lambda: without(SCALE), constant, None, r"blocks\.0\.attn has no logit_scale"),
        (
            lambda: without() | {"layers.0.blocks.0.norm1.weight": np.full(16, 0.5)},
            constant,
            None,
            r"norm1\.weight is not 0 or 1",
        ),
        (
            lambda: without() | {"layers.0.blocks.0.attn.relative_coords_table": np.ones((15, 2))},
            constant,
            {},
            r"relative_coords_table has shape \(15, 2\), but needs \(1, 2 rows - 1",
        ),
    ],
)
def test_refused(params, scheme, options, message):
    buffers = swinv2("timm")[1] if options is None or "grid" in options else {}
    with pytest.raises(InputError, match=message):
        interop.initialize(params(), scheme, RNG, buffers=buffers, **(options or {}))


def test_a_small_mlp_is_refused():
    bias = np.zeros((225, 1))
    bias[100] = 4
    with pytest.raises(InputError, match=r"the 8 hidden units before out .* 225 offsets .*smaller"):
        fit_mlp(coordinates((8, 8)).reshape(-1, 2), bias, 8, "out")


def test_check_needs_maps_of_the_model():
    with pytest.raises(
        InputError, match=r"logit_scale belongs to attention within wind.*hit_rates"
    ):
        interop.check(swinv2("timm")[0])
