import functools
import json
import math
import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from structinit_jax import interop
from structinit_jax.attention_init import AttentionWeights, impulse, impulse_2025, sincos_positions
from structinit_jax.attention_init.solve import layer_norm
from structinit_jax.errors import InputError
from structinit_jax.interop.layouts import flatten
from structinit_jax.models.vit import VisionTransformer

WIDTH, HEADS, DIM, LAYERS, GRID = 32, 4, 8, 2, (4, 4)
TOKENS = 16
RNG = jax.random.key(0)
FOLDER = pathlib.Path(__file__).parent / "references"
NAMES = json.loads((FOLDER / "state_dict_names.json").read_text())
# Arguments that each recorded state dict needs, and the grid to find.
RECORDED = {
    "timm": (dict(num_heads=3), (14, 14)),
    "timm_registers": (dict(num_heads=6), (37, 37)),
    "timm_distilled": (dict(num_heads=3), (14, 14)),
    "timm_separate": (dict(num_heads=12), (32, 32)),
    "huggingface": (dict(num_heads=4), (6, 6)),
    "huggingface_file": (dict(num_heads=4), (6, 6)),
    "dinov2": (dict(num_heads=4), (6, 6)),
    "dinov2_file": (dict(num_heads=4), (6, 6)),
    "clip": (dict(num_heads=4), (6, 6)),
    "siglip": (dict(num_heads=4), (6, 6)),
    "torchvision": (dict(num_heads=4), (6, 6)),
}


@functools.cache
def noise(size):
    return 0.1 * np.random.default_rng(0).standard_normal(size, np.float32)


def state_dict(name, dtype=np.float32):
    """NumPy arrays with the names and shapes of a real model's state dict; norms at their start."""
    starts = range(len(NAMES[name]))  # no two arrays are equal
    return {
        key: np.full(shape, key.endswith("weight"), dtype)
        if "norm" in key or ".ln_" in key
        else noise(2**22)[start : start + math.prod(shape)].reshape(shape).astype(dtype)
        for start, (key, shape) in zip(starts, NAMES[name].items(), strict=True)
    }


def normal(rng, *shape):
    return rng.standard_normal(shape, np.float32)


def normal_scheme(rng, site):
    """A scheme with sharp random maps and a new encoding that needs no compilation."""
    rng = np.random.default_rng(1)
    layers = (site.num_layers, site.width, site.num_heads, site.head_dim)
    query, key, value = (site.width**-0.5 * normal(rng, *layers) for _ in range(3))
    out = normal(rng, layers[0], *layers[2:], layers[1])
    positions = sincos_positions(site.grid, site.width) if site.positions_trainable else None
    return AttentionWeights(*map(jnp.asarray, (query, key, value, out)), positions)


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
        "LayerNorm_0": {"scale": np.ones((*lead, WIDTH)), "bias": np.zeros((*lead, WIDTH))},
        f"MultiHeadDotProductAttention_{number}": attention,
        "MlpBlock_0": {
            "Dense_0": {"kernel": normal(rng, *lead, WIDTH, 2 * WIDTH)},
            "Dense_1": {
                "kernel": normal(rng, *lead, 2 * WIDTH, WIDTH),
                "bias": normal(rng, *lead, WIDTH),
            },
        },
    }


def linen_tree(kind):
    """Parameters in the layout of big_vision or vit_jax."""
    rng = np.random.default_rng(0)
    number = 1 if kind == "vit_jax" else 0
    encoder = {f"encoderblock_{i}": linen_block(rng, number=number) for i in range(LAYERS)}
    if kind == "big_vision_scan":
        encoder = {"encoderblock": linen_block(rng, lead=(LAYERS,))}
    encoder["encoder_norm"] = {"scale": np.ones(WIDTH), "bias": np.zeros(WIDTH)}
    tree = {
        "embedding": {"kernel": normal(rng, 4, 4, 3, WIDTH), "bias": np.zeros(WIDTH)},
        "Transformer": encoder,
        "cls": normal(rng, 1, 1, WIDTH),
        "head": {"kernel": normal(rng, WIDTH, 10), "bias": np.zeros(10)},
    }
    if kind == "vit_jax":
        encoder["posembed_input"] = {"pos_embedding": normal(rng, 1, TOKENS + 1, WIDTH)}
    else:
        tree["pos_embedding"] = normal(rng, 1, TOKENS, WIDTH)
        pool = linen_block(rng)["MultiHeadDotProductAttention_0"]
        tree["MAPHead_0"] = {"MultiHeadDotProductAttention_0": pool}
    return jax.tree.map(jnp.asarray, tree)


