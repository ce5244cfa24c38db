import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from structinit_jax.config import base_config
from structinit_jax.models.registry import create_model
from structinit_jax.training import flops

pytestmark = pytest.mark.usefixtures("library_promotion")


def test_loops_convolutions_and_batched_products_count():
    def function(x, kernels, images, filters):
        x, _ = jax.lax.scan(
            lambda x, kernel: (jax.checkpoint(jnp.dot)(x, kernel), None), x, kernels
        )
        y = jax.lax.conv_general_dilated(
            images, filters, (1, 1), "VALID", feature_group_count=4,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )  # fmt: skip
        return jax.jit(jnp.einsum, static_argnums=0)("bij,bjk->bik", y[..., 0], y[..., 1]), x

    arrays = (
        jnp.ones((8, 16)),
        jnp.ones((5, 16, 16)),
        jnp.ones((2, 6, 6, 4)),
        jnp.ones((3, 3, 1, 4)),
    )
    products = 5 * 8 * 16 * 16 + 2 * 4 * 4 * 4 * 9 + 2 * 4 * 4 * 4
    assert flops.count(jax.make_jaxpr(function)(*arrays).jaxpr) == 2 * products


@pytest.mark.parametrize("family", ["vit", "swin", "mixer", "convmixer"])
def test_the_count_agrees_with_xla_up_to_elementwise_operations(family):
    config = base_config(family)
    config.model.width = 768  # wide enough for GELU to count little
    config.data.image_size = size = 224
    graphdef, state = nnx.split(
        nnx.eval_shape(
            lambda: create_model(
                config.model.to_dict() | {"unroll": 0},  # XLA counts the body of a loop once
                image_size=size,
                channels=3,
                rngs=nnx.Rngs(0),
            )
        )
    )
    image = jax.ShapeDtypeStruct((1, size, size, 3), jnp.float32)
    forward = jax.jit(lambda state, image: nnx.merge(graphdef, state)(image)[0])
    xla = forward.lower(state, image).cost_analysis()["flops"]
    ours = flops.flops_per_image(config) / 3
    assert 0.9 * xla < ours < xla


def test_every_layer_counts(tiny_config):
    counts = []
    for depth in (2, 4, 6):
        tiny_config.model.depth = depth
        counts.append(flops.flops_per_image(tiny_config))
    # Forward and backward matrix products: 6 FLOPs for each of 12 D² weights and each token, and
    # 12 N D for the attention scores and the weighted values.
    tokens, width = 16, 16
    two_layers = 2 * tokens * (6 * 12 * width**2 + 12 * tokens * width)
    assert np.diff(counts).tolist() == [two_layers, two_layers]


def test_neither_fused_kernels_nor_rematerialization_change_the_count():
    config = base_config()
    count = flops.flops_per_image(config)
    config.model.update(attention_implementation="cudnn", remat="full", dtype="bfloat16", unroll=0)
    assert flops.flops_per_image(config) == count
