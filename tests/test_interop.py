import json
import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from structinit_jax import interop
from structinit_jax.attention_init import AttentionWeights, impulse, sincos_positions
from structinit_jax.attention_init.positions import layer_norm
from structinit_jax.errors import InputError
from structinit_jax.models.vit import VisionTransformer

WIDTH, HEADS, DIM, LAYERS, GRID = 32, 4, 8, 2, (4, 4)
TOKENS = 16
NAMES = json.loads((pathlib.Path(__file__).parent / "references/state_dict_names.json").read_text())
# What a caller has to add for each recorded state dict, and the grid that must be found.
RECORDED = {
    "timm": (dict(num_heads=3), (14, 14)),
    "timm_registers": (dict(num_heads=6), (37, 37)),
    "timm_distilled": (dict(num_heads=3), (14, 14)),
    "timm_separate": (dict(num_heads=12), (32, 32)),
    "huggingface": (dict(num_heads=4), (6, 6)),
    "huggingface_file": (dict(num_heads=4), (6, 6)),
}


def state_dict(name, dtype=np.float32):
    """NumPy arrays with the names and shapes of a real model's state dict."""
    rng = np.random.default_rng(0)
    return {
        key: (0.1 * rng.standard_normal(shape, np.float32)).astype(dtype)
        for key, shape in NAMES[name].items()
    }


def normal_scheme(key, site):
    """Sharp random maps, and a new encoding, without anything to compile."""
    rng = np.random.default_rng(1)
    layers = (site.num_layers, site.width, site.num_heads, site.head_dim)
    query, key_, value = (site.width**-0.5 * normal(rng, *layers) for _ in range(3))
    out = normal(rng, layers[0], *layers[2:], layers[1])
    positions = sincos_positions(site.grid, site.width) if site.positions_trainable else None
    return AttentionWeights(query, key_, value, out, positions)


def linen_block(rng, lead=(), number=0):
    attention = {
        name: {
            "kernel": normal(rng, *lead, WIDTH, HEADS, DIM),
            "bias": normal(rng, *lead, HEADS, DIM),
        }
        for name in ("query", "key", "value")
    }
    attention["out"] = {
        "kernel": normal(rng, *lead, HEADS, DIM, WIDTH),
        "bias": normal(rng, *lead, WIDTH),
    }
    return {
        "LayerNorm_0": {"scale": jnp.ones((*lead, WIDTH)), "bias": jnp.zeros((*lead, WIDTH))},
        f"MultiHeadDotProductAttention_{number}": attention,
        "MlpBlock_0": {"Dense_0": {"kernel": normal(rng, *lead, WIDTH, 2 * WIDTH)}},
    }


def normal(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape, np.float32))


def linen_tree(kind):
    """Parameters as big_vision and vit_jax lay them out."""
    rng = np.random.default_rng(0)
    number = 1 if kind == "vit_jax" else 0
    encoder = {f"encoderblock_{i}": linen_block(rng, number=number) for i in range(LAYERS)}
    if kind == "big_vision_scan":
        encoder = {"encoderblock": linen_block(rng, lead=(LAYERS,))}
    encoder["encoder_norm"] = {"scale": jnp.ones(WIDTH), "bias": jnp.zeros(WIDTH)}
    tree = {
        "embedding": {"kernel": normal(rng, 4, 4, 3, WIDTH), "bias": jnp.zeros(WIDTH)},
        "Transformer": encoder,
        "cls": normal(rng, 1, 1, WIDTH),
        "head": {"kernel": normal(rng, WIDTH, 10), "bias": jnp.zeros(10)},
    }
    if kind == "vit_jax":
        encoder["posembed_input"] = {"pos_embedding": normal(rng, 1, TOKENS + 1, WIDTH)}
    else:
        tree["pos_embedding"] = normal(rng, 1, TOKENS, WIDTH)
        pool = linen_block(rng)["MultiHeadDotProductAttention_0"]
        tree["MAPHead_0"] = {"MultiHeadDotProductAttention_0": pool}
    return tree


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(HEADS, WIDTH, dropout_rate=0.1, rngs=rngs)


class Encoder(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Block(rngs) for _ in range(LAYERS)])