def deit3_tree():
    """Parameters in the layout of deit3-jax, whose position table has the axes of the grid."""
    rng, tree = np.random.default_rng(0), {"head": {"kernel": np.zeros((WIDTH, 10))}}
    for i in range(LAYERS):
        block = linen_block(rng)
        attention = block["MultiHeadDotProductAttention_0"]
        mlp = block["MlpBlock_0"]
        tree[f"layer_{i}"] = {
            "attn": {f"w{name[0]}": module for name, module in attention.items()},
            "ff": {"w1": mlp["Dense_0"], "w2": mlp["Dense_1"]},
            "norm1": block["LayerNorm_0"],
            "norm2": block["LayerNorm_0"],
        }
    patches = {"kernel": normal(rng, 4, 4, 3, WIDTH), "bias": np.zeros(WIDTH)}
    tree["embed"] = {"wpe": normal(rng, *GRID, WIDTH), "wte": patches}
    tree["embed"]["cls_token"] = normal(rng, 1, 1, WIDTH)
    return jax.tree.map(jnp.asarray, tree)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(HEADS, WIDTH, dropout_rate=0.1, rngs=rngs)
        hidden = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.mlp = nnx.Sequential(hidden, nnx.gelu, nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs))


class Encoder(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Block(rngs) for _ in range(LAYERS)])


class NNXModel(nnx.Module):
    """Names as in jimm, with a class token, a pooling head and a parameter of position numbers."""

    def __init__(self, rngs):
        self.cls_token = nnx.Param(jnp.zeros((1, 1, WIDTH)))
        self.position_embeddings = nnx.Param(jnp.ones((1, TOKENS + 1, WIDTH)))
        self.vision_position_ids = nnx.Param(jnp.arange(TOKENS + 1.0)[None])
        self.patches = nnx.Conv(3, WIDTH, kernel_size=(4, 4), strides=4, rngs=rngs)
        self.encoder = Encoder(rngs)
        self.MAPHead = Block(rngs)


MODELS = {
    **{name: lambda name=name: state_dict(name) for name in RECORDED},
    **{
        name: lambda name=name: linen_tree(name)
        for name in ("big_vision", "big_vision_scan", "vit_jax")
    },
    "deit3_jax": deit3_tree,
    "nnx": lambda: NNXModel(nnx.Rngs(0)),
    "nnx_state": lambda: nnx.state(NNXModel(nnx.Rngs(0)), nnx.Param),
    "nnx_pure": lambda: nnx.to_pure_dict(nnx.state(NNXModel(nnx.Rngs(0)), nnx.Param)),
    "frozen": lambda: nn.FrozenDict({"params": linen_tree("big_vision")}),
    "structinit_jax": lambda: structinit_model(),
}


def structinit_model():
    """State of our own ViT: one block whose parameters have a leading layer axis."""
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
    state = nnx.state(abstract, nnx.Param)
    return jax.tree.map_with_path(
        lambda path, leaf: jnp.full(
            leaf.shape, "norm" not in str(path) or "scale" in str(path), float
        ),
        state,
    )


def arguments(name):
    return RECORDED.get(name, ({}, GRID))[0]


