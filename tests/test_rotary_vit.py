import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from structinit_jax.attention_init import RotarySite, default, impulse
from structinit_jax.errors import InputError
from structinit_jax.models.attention import rotate
from structinit_jax.models.vit import VisionTransformer

SIZES = dict(image_size=8, patch_size=2, channels=1, num_classes=4, width=64, depth=2, num_heads=8)
IMAGES = jax.random.normal(jax.random.key(1), (4, 8, 8, 1))


def make(**options):
    return VisionTransformer(**(SIZES | options), positions="rope", rngs=nnx.Rngs(0))


def test_rotation_is_that_of_complex_numbers_in_float32():
    x = jax.random.normal(jax.random.key(0), (2, 5, 3, 8))
    angles = np.random.default_rng(0).uniform(-9, 9, (5, 4)).astype(np.float32)
    pairs = np.asarray(x[..., ::2]) + 1j * np.asarray(x[..., 1::2])
    turned = pairs * np.exp(1j * angles)[:, None]
    expected = np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)
    np.testing.assert_allclose(rotate(x, angles), expected, atol=1e-5)
    half = x.astype(jnp.bfloat16)
    in_float32 = rotate(half.astype(jnp.float32), angles).astype(jnp.bfloat16)
    np.testing.assert_array_equal(rotate(half, angles), in_float32)


@pytest.fixture(scope="module")
def weights():
    (site,) = make().sites().values()
    assert type(site) is RotarySite
    return impulse()(jax.random.key(0), site)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_heads_of_every_layer_attend_to_their_neighbor(weights, dtype, library_promotion):
    options = dict(pool="class_token", num_registers=2, dtype=dtype, remat="full")
    model = make(**options, attention_init=lambda rng, site: weights)
    _, out = jax.jit(lambda model: model(IMAGES, with_maps=True))(model)
    maps = np.asarray(out["blocks"]["attention_maps"], np.float32)[..., 3:, 3:]
    targets = np.asarray(weights.targets)[np.asarray(weights.filter_index)][:, None]
    has_target = np.broadcast_to(targets.max(-1) > 0, maps.shape[:-1])
    hits = maps.argmax(-1) == targets.argmax(-1)
    assert hits[has_target].mean() > 0.95


def test_a_step_on_two_devices_lowers_the_loss(weights, library_promotion):
    options = dict(dtype="bfloat16", remat="full", layer_scale=0.5)
    model = make(**options, attention_init=lambda rng, site: weights)
    model.head.kernel[...] = 0.1 * jax.random.normal(jax.random.key(2), model.head.kernel.shape)
    graphdef, params = nnx.split(model)
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    images = jax.device_put(IMAGES, sharding)
    params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))

    @jax.jit
    @jax.value_and_grad
    def step(params):
        log_probs = jax.nn.log_softmax(nnx.merge(graphdef, params)(images)[0])
        return -log_probs[jnp.arange(4), jnp.arange(4)].mean()

    loss, grads = step(params)
    leaves = jax.tree.leaves(grads)
    assert all(leaf.dtype == jnp.float32 and np.isfinite(leaf).all() for leaf in leaves)
    size = sum(float(jnp.sum(leaf**2)) for leaf in leaves) ** 0.5
    lower = jax.tree.map(lambda p, g: p - 0.02 / size * g, params, grads)
    assert step(lower)[0] < loss


def test_the_patch_embedding_gets_scale_and_bias(weights):
    plain, model = make(), make(attention_init=lambda rng, site: weights)
    kernel = plain.patch_embedding.kernel[...]
    np.testing.assert_allclose(model.patch_embedding.kernel[...], 0.3 * kernel, rtol=1e-6)
    np.testing.assert_array_equal(model.patch_embedding.bias[...], weights.patch_bias)


def test_positions_are_seen_by_attention_alone():
    @jax.jit
    def run(images):
        out = make(attention_init=default(query_key_scale=50.0))(images)[1]
        return out["embedded"], out["blocks"]["output"][0]

    swapped = jnp.roll(IMAGES, 2, axis=1)  # by one row of tokens
    (embedded, output), (other, moved) = run(IMAGES), run(swapped)
    order = np.roll(np.arange(16), -4)
    np.testing.assert_allclose(other[:, order], embedded, atol=1e-6)
    assert np.abs(moved[:, order] - output).max() > 1e-3


def test_head_dimensions_that_cannot_be_rotated_are_refused():
    with pytest.raises(InputError, match="head_dim=2: rotary positions need a multiple of 4"):
        make(num_heads=32)