class NNXModel(nnx.Module):
    """The names of jimm: a class token, a pooling head, and a parameter of position numbers."""

    def __init__(self, rngs):
        self.cls_token = nnx.Param(jnp.zeros((1, 1, WIDTH)))
        self.position_embeddings = nnx.Param(jnp.ones((1, TOKENS + 1, WIDTH)))
        self.vision_position_ids = nnx.Param(jnp.arange(TOKENS + 1.0)[None])
        self.encoder = Encoder(rngs)
        self.MAPHead = Block(rngs)


MODELS = {
    **{name: lambda name=name: state_dict(name) for name in RECORDED},
    **{
        name: lambda name=name: linen_tree(name)
        for name in ("big_vision", "big_vision_scan", "vit_jax")
    },
    "nnx": lambda: NNXModel(nnx.Rngs(0)),
    "nnx_state": lambda: nnx.state(NNXModel(nnx.Rngs(0)), nnx.Param),
    "nnx_pure": lambda: nnx.to_pure_dict(nnx.state(NNXModel(nnx.Rngs(0)), nnx.Param)),
    "frozen": lambda: nn.FrozenDict({"params": linen_tree("big_vision")}),
    "structinit_jax": lambda: structinit_model(),
}


def structinit_model():
    """The state of this project's own model: one block with a leading layer axis."""
    abstract = nnx.eval_shape(
        lambda: VisionTransformer(
            image_size=8,
            patch_size=2,
            channels=1,
            num_classes=10,
            width=WIDTH,
            depth=LAYERS,
            num_heads=HEADS,
            positions="learned",
            pool="class_token",
            rngs=nnx.Rngs(0),
        )
    )
    return jax.tree.map(lambda leaf: jnp.ones(leaf.shape), nnx.state(abstract, nnx.Param))


def arguments(name):
    return RECORDED.get(name, ({}, GRID))[0]


def by_path(params):
    leaves, _ = interop.leaves.flatten(params)
    return leaves


def to_numpy(leaf):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.array(leaf)


def layer_maps(weights, positions):
    x = layer_norm(np.asarray(positions))
    scores = np.einsum("nD,LDhd,LEhd,mE->Lhnm", x, weights.query, weights.key, x, optimize=True) * (
        weights.query.shape[-1] ** -0.5
    )
    return np.asarray(jax.nn.softmax(jnp.asarray(scores), axis=-1))


@pytest.mark.parametrize("name", MODELS)
def test_what_is_written_is_read_again_and_nothing_else_moves(name):
    params = MODELS[name]()
    before = {path: to_numpy(leaf) for path, leaf in by_path(params).items()}
    weights = normal_scheme(None, interop.attention_site(params, **arguments(name)))
    new = interop.write(params, weights, **arguments(name))
    again = interop.read(new, **arguments(name))
    for field in ("query", "key", "value", "out", "positions"):
        np.testing.assert_array_equal(getattr(again, field), getattr(weights, field))

    assert type(new) is type(params)
    assert jax.tree.structure(new) == jax.tree.structure(params)
    after = by_path(new)
    for path, old in by_path(params).items():
        np.testing.assert_array_equal(to_numpy(old), before[path])  # the caller's own
        assert type(after[path]) is type(old)
        assert after[path].dtype == old.dtype
    changed = {p for p, old in before.items() if not np.array_equal(old, to_numpy(after[p]))}
    kept = ("norm", "mlp", "head", "embedding/", "fc", "cls", "patch", "ids", "MlpBlock", "pooler")
    assert not [p for p in changed if any(part in p for part in kept)]


@pytest.mark.parametrize("name", RECORDED)
def test_sites_of_real_state_dicts(name):
    needed, grid = RECORDED[name]
    site = interop.attention_site(state_dict(name), **needed)
    assert site.grid == grid
    assert site.num_layers == 2
    assert site.num_heads == needed["num_heads"]
    assert site.num_heads * site.head_dim == site.width
    assert site.positions_trainable