def by_path(params):
    leaves, _ = flatten(params)
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
def test_write_then_read_returns_the_weights_and_changes_nothing_else(name):
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
        np.testing.assert_array_equal(to_numpy(old), before[path])  # params is not changed
        assert type(after[path]) is type(old)
        assert after[path].dtype == old.dtype
    changed = {p for p, old in before.items() if not np.array_equal(old, to_numpy(after[p]))}
    kept = (
        "norm",
        "mlp",
        "text_model",
        "conv_proj",
        "head",
        "embedding/",
        "fc",
        "cls",
        "patch",
        "ids",
        "MlpBlock",
        "pooler",
    )
    assert not [p for p in changed if any(part in p for part in kept)]


@pytest.mark.parametrize("name", RECORDED)
def test_site_of_a_real_state_dict(name):
    needed, grid = RECORDED[name]
    site = interop.attention_site(state_dict(name), **needed)
    assert site.grid == grid
    assert site.num_layers == 2
    assert site.num_heads == needed["num_heads"]
    assert site.num_heads * site.head_dim == site.width
    assert site.positions_trainable


TORCH_NAMES = {  # layer, query and key, position table
    "timm": ("blocks.{}.attn.", ("qkv",), "pos_embed"),
    "huggingface": (
        "vit.layers.{}.attention.",
        ("q_proj", "k_proj"),
        "vit.embeddings.position_embeddings",
    ),
    "huggingface_file": (
        "vit.encoder.layer.{}.attention.attention.",
        ("query", "key"),
        "vit.embeddings.position_embeddings",
    ),
}


@pytest.mark.parametrize("name", TORCH_NAMES)
def test_torch_projections_have_the_maps_of_the_scheme(name):
    """The projections are computed as in torch, from the tensors of the state dict."""
    needed, _ = RECORDED[name]
    prefix, modules, table = TORCH_NAMES[name]
    params = state_dict(name)
    new = interop.initialize(params, normal_scheme, RNG, **needed)
    weights = normal_scheme(None, interop.attention_site(params, **needed))
    np.testing.assert_array_equal(new[table][0, 0], params[table][0, 0])  # the class token's row
    np.testing.assert_array_equal(new[table][0, 1:], weights.positions)
    x, heads = layer_norm(new[table][0, 1:]), needed["num_heads"]
    for layer, maps in enumerate(layer_maps(weights, weights.positions)):
        names = [prefix.format(layer) + module for module in modules]
        outputs = [x @ new[f"{name}.weight"].T + new[f"{name}.bias"] for name in names]
        query, key = (np.split(outputs[0], 3, axis=1) if len(names) == 1 else outputs)[:2]
        query, key = (t.reshape(len(x), heads, -1).swapaxes(0, 1) for t in (query, key))
        scores = query @ key.swapaxes(1, 2) * query.shape[-1] ** -0.5
        np.testing.assert_allclose(jax.nn.softmax(scores, axis=-1), maps, atol=1e-5)


def test_position_scale_multiplies_the_whole_table():
    params = state_dict("timm")
    new = interop.initialize(params, impulse_2025(), RNG, num_heads=3)
    np.testing.assert_allclose(new["pos_embed"], 18 * params["pos_embed"], rtol=1e-6)


SCALED = {  # the patch embedding, and the output layer of a block's MLP
    "timm": ("patch_embed.proj", "blocks.{}.mlp.fc2"),
    "timm_separate": ("patch_embed.proj", "blocks.{}.mlp.fc2"),  # gated
    "huggingface": ("vit.embeddings.patch_embeddings.projection", "vit.layers.{}.mlp.fc2"),
    "huggingface_file": (
        "vit.embeddings.patch_embeddings.projection",
        "vit.encoder.layer.{}.output.dense",
    ),
    "dinov2": ("embeddings.patch_embeddings.projection", "encoder.layer.{}.mlp.down_proj"),
    "dinov2_file": ("embeddings.patch_embeddings.projection", "encoder.layer.{}.mlp.weights_out"),
    "clip": ("vision_model.embeddings.patch_embedding", "vision_model.encoder.layers.{}.mlp.fc2"),
    "siglip": ("embeddings.patch_embedding", "encoder.layers.{}.mlp.fc2"),
    "torchvision": ("conv_proj", "encoder.layers.encoder_layer_{}.mlp.3"),
    "deit3_jax": ("embed.wte", "layer_{}.ff.w2"),
    "big_vision": ("embedding", "Transformer.encoderblock_{}.MlpBlock_0.Dense_1"),
    "big_vision_scan": ("embedding", "Transformer.encoderblock.MlpBlock_0.Dense_1"),
    "vit_jax": ("embedding", "Transformer.encoderblock_{}.MlpBlock_0.Dense_1"),
    "nnx_pure": ("patches", "encoder.layers.{}.mlp.layers.2"),
    "structinit_jax": ("patch_embedding", "blocks.mlp.fc2"),
}


