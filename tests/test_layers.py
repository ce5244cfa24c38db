import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from structinit_jax.models import attention, layers
from structinit_jax.models.model import REMAT_POLICIES

SHAPE = (2, 5, 3, 4)  # B, N, h, d


def with_gradients(function):
    @jax.jit
    def run(*arrays):
        y, pull_back = jax.vjp(function, *arrays)
        ramp = jnp.arange(y.size, dtype=y.dtype).reshape(y.shape)
        return (y, *pull_back(jnp.cos(jnp.zeros_like(y) + ramp)))

    return run


def close(found, expected, tolerance):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(b), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 1e-2)])
def test_gelu_and_its_gradient_are_exact(dtype, tolerance):
    x = jnp.linspace(-8, 8, 201, dtype=dtype)
    exact = with_gradients(lambda x: jax.nn.gelu(x, approximate=False))(x.astype(jnp.float32))
    close(with_gradients(layers.gelu)(x), exact, tolerance)


@pytest.mark.parametrize(("inputs", "features"), [((12,), (3, 4)), ((3, 4), (12,))])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_linear_layers_have_the_gradients_of_jax(inputs, features, dtype, tolerance):
    x = jax.random.normal(jax.random.key(0), (2, 5, *inputs), dtype)
    kernel = jax.random.normal(jax.random.key(1), (*inputs, *features), dtype)
    axes = tuple(range(len(inputs)))
    dimensions = ((tuple(2 + i for i in axes), axes), ((), ()))

    def run(dot_general):
        return with_gradients(lambda *operands: dot_general(*operands, dimensions))(x, kernel)

    found, expected = run(layers.dot_general), run(jax.lax.dot_general)
    assert [a.dtype for a in found] == [dtype] * 3
    close(found, expected, tolerance)


def test_cpus_transpose_no_operand_for_the_gradient_of_a_kernel():
    mlp = layers.Mlp(96, 384, init=layers.timm_init, dtype=jnp.float32, rngs=nnx.Rngs(0))
    x = jnp.ones((8, 64, 96))
    compiled = jax.jit(jax.grad(lambda mlp: mlp(x).sum())).lower(mlp).compile()
    # XLA contracts the first axis of both operands: examples and tokens, flattened into one.
    assert compiled.as_text().count("lhs_contracting_dims={0}, rhs_contracting_dims={0}") == 2


@pytest.mark.parametrize("bias_batch", [0, 1, 2])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 3e-2)])
def test_attention_and_its_gradients_equal_those_of_jax(dtype, tolerance, bias_batch):
    rngs = jax.random.split(jax.random.key(0), 4)
    query, key, value = (jax.random.normal(rng, SHAPE).astype(dtype) for rng in rngs[:3])
    bias = [jax.random.normal(rngs[3], (bias_batch, 3, 5, 5))] if bias_batch else []

    def reference(query, key, value, bias=None):
        return jax.nn.dot_product_attention(query, key, value, bias=bias)

    wide = [x.astype(jnp.float32) for x in (query, key, value)]
    found = with_gradients(attention.dot_product_attention)(query, key, value, *bias)
    assert found[0].dtype == dtype
    close(found, with_gradients(reference)(*wide, *bias), tolerance)


def test_a_step_without_remat_keeps_no_attention_maps():
    x = jnp.ones((2, 50, 3, 4))

    def attend(x):
        return attention.dot_product_attention(x, x, x).sum()

    attend = jax.checkpoint(attend, policy=REMAT_POLICIES["none"])
    kept = jax.tree.leaves(jax.linearize(attend, x)[1])
    assert max(leaf.size for leaf in kept) == x.size