@pytest.mark.parametrize("name", ["timm", "huggingface", "huggingface_file"])
def test_torch_projections_of_an_initialized_state_dict_have_the_maps_of_the_scheme(name):
    """The projections are computed as torch does, on the rows of the state dict itself."""
    needed, _ = RECORDED[name]
    params = state_dict(name)
    new = interop.initialize(params, normal_scheme, jax.random.key(0), **needed)
    weights = normal_scheme(None, interop.attention_site(params, **needed))
    expected = layer_maps(weights, weights.positions)

    table = new["pos_embed" if name == "timm" else _only(new, "position_embeddings")][0]
    old = params["pos_embed" if name == "timm" else _only(new, "position_embeddings")][0]
    np.testing.assert_array_equal(table[0], old[0])  # the class token's
    np.testing.assert_array_equal(table[1:], weights.positions)
    x, heads = layer_norm(table[1:]), needed["num_heads"]
    for layer in range(2):
        if name == "timm":
            prefix = f"blocks.{layer}.attn."
            both = x @ new[prefix + "qkv.weight"].T + new[prefix + "qkv.bias"]
            query, key, _ = np.split(both, 3, axis=1)
        else:
            modules = {
                "huggingface": ("vit.layers.{}.attention.", "q_proj", "k_proj"),
                "huggingface_file": (
                    "vit.encoder.layer.{}.attention.attention.",
                    "query",
                    "key",
                ),
            }[name]
            prefix = modules[0].format(layer)
            query, key = (
                x @ new[prefix + module + ".weight"].T + new[prefix + module + ".bias"]
                for module in modules[1:]
            )
        query, key = (t.reshape(len(x), heads, -1).swapaxes(0, 1) for t in (query, key))
        scores = query @ key.swapaxes(1, 2) * query.shape[-1] ** -0.5
        np.testing.assert_allclose(jax.nn.softmax(scores, axis=-1), expected[layer], atol=1e-5)


def test_fused_parts_that_a_scheme_leaves_alone_stay():
    def query_and_key(key, site):
        return normal_scheme(key, site)._replace(value=None, out=None, positions=None)

    params = state_dict("timm")
    new = interop.initialize(params, query_and_key, jax.random.key(0), num_heads=3)
    for name in ("qkv.weight", "qkv.bias", "proj.weight", "proj.bias"):
        old, now = params["blocks.1.attn." + name], new["blocks.1.attn." + name]
        split = 0 if "proj" in name else 2 * 192
        np.testing.assert_array_equal(now[split:], old[split:])
        assert not split or not np.array_equal(now[:split], old[:split])
    assert not new["blocks.1.attn.qkv.bias"][: 2 * 192].any()
    np.testing.assert_array_equal(new["pos_embed"], params["pos_embed"])


def test_biases_beside_the_fused_weight_become_zero():
    params = state_dict("timm_no_positions")
    fixed = dict(num_heads=12, positions=sincos_positions((14, 14), 768))
    new = interop.initialize(params, normal_scheme, jax.random.key(0), **fixed)
    for name in ("q_bias", "v_bias", "proj.bias"):
        assert params["blocks.0.attn." + name].any()
        assert not new["blocks.0.attn." + name].any()


@pytest.mark.parametrize("kind", ["big_vision", "big_vision_scan", "vit_jax"])
def test_linen_trees_also_under_jit(kind):
    tree, scheme, key = linen_tree(kind), normal_scheme, jax.random.key(0)
    if kind == "big_vision":
        scheme = impulse(vo_init="default")
    new = interop.initialize(tree, scheme, key)
    weights = scheme(key, interop.attention_site(tree))
    read = interop.read(new)
    maps = layer_maps(read, read.positions)
    np.testing.assert_allclose(maps, layer_maps(weights, weights.positions), atol=1e-6)
    assert maps.max() > 2 / TOKENS
    traced = lambda tree, key: interop.initialize(tree, scheme, key)  # noqa: E731
    shapes = jax.eval_shape(traced, tree, key)
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, tree)
    if scheme is normal_scheme:  # a solve takes long to compile once more
        jax.tree.map(np.testing.assert_array_equal, jax.jit(traced)(tree, key), new)
    if kind != "vit_jax":  # big_vision pools by an attention that is no layer
        jax.tree.map(np.testing.assert_array_equal, new["MAPHead_0"], tree["MAPHead_0"])