@pytest.mark.parametrize("name", SCALED)
def test_scales_of_the_patch_embedding_and_the_mlps(name):
    params, (patches, output) = MODELS[name](), SCALED[name]
    weights = AttentionWeights(patch_scale=0.5, mlp_scale=0)
    new = by_path(interop.write(params, weights, **arguments(name)))
    factors = {f"{patches}.weight": 0.5, f"{patches}.kernel": 0.5}
    for layer in range(LAYERS):
        module = output.format(layer)
        factors |= dict.fromkeys([f"{module}.{leaf}" for leaf in ("weight", "kernel")], 0)
    old = by_path(params)
    assert len(factors.keys() & old.keys()) == (2 if "{" not in output else 1 + LAYERS)
    for path, before in old.items():
        expected = factors.get(path, 1) * to_numpy(before)
        np.testing.assert_array_equal(to_numpy(new[path]), expected, err_msg=path)


def test_what_cannot_be_scaled_is_refused():
    attention = nnx.MultiHeadAttention(HEADS, WIDTH, rngs=nnx.Rngs(0))
    with pytest.raises(InputError, match=r"no kernel where a patch embedding .*patch_scale=1"):
        interop.write(attention, AttentionWeights(patch_scale=0.5))
    with pytest.raises(InputError, match=r"nothing where the output .*mlp_scale=1"):
        interop.write(attention, AttentionWeights(mlp_scale=0))
    params = timm_with(blocks__1__adapter__weight=np.ones((192, 8), np.float32))
    with pytest.raises(InputError, match=r"beside blocks\.1\.attn .*adapter, .*fc2 "):
        interop.write(params, AttentionWeights(mlp_scale=0), num_heads=3)


def test_parts_of_a_fused_tensor_that_a_scheme_does_not_set_stay():
    def query_and_key(rng, site):
        return normal_scheme(rng, site)._replace(value=None, out=None, positions=None)

    params = state_dict("timm")
    new = interop.initialize(params, query_and_key, RNG, num_heads=3)
    for name in ("qkv.weight", "qkv.bias", "proj.weight", "proj.bias"):
        old, now = params["blocks.1.attn." + name], new["blocks.1.attn." + name]
        split = 0 if "proj" in name else 2 * 192
        np.testing.assert_array_equal(now[split:], old[split:])
        assert not split or not np.array_equal(now[:split], old[:split])
    assert not new["blocks.1.attn.qkv.bias"][: 2 * 192].any()
    np.testing.assert_array_equal(new["pos_embed"], params["pos_embed"])


def test_biases_outside_the_fused_module_become_zero():
    params = state_dict("timm_no_positions")
    params = {name: value for name, value in params.items() if "relative_position" not in name}
    fixed = dict(num_heads=12, positions=sincos_positions((14, 14), 768))
    new = interop.initialize(params, normal_scheme, RNG, **fixed)
    for name in ("q_bias", "v_bias", "proj.bias"):
        assert params["blocks.0.attn." + name].any()
        assert not new["blocks.0.attn." + name].any()


