import re

import foreign_models as foreign
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from foreign_models import arguments, linen_tree, normal_scheme, read, site_of, state_dict, write

from structinit_jax import interop
from structinit_jax.attention_init import AttentionWeights, sincos_positions
from structinit_jax.errors import InputError
from structinit_jax.interop.layouts import PROJECTIONS, flatten
from structinit_jax.models import ConvMixer

RNG = jax.random.key(0)


def to_numpy(leaf):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.array(leaf)


@pytest.mark.filterwarnings("ignore:.* (if it is an RMSNorm|normalizes the patches)")
@pytest.mark.parametrize("name", foreign.MODELS)
def test_write_then_read_returns_the_weights_and_changes_nothing_else(name):
    params = foreign.MODELS[name]()
    before = {path: to_numpy(leaf) for path, leaf in flatten(params)[0].items()}
    site = site_of(params, **arguments(name))
    assert site.num_layers == 2
    assert site.grid == foreign.STATE_DICTS.get(name, (0, foreign.GRID))[1]
    weights = normal_scheme(None, site)
    new = write(params, weights, **arguments(name))
    again = read(new, **arguments(name))
    for field in ("query", "key", "value", "out", "positions"):
        np.testing.assert_array_equal(getattr(again, field), getattr(weights, field))

    assert type(new) is type(params)
    assert jax.tree.structure(new) == jax.tree.structure(params)
    after = flatten(new)[0]
    for path, old in flatten(params)[0].items():
        np.testing.assert_array_equal(to_numpy(old), before[path])  # params is not changed
        assert type(after[path]) is type(old)
        assert after[path].dtype == old.dtype
    changed = {p for p, old in before.items() if not np.array_equal(old, to_numpy(after[p]))}
    kept = (
        r"norm|mlp|text_model|language|conv|head|embedding/|fc|cls|class|patch(?!_embedding\.pos)|ids"
        "|MlpBlock|pooler"
    )
    assert not [path for path in changed if re.search(kept, path)]
    assert name != "open_clip" or all(path.startswith("visual.") for path in changed)


def test_modules_of_their_own_are_those_of_query_key_and_value():
    for modules in PROJECTIONS:
        if len(set(modules)) == 4:
            last = [name.rpartition(".")[2].removeprefix("w") for name in modules[:3]]
            assert [name[0] for name in last] == ["q", "k", "v"]


def test_models_of_this_package_have_a_method_of_their_own():
    sizes = dict(image_size=8, channels=1, num_classes=2, width=8, depth=1)
    model = nnx.eval_shape(lambda: ConvMixer(**sizes, rngs=nnx.Rngs(0)))
    with pytest.raises(InputError, match=r"^params is a ConvMixer.*initialize_attention"):
        interop.initialize(model, normal_scheme, RNG)


def test_positions_are_those_of_the_image_tokens():
    params = state_dict("timm")
    new = interop.initialize(params, normal_scheme, RNG, num_heads=3)
    site = site_of(params, num_heads=3)
    np.testing.assert_array_equal(site.positions, params["pos_embed"][0, 1:])
    tokens_first = params | {"pos_embed": params["pos_embed"].swapaxes(0, 1)}
    assert site_of(tokens_first, num_heads=3).grid == site.grid
    table = new["pos_embed"][0]
    np.testing.assert_array_equal(table[0], params["pos_embed"][0, 0])  # the class token's row
    np.testing.assert_array_equal(table[1:], normal_scheme(None, site).positions)


def test_position_scale_multiplies_the_whole_table():
    params = state_dict("timm")
    new = write(params, AttentionWeights(position_scale=18.0), num_heads=3)
    np.testing.assert_allclose(new["pos_embed"], 18 * params["pos_embed"], rtol=1e-6)


PATCHES = {  # the patch embedding
    "timm": "patch_embed.proj",
    "dinov2": "embeddings.patch_embeddings.projection",
    "vit_pytorch": "to_patch_embedding.2",
    "torch_encoder": "patches",
    "open_clip": "visual.conv1",
    "equinox": "patch_embed.proj",
    "naflex": "embeds.proj",
    "big_vision_scan": "embedding",
    "nnx_pure": "patches",
}