@pytest.mark.usefixtures("library_promotion")
def test_nnx_modules_run_with_the_maps_of_the_scheme():
    model = NNXModel(nnx.Rngs(0))
    new = interop.initialize(model, normal_scheme, jax.random.key(0))
    weights = normal_scheme(None, interop.attention_site(model))
    expected = layer_maps(weights, weights.positions)
    x = jnp.asarray(layer_norm(np.asarray(new.position_embeddings[0, 1:])), jnp.float32)
    for block, maps in zip(new.encoder.layers, expected, strict=True):
        query, key = block.attn.query(x), block.attn.key(x)
        scores = jnp.einsum("nhd,mhd->hnm", query, key) * DIM**-0.5
        np.testing.assert_allclose(jax.nn.softmax(scores, axis=-1), maps, atol=1e-5)
    np.testing.assert_array_equal(new.position_embeddings[0, 0], 1)
    np.testing.assert_array_equal(model.position_embeddings[...], 1)
    assert new.MAPHead.attn.query.kernel is not model.MAPHead.attn.query.kernel
    old = interop.read(model)
    assert np.abs(np.asarray(old.query) - np.asarray(weights.query)).max() > 0.01


def test_one_attention_alone_with_positions_of_the_caller():
    model = nnx.MultiHeadAttention(HEADS, WIDTH, rngs=nnx.Rngs(0))
    given = dict(grid=(2, 8), positions=sincos_positions((2, 8), WIDTH))
    site = interop.attention_site(model, **given)
    assert (site.num_layers, site.positions_trainable) == (1, False)
    assert interop.read(model).positions is None
    new = interop.initialize(model, normal_scheme, jax.random.key(0), **given)
    assert np.abs(new.query.kernel[...] - model.query.kernel[...]).max() > 0.01


def test_positions_of_the_caller_leave_the_table_alone():
    tree = linen_tree("big_vision")
    positions = sincos_positions(GRID, WIDTH)
    new = interop.initialize(tree, normal_scheme, jax.random.key(0), positions=positions)
    np.testing.assert_array_equal(new["pos_embedding"], tree["pos_embedding"])