@pytest.mark.parametrize("kind", ["big_vision", "big_vision_scan", "vit_jax"])
def test_linen_trees_under_jit(kind):
    tree = linen_tree(kind)
    new = interop.initialize(tree, normal_scheme, RNG)
    weights = normal_scheme(RNG, interop.attention_site(tree))
    read = interop.read(new)
    expected = layer_maps(weights, weights.positions)
    np.testing.assert_allclose(layer_maps(read, read.positions), expected, atol=1e-6)
    jitted = jax.jit(lambda tree, rng: interop.initialize(tree, normal_scheme, rng))
    jax.tree.map(np.testing.assert_array_equal, jitted(tree, RNG), new)
    if kind != "vit_jax":  # the pooling attention of big_vision is not a layer
        jax.tree.map(np.testing.assert_array_equal, new["MAPHead_0"], tree["MAPHead_0"])


def test_a_solved_scheme_on_a_linen_tree():
    tree, scheme = linen_tree("big_vision"), impulse(vo_init="default")
    new = interop.read(interop.initialize(tree, scheme, RNG))
    weights = scheme(RNG, interop.attention_site(tree))
    maps = layer_maps(new, new.positions)
    np.testing.assert_allclose(maps, layer_maps(weights, weights.positions), atol=1e-6)
    assert maps.max() > 2 / TOKENS
    shapes = jax.eval_shape(lambda tree, rng: interop.initialize(tree, scheme, rng), tree, RNG)
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, tree)


@pytest.mark.usefixtures("library_promotion")
def test_nnx_module_has_the_maps_of_the_scheme():
    model = NNXModel(nnx.Rngs(0))
    new = interop.initialize(model, normal_scheme, RNG)
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


def test_single_attention_with_given_positions():
    model = nnx.MultiHeadAttention(HEADS, WIDTH, rngs=nnx.Rngs(0))
    given = dict(grid=(2, 8), positions=sincos_positions((2, 8), WIDTH))
    site = interop.attention_site(model, **given)
    assert (site.num_layers, site.positions_trainable) == (1, False)
    assert interop.read(model).positions is None
    new = interop.initialize(model, normal_scheme, RNG, **given)
    assert np.abs(new.query.kernel[...] - model.query.kernel[...]).max() > 0.01


def test_given_positions_leave_the_table_unchanged():
    tree = linen_tree("big_vision")
    positions = sincos_positions(GRID, WIDTH)
    new = interop.initialize(tree, normal_scheme, RNG, positions=positions)
    np.testing.assert_array_equal(new["pos_embedding"], tree["pos_embedding"])


