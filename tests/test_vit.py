import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from flax import nnx

from structinit_jax import attention_init
from structinit_jax.attention_init import AttentionWeights
from structinit_jax.errors import InputError
from structinit_jax.models.layers import drop_path
from structinit_jax.models.vit import VisionTransformer

SIZES = dict(image_size=8, patch_size=2, channels=1, num_classes=10, width=16, depth=3, num_heads=2)


def make(**options):
    return VisionTransformer(**(SIZES | options), rngs=nnx.Rngs(0))


def images(n=2):
    return jax.random.normal(jax.random.key(1), (n, 8, 8, 1))


@pytest.mark.parametrize("pool", ["mean", "class_token"])
@pytest.mark.parametrize("positions", ["sincos", "learned", "rope"])
def test_logits_and_intermediates_have_the_documented_shapes(pool, positions):
    def run():
        return make(pool=pool, positions=positions)(images(), with_maps=True)

    logits, out = jax.eval_shape(run)
    tokens = 17 if pool == "class_token" else 16
    assert logits.shape == (2, 10)
    assert out["patch_embedding"].shape == (2, 16, 16)
    assert out["embedded"].shape == (2, tokens, 16)
    assert out["blocks"]["output"].shape == (3, 2, tokens, 16)
    assert out["blocks"]["attention_maps"].shape == (3, 2, 2, tokens, tokens)
    assert out["pooled"].shape == (2, 16)


@pytest.fixture(scope="module")
def model():
    return jax.jit(lambda: make(attention_init=attention_init.mimetic()))()


@pytest.fixture(scope="module")
def first_block(model):
    return jax.tree.map(lambda leaf: leaf[0], model.blocks)


def test_the_stack_agrees_with_blocks_called_one_by_one(model):
    _, out = jax.jit(lambda model: model(images(), with_maps=True))(model)
    run_block = jax.jit(lambda block, x: block(x, drop_path_rate=jnp.zeros(())))
    np.testing.assert_allclose(out["blocks"]["attention_maps"].sum(-1), 1, rtol=1e-5)
    x = out["embedded"]
    for layer in range(3):
        block = jax.tree.map(lambda leaf, layer=layer: leaf[layer], model.blocks)
        x, block_out = run_block(block, x)
        assert "attention_maps" not in block_out
        np.testing.assert_allclose(x, out["blocks"]["output"][layer], atol=1e-5)


def test_attention_agrees_with_flax(first_block, library_promotion):
    flax_attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=nnx.Rngs(0))
    for name in ("query", "key", "value", "out"):
        ours = getattr(first_block.attention, name)
        getattr(flax_attention, name).kernel[...] = ours.kernel[...]
        getattr(flax_attention, name).bias[...] = ours.bias[...]
    x = jax.random.normal(jax.random.key(2), (2, 16, 16))
    expected = flax_attention(x)
    np.testing.assert_allclose(first_block.attention(x)[0], expected, atol=1e-5)