def test_types_and_shardings_stay():
    params = state_dict("huggingface", jnp.bfloat16)
    new = interop.initialize(params, normal_scheme, jax.random.key(0), num_heads=4)
    assert {v.dtype for v in new.values()} == {np.dtype(jnp.bfloat16)}
    assert all(type(v) is np.ndarray and v.flags.c_contiguous for v in new.values())

    mesh = jax.make_mesh((8,), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    tree = linen_tree("big_vision")
    kernel = tree["Transformer"]["encoderblock_0"]["MultiHeadDotProductAttention_0"]["query"]
    kernel["kernel"] = jax.device_put(kernel["kernel"], sharding)
    new = interop.initialize(tree, normal_scheme, jax.random.key(0))
    kernel = new["Transformer"]["encoderblock_0"]["MultiHeadDotProductAttention_0"]["query"]
    assert kernel["kernel"].sharding == sharding


def test_flat_checkpoints_and_wrapped_state_dicts():
    flat = {f"params/{k}": np.asarray(v) for k, v in by_path(linen_tree("vit_jax")).items()}
    new = interop.initialize(flat, normal_scheme, jax.random.key(0))
    assert list(new) == list(flat)
    wrapped = {f"module.{k}": v for k, v in state_dict("timm").items()}
    assert interop.attention_site(wrapped, num_heads=3).grid == (14, 14)


def test_grids_that_are_not_square_are_told():
    tree = linen_tree("big_vision")
    tree["pos_embedding"] = jnp.zeros((1, 12, WIDTH))
    assert interop.attention_site(tree, grid=(3, 4)).grid == (3, 4)
    tree["pos_embedding"] = jnp.zeros((1, 13, WIDTH))  # the class token has a row, as before 2022
    site = interop.attention_site(tree, grid=(3, 4))
    assert site.positions.shape == (12, WIDTH)


class Tensor:
    shape = (192, 192)


def _only(params, part):
    (name,) = [name for name in params if part in name]
    return name


def drop(params, part):
    return {name: value for name, value in params.items() if part not in name}


def two_stacks():
    return {"img": linen_tree("big_vision"), "txt": linen_tree("big_vision")}


def normalized():
    return state_dict("timm") | {"blocks.0.attn.q_norm.weight": np.ones(64, np.float32)}


def odd_table():
    return linen_tree("big_vision") | {"pos_embedding": jnp.zeros((1, 12, WIDTH))}


def unequal():
    shorter = np.zeros((192, 192), np.float32)
    return state_dict("timm") | {"blocks.1.attn.qkv.weight": shorter}


@pytest.mark.parametrize(
    ("params", "options", "message"),
    [
        (
            dict,
            {},
            r"layout: params have no names such as blocks\.0\.attn.*encoderblock_0.*nothing",
        ),
        (
            lambda: {"conv": np.ones(3)},
            dict(layout="timm"),
            r"layout='timm': params have no names such as blocks\.0\.attn.*they have conv",
        ),
        (dict, dict(layout="keras"), r"layout='keras' is none: choose one of timm, huggingface"),
        (lambda: state_dict("timm"), {}, r"num_heads: .*192 channels .*pass num_heads"),
        (
            lambda: state_dict("timm"),
            dict(num_heads=5),
            r"num_heads=5 does not divide the 192 channels",
        ),
        (
            lambda: linen_tree("big_vision"),
            dict(num_heads=5),
            r"num_heads=5, but Transformer/.*query/kernel has 4 heads",
        ),
        (
            lambda: drop(state_dict("timm"), "pos_embed"),
            dict(num_heads=3),
            r"positions: params hold no position table of width 192 \(looked for pos_embed\)",
        ),
        (
            lambda: state_dict("timm_no_positions"),
            dict(num_heads=12),
            r"pass the encoding that the model adds, positions=\[N, D\]",
        ),
        (odd_table, {}, r"grid: the 12 rows of pos_embedding .* pass grid=\(rows, cols\)"),
        (odd_table, dict(grid=(5, 5)), r"grid=\(5, 5\) has 25 tokens, but pos_embedding has 12"),
        (
            odd_table,
            dict(positions=np.zeros((12, WIDTH), np.float32)),
            r"grid: 12 positions are no square: pass grid",
        ),
        (
            odd_table,
            dict(positions=np.zeros((1, 16, WIDTH), np.float32)),
            r"positions has shape \(1, 16, 32\), but the model needs \[N, 32\]",
        ),
        (
            lambda: drop(state_dict("timm"), "blocks.1.attn.qkv"),
            dict(num_heads=3),
            r"params: blocks/1/attn has no blocks/1/attn/qkv/weight",
        ),
        (
            unequal,
            dict(num_heads=3),
            r"blocks/1/attn/qkv/weight has shape \(192, 192\), not \(576, 192\)",
        ),
        (two_stacks, {}, r"several stacks of attention layers \(2 × img/Transformer"),
        (normalized, dict(num_heads=3), r"q_norm/weight normalizes queries or keys"),
        (
            lambda: state_dict("timm") | {"blocks.0.attn.proj.weight": Tensor()},
            dict(num_heads=3),
            r"proj/weight is a .*\.Tensor, not a NumPy or JAX array: for tensors of torch",
        ),
    ],
)
def test_what_is_missing_is_named(params, options, message):
    with pytest.raises(InputError, match=message):
        interop.initialize(params(), normal_scheme, jax.random.key(0), **options)


def test_weights_that_do_not_fit_are_refused():
    tree = linen_tree("big_vision")
    weights = interop.read(tree)
    with pytest.raises(InputError, match=r"weights\.query has shape \(1, 32, 4, 8\)"):
        interop.write(tree, weights._replace(query=weights.query[:1]))
    with pytest.raises(InputError, match=r"weights\.positions has shape \(9, 32\)"):
        interop.write(tree, weights._replace(positions=weights.positions[:9]))
    del tree["pos_embedding"]
    with pytest.raises(InputError, match=r"weights\.positions: .* no position table"):
        interop.write(tree, weights)
    tree["a"] = {"pos_embedding": jnp.zeros((16, WIDTH))}
    model = {"layers": [linen_block(np.random.default_rng(0))], "pos": jnp.zeros((16, WIDTH))}
    model["pos_embed"] = model["pos"]
    with pytest.raises(InputError, match=r"several position tables \(pos, pos_embed\)"):
        interop.read(model, layout="nnx")