def test_dtypes_and_shardings_stay():
    params = state_dict("huggingface", jnp.bfloat16)
    new = interop.initialize(params, normal_scheme, RNG, num_heads=4)
    assert {v.dtype for v in new.values()} == {np.dtype(jnp.bfloat16)}
    assert all(type(v) is np.ndarray and v.flags.c_contiguous for v in new.values())

    mesh = jax.make_mesh((8,), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    tree = linen_tree("big_vision")
    kernel = tree["Transformer"]["encoderblock_0"]["MultiHeadDotProductAttention_0"]["query"]
    kernel["kernel"] = jax.device_put(kernel["kernel"], sharding)
    new = interop.initialize(tree, normal_scheme, RNG)
    kernel = new["Transformer"]["encoderblock_0"]["MultiHeadDotProductAttention_0"]["query"]
    assert kernel["kernel"].sharding == sharding


def test_flat_checkpoints_and_prefixed_state_dicts():
    flat = {f"params/{k}": np.asarray(v) for k, v in by_path(linen_tree("vit_jax")).items()}
    new = interop.initialize(flat, normal_scheme, RNG)
    assert list(new) == list(flat)
    wrapped = {f"module.{k}": v for k, v in state_dict("timm").items()}
    assert interop.attention_site(wrapped, num_heads=3).grid == (14, 14)


def test_a_given_grid_need_not_be_square():
    tree = linen_tree("big_vision")
    tree["pos_embedding"] = jnp.zeros((1, 12, WIDTH))
    assert interop.attention_site(tree, grid=(3, 4)).grid == (3, 4)
    tree["pos_embedding"] = jnp.zeros((1, 13, WIDTH))  # the class token has a row, as before 2022
    site = interop.attention_site(tree, grid=(3, 4))
    assert site.positions.shape == (12, WIDTH)


class Tensor:
    shape = (192, 192)


class TorchModule:
    def state_dict(self):
        raise AssertionError("its tensors would have to be converted")


PARTS = {  # that no scheme knows
    "blocks__0__attn__q_norm__weight": r"q_norm\.weight normalizes queries or keys",
    "blocks__0__attn__temperature": r"temperature rescales the logits",
    "blocks__0__attn__logit_scale": r"logit_scale rescales the logits",
    "blocks__1__attn__proj_l__weight": r"proj_l\.weight mixes the maps of the heads",
    "blocks__0__attn__norm__weight": r"attn\.norm\.weight normalizes what the output projection",
    "blocks__0__attn__rel_pos_h": r"rel_pos_h adds a bias",
    "shared_rel_pos__mlp__fc1__weight": r"shared_rel_pos.* adds a bias",
    "blocks__0__attn__gate": r"attn\.gate is a part of the attention that schemes do not know",
}


def timm_with(**tensors):
    return state_dict("timm") | {k.replace("__", "."): v for k, v in tensors.items()}


def without(part):
    return {name: value for name, value in state_dict("timm").items() if part not in name}


def odd_table():
    return linen_tree("big_vision") | {"pos_embedding": jnp.zeros((1, 12, WIDTH))}


BIG_VISION = functools.partial(linen_tree, "big_vision")
HEADS_OF_TIMM = dict(num_heads=3)


@pytest.mark.parametrize(
    ("params", "options", "message"),
    [
        (dict, {}, r"layout: .*timm \(blocks\.0\.attn.*encoderblock_0.*: none\."),
        (lambda: {"conv": np.ones(3)}, dict(layout="timm"), r"layout='timm': .*blocks.*: conv\."),
        (
            lambda: {"stem": np.ones(3), "body.self_attn.wqkv": np.ones(3)},
            {},
            r"Their names that look like attention: body\.self_attn\.wqkv\. Rename .*AttentionSite",
        ),
        (TorchModule, {}, r"params is a TorchModule, a torch module: pass \{k: v\.detach"),
        (dict, dict(layout="keras"), r"layout='keras'.*timm, huggingface"),
        (lambda: state_dict("timm"), {}, r"num_heads: .*192 channels"),
        (lambda: state_dict("timm"), dict(num_heads=5), r"num_heads=5 .*192 channels"),
        (BIG_VISION, dict(num_heads=5), r"num_heads=5, but Transformer\..*query\.kernel has 4"),
        (lambda: without("pos_embed"), HEADS_OF_TIMM, r"positions: .* width 192 .*pos_embed"),
        (
            lambda: state_dict("timm_no_positions"),
            dict(num_heads=12, positions=sincos_positions((14, 14), 768)),
            r"positions: blocks\.0\.attn\.relative_position_bias_table is in the place",
        ),
        *(
            (lambda name=name: timm_with(**{name: np.ones(3, np.float32)}), HEADS_OF_TIMM, message)
            for name, message in PARTS.items()
        ),
        (
            lambda: state_dict("timm") | {"blocks.1.norm1.weight": np.full(192, 1.1, np.float32)},
            HEADS_OF_TIMM,
            r"blocks\.1\.norm1\.weight is not 1: .*freshly built",
        ),
        (
            lambda: state_dict("timm") | {"blocks.0.norm2.bias": np.full(192, 0.1, np.float32)},
            HEADS_OF_TIMM,
            r"blocks\.0\.norm2\.bias is not 0",
        ),
        (odd_table, {}, r"grid: the 12 rows of pos_embedding"),
        (odd_table, dict(grid=(5, 5)), r"grid=\(5, 5\) has 25 tokens, but pos_embedding has 12"),
        (odd_table, dict(positions=np.zeros((12, WIDTH), np.float32)), r"grid: 12 positions"),
        (
            odd_table,
            dict(positions=np.zeros((1, 16, WIDTH), np.float32)),
            r"positions has shape \(1, 16, 32\).*\[N, 32\]",
        ),
        (lambda: without("blocks.1.attn.qkv"), HEADS_OF_TIMM, r"blocks\.1\.attn has no .*qkv"),
        (
            lambda: timm_with(blocks__1__attn__qkv__weight=np.zeros((192, 192), np.float32)),
            HEADS_OF_TIMM,
            r"blocks\.1\.attn\.qkv\.weight has shape \(192, 192\).*\(576, 192\)",
        ),
        (
            lambda: {"img": BIG_VISION(), "txt": BIG_VISION()},
            {},
            r"several stacks .*2 × img\.Transformer",
        ),
        (
            lambda: timm_with(blocks__0__attn__proj__weight=Tensor()),
            HEADS_OF_TIMM,
            r"proj\.weight is a .*\.Tensor",
        ),
    ],
)
def test_unusable_parameters_are_refused(params, options, message):
    with pytest.raises(InputError, match=message):
        interop.initialize(params(), normal_scheme, RNG, **options)


def test_a_scheme_that_was_not_called_is_refused():
    with pytest.raises(InputError, match=r"attention_init=impulse is not .*as in impulse\(\)"):
        interop.initialize(linen_tree("big_vision"), impulse, RNG)


def test_a_learned_table_of_a_width_without_an_encoding():
    layer = {"attn.qkv.weight": (90, 30), "attn.proj.weight": (30, 30)}
    shapes = {f"blocks.0.{name}": shape for name, shape in layer.items()}
    params = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    params["pos_embed"] = np.random.default_rng(0).standard_normal((1, 16, 30), np.float32)
    with pytest.raises(InputError, match=r"params: .*width 30 .*positions=\[N, D\].*'mimetic'"):
        interop.initialize(params, impulse(), RNG, num_heads=3)


def test_a_model_with_rotary_positions_only():
    """DINOv3 of transformers, none of whose parameters shows that its positions are rotary."""
    for prefix in ("model.layer.0.attention", "layer.0.attention"):
        names = [f"{prefix}.{n}_proj.weight" for n in "qkvo"]
        params = dict.fromkeys(names, np.ones((32, 32), np.float32))
        with pytest.raises(InputError, match=r"positions: .* its rotary positions as rotations"):
            interop.initialize(params, normal_scheme, RNG, num_heads=4)


def test_rotary_positions_beside_a_table_are_reported():
    params = timm_with(rope__freqs=np.ones((2, 32), np.float32))
    with pytest.warns(UserWarning, match=r"rope\.freqs rotates queries and keys"):
        interop.initialize(params, normal_scheme, RNG, num_heads=3)
    del params["pos_embed"]
    fixed = sincos_positions((14, 14), 192)
    with pytest.raises(InputError, match=r"rope\.freqs rotates .* pass rotations="):
        interop.initialize(params, normal_scheme, RNG, num_heads=3, positions=fixed)


def test_weights_that_do_not_fit_are_refused():
    tree = linen_tree("big_vision")
    weights = interop.read(tree)
    with pytest.raises(InputError, match=r"weights\.query has shape \(1, 32, 4, 8\)"):
        interop.write(tree, weights._replace(query=weights.query[:1]))
    with pytest.raises(InputError, match=r"weights\.positions has shape \(9, 32\)"):
        interop.write(tree, weights._replace(positions=weights.positions[:9]))
    del tree["pos_embedding"]
    with pytest.raises(InputError, match=r"weights\.positions: "):
        interop.write(tree, weights)
    table = jnp.zeros((TOKENS, WIDTH))
    layers = [linen_block(np.random.default_rng(0))]
    with pytest.raises(InputError, match=r"several position tables \(pos, pos_embed\)"):
        interop.read({"layers": layers, "pos": table, "pos_embed": table}, layout="nnx")