def test_patch_embedding_is_a_strided_convolution(model):
    embedding = model.patch_embedding
    convolved = jax.lax.conv_general_dilated(
        images(), embedding.kernel[...], (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    expected = convolved + embedding.bias[...].reshape(1, 1, 1, -1)
    np.testing.assert_allclose(embedding(images()), expected, atol=1e-5)


def test_mlp_uses_the_exact_gelu(first_block):
    mlp = nnx.clone(first_block.mlp)
    mlp.fc1.kernel[...] = mlp.fc1.kernel[...] * 100  # large enough to tell erf from tanh
    x = jnp.linspace(-3, 3, 16)
    hidden = np.asarray(x) @ np.asarray(mlp.fc1.kernel[...])
    expected = (hidden * (1 + scipy.special.erf(hidden / 2**0.5)) / 2) @ np.asarray(
        mlp.fc2.kernel[...]
    )
    np.testing.assert_allclose(mlp(x), expected, atol=1e-5)


def test_a_block_drops_what_its_branches_add(first_block):
    x, rng = jax.random.normal(jax.random.key(2), (8, 16, 16)), jax.random.key(0)
    block = nnx.clone(first_block)
    block.attention.dropout = block.mlp.dropout = 0.5
    run = jax.jit(lambda x, rate, rng: block(x, drop_path_rate=rate, rng=rng))
    _, out = run(x, jnp.zeros(()), rng)
    for name in ("attention", "mlp"):
        assert abs(np.mean(out[name] == 0) - 0.5) < 0.05
    np.testing.assert_array_equal(run(x, jnp.float32(0.9999), rng)[0], x)


def test_drop_path_keeps_expectation_and_drops_whole_examples():
    y = drop_path(jnp.ones((4000, 3, 2)), jnp.float32(0.25), jax.random.key(0))
    per_example = np.asarray(y).reshape(4000, -1)
    assert np.all(per_example == per_example[:, :1])
    assert set(np.unique(per_example.round(4))) == {0, np.float32(1.3333)}
    assert abs(per_example.mean() - 1) < 0.03


def test_class_token_gets_no_sincos_position():
    @jax.jit
    def run():
        model = make(pool="class_token", depth=1)
        return model(images())[1]["embedded"], model.class_token[...]

    embedded, class_token = run()
    np.testing.assert_allclose(embedded[0, 0], class_token, atol=1e-7)


@pytest.mark.parametrize("pool", ["mean", "class_token"])
def test_attention_init_is_asked_once_and_put_in_place(pool):
    calls = []

    def init(rng, site):
        calls.append(site)
        shape = (site.num_layers, site.width, site.num_heads, site.head_dim)
        return AttentionWeights(
            query=jnp.full(shape, 2.0), positions=jnp.full((site.num_tokens, site.width), 3.0)
        )

    model = make(pool=pool, positions="learned", attention_init=init)
    (site,) = calls
    assert (site.grid, site.width, site.num_heads, site.head_dim) == ((4, 4), 16, 2, 8)
    assert site.num_layers == 3
    assert site.qk_scale == pytest.approx(8**-0.5)
    assert site.positions.shape == (16, 16)
    assert np.all(model.blocks.attention.query.kernel[...] == 2)
    assert np.all(model.positions[...][-16:] == 3)
    assert len(model.positions[...]) == (17 if pool == "class_token" else 16)
    assert not np.any(model.blocks.attention.key.kernel[...] == 2)


def test_position_scale_multiplies_the_whole_table():
    options = dict(pool="class_token", num_registers=2, positions="learned")
    model = make(**options)
    scaled = make(**options, attention_init=lambda rng, site: AttentionWeights(position_scale=18.0))
    np.testing.assert_allclose(scaled.positions[...], 18 * model.positions[...], rtol=1e-6)


def test_patch_and_mlp_scales_multiply_the_kernels():
    model = make()
    scheme = lambda rng, site: AttentionWeights(patch_scale=0.3, mlp_scale=0.0)  # noqa: E731
    scaled = make(attention_init=scheme)
    kernel = model.patch_embedding.kernel[...]
    np.testing.assert_allclose(scaled.patch_embedding.kernel[...], 0.3 * kernel, rtol=1e-6)
    assert not np.any(scaled.blocks.mlp.fc2.kernel[...])
    np.testing.assert_array_equal(
        scaled.blocks.mlp.fc1.kernel[...], model.blocks.mlp.fc1.kernel[...]
    )


def test_scheme_that_sets_positions_is_refused_by_fixed_positions():
    def init(rng, site):
        return AttentionWeights(positions=jnp.zeros((16, 16)))

    with pytest.raises(InputError, match=r"model\.positions='learned'"):
        make(attention_init=init)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(patch_size=3), r"data\.image_size=8 .*model\.patch_size=3"),
        (dict(num_heads=3), r"model\.width=16 .*model\.num_heads=3"),
        (dict(width=18), r"width=18: sin-cos positions need a width .*divisible by 4"),
        (dict(positions="none"), r"model\.positions='none' must be one of 'sincos', 'learned'"),
        (dict(pool="max"), r"model\.pool='max' must be one of 'mean', 'class_token'"),
        (dict(dtype="float16"), r"model\.dtype='float16'"),
        (dict(mlp_ratio=0.01), r"model\.mlp_ratio .*MLP of 16 channels without hidden channels"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_name(options, message):
    with pytest.raises(InputError, match=message):
        make(**options)
