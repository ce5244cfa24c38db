import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from conftest import assert_close
from flax import nnx

from structinit_jax.models.convmixer import ConvMixer, _convolve, convolve_depthwise
from structinit_jax.models.timm import from_timm, to_timm

SIZES = dict(image_size=(8, 12), patch_size=2, channels=1, num_classes=5)
SIZES |= dict(width=8, depth=2, kernel_size=3)
KERNEL_SIZES = {"even": 8, "odd": 5}


def make(**options):
    return ConvMixer(**(SIZES | options), rngs=nnx.Rngs(0))


@jax.jit
def train_forward(model, images):
    logits, out = model(images, rng=jax.random.key(0))
    return logits, out, nnx.state(model, nnx.BatchStat)


@pytest.fixture(scope="module", params=KERNEL_SIZES)
def reference(request):
    """timm's recorded arrays, by key, and our model with timm's weights."""
    arrays = references.part(references.load("convmixer"), request.param)
    sizes = dict(image_size=(12, 20), channels=3, width=16, kernel_size=KERNEL_SIZES[request.param])
    model = nnx.eval_shape(lambda: make(**sizes))
    from_timm(model, references.part(arrays, "state"))
    return arrays, model


@pytest.mark.parametrize("mode", ["evaluation", "training"])
def test_logits_blocks_and_running_statistics_equal_timms(reference, mode):
    arrays, model = reference
    if mode == "training":
        logits, out, after = train_forward(model, arrays["images"])
        trained = nnx.clone(model)
        nnx.update(trained, after)
        exported, recorded = to_timm(trained), references.part(arrays, "after")
        assert len(recorded) == 10
        for name, expected in recorded.items():
            np.testing.assert_allclose(exported[name], expected, atol=1e-5, err_msg=name)
            assert np.abs(expected - arrays[f"state/{name}"]).max() > 1e-3
    else:
        logits, out = jax.jit(model)(arrays["images"])
    for ours, theirs in zip(out["blocks"]["output"], arrays[f"{mode}/blocks"], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    np.testing.assert_allclose(logits, arrays[f"{mode}/logits"], atol=1e-4)


@pytest.mark.parametrize("size", [3, 4])
def test_shifted_products_equal_the_convolution_that_accelerators_compile(size):
    def loss(function, x, kernel):
        return jnp.square(function(x, kernel)).sum()

    rngs = jax.random.split(jax.random.key(0))
    inputs = jax.random.normal(rngs[0], (2, 5, 7, 6)), jax.random.normal(rngs[1], (size, size, 6))
    ours = jax.jit(jax.value_and_grad(functools.partial(loss, convolve_depthwise), argnums=(0, 1)))
    theirs = jax.value_and_grad(functools.partial(loss, _convolve), argnums=(0, 1))(*inputs)
    assert_close(ours(*inputs), theirs, rtol=1e-4, atol=1e-4)
    traced = ours.trace(*inputs)
    assert "stablehlo.convolution" not in traced.lower(lowering_platforms=("cpu",)).as_text()
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("stablehlo.convolution") == 3