@pytest.mark.filterwarnings("ignore:.* normalizes the patches")
@pytest.mark.parametrize("name", PATCHES)
def test_a_patch_bias_replaces_that_of_the_patch_embedding(name):
    params, bias = foreign.MODELS[name](), f"{PATCHES[name]}.bias"
    vector = 1 + jnp.arange(read(params, **arguments(name)).query.shape[1])
    new = flatten(write(params, AttentionWeights(patch_bias=vector), **arguments(name)))[0]
    old = flatten(params)[0]
    np.testing.assert_array_equal(new[bias].reshape(-1), vector)
    changed = {p for p, leaf in old.items() if not np.array_equal(to_numpy(leaf), to_numpy(new[p]))}
    assert changed == {bias}


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


def test_linen_trees_under_jit():
    tree = linen_tree("big_vision_scan")
    new = interop.initialize(tree, normal_scheme, RNG)
    jitted = jax.jit(lambda tree, rng: interop.initialize(tree, normal_scheme, rng))
    jax.tree.map(np.testing.assert_array_equal, jitted(tree, RNG), new)
    # The pooling attention of big_vision is not a layer.
    jax.tree.map(np.testing.assert_array_equal, new["MAPHead_0"], tree["MAPHead_0"])


def test_single_attention_with_given_positions():
    model = nnx.MultiHeadAttention(foreign.HEADS, foreign.WIDTH, rngs=nnx.Rngs(0))
    given = dict(grid=(2, 8), positions=sincos_positions((2, 8), foreign.WIDTH))
    site = site_of(model, **given)
    assert (site.num_layers, site.positions_trainable) == (1, False)
    assert read(model).positions is None
    model.maps = nnx.Intermediate(jnp.ones(3))  # as `sow` records them
    new = interop.initialize(model, normal_scheme, RNG, **given)
    assert np.abs(new.query.kernel[...] - model.query.kernel[...]).max() > 0.01


def test_schemes_that_need_no_positions_need_no_table():
    tree = linen_tree("big_vision")
    del tree["pos_embedding"]
    site = site_of(tree, grid=foreign.GRID)
    assert (site.grid, site.positions, site.positions_trainable) == (foreign.GRID, None, False)


def test_dtypes_and_shardings_stay():
    params = state_dict("huggingface", jnp.bfloat16)
    new = interop.initialize(params, normal_scheme, RNG, num_heads=4)
    assert {v.dtype for v in new.values()} == {np.dtype(jnp.bfloat16)}
    assert all(type(v) is np.ndarray and v.flags.c_contiguous for v in new.values())

    mesh = jax.make_mesh((8,), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    tree = linen_tree("big_vision")
    kernel = tree["Transformer"]["encoderblock_0"]["MultiHeadDotProductAttention_0"]["query"]
    kernel["kernel"] = jax.device_put(kernel["kernel"], sharding)
    tree["pos_embedding"] = jax.device_put(tree["pos_embedding"], replicated)
    new = interop.initialize(tree, normal_scheme, RNG)
    kernel = new["Transformer"]["encoderblock_0"]["MultiHeadDotProductAttention_0"]["query"]
    assert kernel["kernel"].sharding == sharding
    assert new["pos_embedding"].sharding == replicated
    assert not kernel["bias"].committed  # as before


@pytest.mark.parametrize(
    ("name", "spec"), [("blocks.0.attn.qkv.weight", ("data",)), ("pos_embed", (None, None, "data"))]
)
def test_arrays_on_a_mesh_with_explicit_axes(name, spec):
    params = state_dict("timm")
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    on_mesh = params | {name: jax.device_put(params[name], sharding)}
    expected = interop.initialize(params, normal_scheme, RNG, num_heads=3)[name]
    eager = interop.initialize(on_mesh, normal_scheme, RNG, num_heads=3)[name]
    with jax.set_mesh(mesh):
        inside = interop.initialize(on_mesh, normal_scheme, RNG, num_heads=3)[name]
    for new in (eager, inside):
        assert new.sharding == sharding
        np.testing.assert_array_equal(new, expected)
