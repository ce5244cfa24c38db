import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from structinit_jax import attention_init
from structinit_jax.attention_init import AttentionWeights
from structinit_jax.errors import InputError
from structinit_jax.models.vit import VisionTransformer
from structinit_jax.training.state import count_parameters, split_model

SIZES = dict(image_size=8, patch_size=2, channels=1, num_classes=10, width=16, depth=3, num_heads=2)


def make(**options):
    return VisionTransformer(**(SIZES | options), rngs=nnx.Rngs(0))


def images(n=2):
    return jax.random.normal(jax.random.key(1), (n, 8, 8, 1))


@pytest.mark.parametrize("pool", ["mean", "class_token"])
@pytest.mark.parametrize("positions", ["sincos", "learned"])
def test_logits_and_intermediates_have_the_documented_shapes(pool, positions):
    model = make(pool=pool, positions=positions)
    logits, out = model(images(), with_maps=True)
    tokens = 17 if pool == "class_token" else 16
    assert logits.shape == (2, 10)
    assert out["patch_embedding"].shape == (2, 16, 16)
    assert out["embedded"].shape == (2, tokens, 16)
    assert out["blocks"]["output"].shape == (3, 2, tokens, 16)
    assert out["blocks"]["attention_maps"].shape == (3, 2, 2, tokens, tokens)
    np.testing.assert_allclose(out["blocks"]["attention_maps"].sum(-1), 1, rtol=1e-5)
    assert "attention_maps" not in model(images())[1]["blocks"]


@pytest.mark.parametrize(
    ("name", "patch", "width", "heads", "count"),
    # Parameter counts that timm prints for vit_{tiny,small,base}_patch16_224.
    [
        ("tiny", 16, 192, 3, 5_717_416),
        ("small", 16, 384, 6, 22_050_664),
        ("base", 16, 768, 12, 86_567_656),
    ],
)
def test_parameter_count_equals_timm(name, patch, width, heads, count):
    model = nnx.eval_shape(
        lambda: VisionTransformer(
            image_size=224,
            patch_size=patch,
            channels=3,
            num_classes=1000,
            width=width,
            depth=12,
            num_heads=heads,
            positions="learned",
            pool="class_token",
            rngs=nnx.Rngs(0),
        )
    )
    assert count_parameters(split_model(model)[1]) == count


def test_scan_and_unrolled_stack_agree_with_blocks_called_one_by_one():
    model = make()
    scanned, out = model(images())
    unrolled = make(unroll=3)(images())[0]
    np.testing.assert_allclose(scanned, unrolled, atol=1e-6)
    x = out["embedded"]
    for layer in range(3):
        block = jax.tree.map(lambda leaf, layer=layer: leaf[layer], model.blocks)
        x, _ = block(x, drop_path_rate=jnp.zeros(()))
        np.testing.assert_allclose(x, out["blocks"]["output"][layer], atol=1e-5)


def test_attention_agrees_with_flax(library_promotion):
    block = jax.tree.map(lambda leaf: leaf[0], make(attention_init=attention_init.mimetic()).blocks)
    flax_attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=nnx.Rngs(0))
    for name in ("query", "key", "value", "out"):
        ours = getattr(block.attention, name)
        getattr(flax_attention, name).kernel[...] = ours.kernel[...]
        getattr(flax_attention, name).bias[...] = ours.bias[...]
    x = jax.random.normal(jax.random.key(2), (2, 16, 16))
    expected = flax_attention(x)
    np.testing.assert_allclose(block.attention(x)[0], expected, atol=1e-5)


def test_patch_embedding_is_a_strided_convolution():
    embedding = make().patch_embedding
    convolved = jax.lax.conv_general_dilated(
        images(), embedding.kernel[...], (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    expected = convolved + embedding.bias[...].reshape(1, 1, 1, -1)
    np.testing.assert_allclose(embedding(images()), expected, atol=1e-5)


def test_mlp_uses_the_exact_gelu():
    from scipy.special import erf

    mlp = jax.tree.map(lambda leaf: leaf[0], make().blocks).mlp
    x = jnp.linspace(-3, 3, 16)
    hidden = (
        np.asarray(x) @ np.asarray(mlp.fc1.kernel[...]) * 100
    )  # large enough to tell erf from tanh
    mlp.fc1.kernel[...] = mlp.fc1.kernel[...] * 100
    expected = (hidden * (1 + erf(hidden / 2**0.5)) / 2) @ np.asarray(mlp.fc2.kernel[...])
    np.testing.assert_allclose(mlp(x), expected, atol=1e-5)


def test_training_is_random_by_key_and_evaluation_is_not():
    model = make(drop_path=0.5, dropout=0.1)
    one, again, other = (model(images(8), key=jax.random.key(k))[0] for k in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert np.abs(one - other).max() > 1e-3
    np.testing.assert_array_equal(model(images())[0], model(images())[0])


def test_drop_path_keeps_expectation_and_drops_whole_examples():
    from structinit_jax.models.layers import drop_path

    y = drop_path(jnp.ones((4000, 3, 2)), jnp.float32(0.25), jax.random.key(0))
    per_example = np.asarray(y).reshape(4000, -1)
    assert np.all(per_example == per_example[:, :1])
    assert set(np.unique(per_example.round(4))) == {0, np.float32(1.3333)}
    assert abs(per_example.mean() - 1) < 0.03


def test_bfloat16_computes_in_bfloat16_with_float32_parameters_and_logits(library_promotion):
    model = make(dtype="bfloat16")
    logits, out = model(images())
    assert out["blocks"]["output"].dtype == jnp.bfloat16
    assert logits.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(split_model(model)[1])} == {jnp.dtype("float32")}
    np.testing.assert_allclose(logits, make()(images())[0], atol=0.02)


def test_class_token_gets_no_sincos_position():
    model = make(pool="class_token")
    embedded = model(images())[1]["embedded"]
    np.testing.assert_allclose(embedded[0, 0], model.class_token[...], atol=1e-7)


@pytest.mark.parametrize("pool", ["mean", "class_token"])
def test_attention_init_is_asked_once_and_put_in_place(pool):
    calls = []

    def init(key, site):
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


def test_scheme_that_sets_positions_is_refused_by_fixed_positions():
    def init(key, site):
        return AttentionWeights(positions=jnp.zeros((16, 16)))

    with pytest.raises(InputError, match=r"needs model\.positions='learned'"):
        make(attention_init=init)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(patch_size=3), r"data\.image_size=8 is not divisible by model\.patch_size=3"),
        (dict(num_heads=3), r"model\.width=16 is not divisible by model\.num_heads=3"),
        (dict(width=18), r"model\.width=18: sin-cos positions need a width divisible by 4"),
        (dict(positions="none"), r"model\.positions='none': choose one of sincos, learned"),
        (dict(pool="max"), r"model\.pool='max': choose one of mean, class_token"),
        (dict(dtype="float16"), r"model\.dtype='float16'"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_name(options, message):
    with pytest.raises(InputError, match=message):
        make(**options)
