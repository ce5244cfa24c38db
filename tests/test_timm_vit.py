"""The ViT against what timm computes with the same weights (references/make_vit.py)."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import references
from flax import nnx
from references.vit_cases import CASES, SMALL

from structinit_jax.errors import InputError
from structinit_jax.interop import from_timm, select_weights, to_timm
from structinit_jax.models import VARIANTS, create_model, default_config
from structinit_jax.models.vit import VisionTransformer, resample_positions
from structinit_jax.training.state import count_parameters, split_model

COUNTS = pathlib.Path(references.__file__).with_name("vit_parameters.json")
WITH_GRADIENTS = ("class_token", "registers", "rope_class_token")


def make(**options):
    return VisionTransformer(**(SMALL | dict(positions="learned") | options), rngs=nnx.Rngs(0))


@functools.cache
def recorded():
    return references.load("vit")


def read(case):
    prefix = f"{case}/"
    arrays = {k.removeprefix(prefix): v for k, v in recorded().items() if k.startswith(prefix)}

    def part(name):
        return {k.removeprefix(name): v for k, v in arrays.items() if k.startswith(name)}

    return arrays, part("state/"), part("gradient/")


@functools.cache
def outcome(case):
    """Logits, outputs of the blocks and the gradients by weights, in timm's layout, and images."""
    arrays, state_dict, _ = read(case)
    model = jax.jit(lambda: make(**CASES[case]))()
    from_timm(model, state_dict)
    graphdef, params, _ = split_model(model)

    def loss_fn(params, images):
        logits, out = nnx.merge(graphdef, params)(images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.array([1, 3]))
        return losses.mean(), (logits, out["blocks"]["output"])

    images = jnp.asarray(arrays["images"])
    if case not in WITH_GRADIENTS:
        return *jax.jit(loss_fn)(params, images)[1], None, None
    grad_fn = jax.jit(jax.grad(loss_fn, argnums=(0, 1), has_aux=True))
    (param_grads, image_grads), (logits, blocks) = grad_fn(params, images)
    return logits, blocks, to_timm(nnx.merge(graphdef, param_grads)), image_grads


@pytest.mark.parametrize("case", CASES)
def test_logits_and_blocks_equal_timm(case):
    arrays, *_ = read(case)
    logits, blocks, *_ = outcome(case)
    np.testing.assert_allclose(blocks, arrays["blocks"], atol=1e-4)
    np.testing.assert_allclose(logits, arrays["logits"], atol=1e-4)


@pytest.mark.parametrize("case", WITH_GRADIENTS)
def test_gradients_equal_timm(case):
    arrays, _, gradients = read(case)
    *_, param_grads, image_grads = outcome(case)
    np.testing.assert_allclose(image_grads, arrays["image_gradient"], atol=1e-5, rtol=1e-3)
    assert param_grads.keys() == gradients.keys()
    for name, expected in gradients.items():
        # Gradients that cancel out exactly (key biases) are rounding errors in both.
        tolerance = 1e-3 * np.abs(expected).max() + 1e-6
        np.testing.assert_allclose(param_grads[name], expected, atol=tolerance, err_msg=name)


@pytest.mark.parametrize(("name", "grid"), [("larger", (7, 9)), ("smaller", (3, 2))])
def test_positions_are_resampled_as_timm_does_it(name, grid):
    arrays = read("positions")[0]
    ours = resample_positions(jnp.asarray(arrays["start"]), (4, 5), grid)
    np.testing.assert_allclose(ours, arrays[name], atol=1e-5)


def test_weights_are_loaded_at_another_resolution_as_timm_does_it():
    arrays, (_, state_dict, _) = read("larger_images")[0], read("registers")
    student = make(**CASES["registers"] | dict(image_size=12, num_classes=7))
    model = select_weights(state_dict, student)
    pooled = jax.jit(model)(jnp.asarray(arrays["images"]))[1]["pooled"]
    np.testing.assert_allclose(pooled, arrays["pooled"], atol=1e-4)
    np.testing.assert_array_equal(model.head.kernel[...], student.head.kernel[...])


def test_more_tokens_than_positions_are_refused():
    with pytest.raises(InputError, match="19 positions are fewer than the 4x5 tokens"):
        resample_positions(jnp.zeros((19, 8)), (4, 5), (2, 2))


def test_every_size_has_timms_parameter_count():
    counts = json.loads(COUNTS.read_text())
    assert counts.keys() <= VARIANTS.keys()
    for name, expected in counts.items():
        options = default_config(name)
        image_size = options.pop("image_size")
        model = nnx.eval_shape(
            lambda options=options, size=image_size: create_model(
                options, image_size=size, channels=3, rngs=nnx.Rngs(0)
            )
        )
        assert count_parameters(split_model(model)[1]) == expected, name
