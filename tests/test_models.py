import functools
import inspect
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import references
from clu import parameter_overview
from flax import nnx
from tiny_models import EVERYWHERE, IMAGES, SIZES, make, train, train_fn

from structinit_jax import attention_init
from structinit_jax.attention_init import AttentionWeights, ConvWeights, TokenMixingWeights
from structinit_jax.errors import InputError
from structinit_jax.models import FAMILIES, VARIANTS, check_fields, create_model, default_config
from structinit_jax.models.layers import PatchEmbedding
from structinit_jax.models.model import make_rngs
from structinit_jax.training.state import split_model

COUNTS = json.loads((references.HERE / "parameter_counts.json").read_text())
SCHEMES = {  # that set other arrays than the remaining ones, or their own
    "vit": ["impulse", "impulse_2024", "impulse_2025"],
    "swin": ["impulse"],
    "mixer": ["impulse"],
    "convmixer": ["impulse_2024"],
}
pytestmark = pytest.mark.usefixtures("library_promotion")


def test_signatures_have_the_fields_with_their_defaults():
    for model in FAMILIES.values():
        parameters = inspect.signature(model).parameters
        defaults = {name: p.default for name, p in parameters.items()}
        for name in ("channels", "rngs"):
            assert defaults.pop(name) is inspect.Parameter.empty
        assert defaults == model.default_config() | dict(attention_init=None)
        documented = re.findall(r"^  (\w+): ", inspect.getdoc(model), re.MULTILINE)
        assert {*parameters} <= {*documented}


def test_variants_of_the_vit_have_heads_of_64_channels_or_as_many_as_their_name_says():
    for name, (family, changes) in VARIANTS.items():
        if family == "vit":
            named = re.search(r"_h(\d+)_", name)
            heads = int(named[1]) if named else changes["width"] // 64
            assert changes["num_heads"] == heads, name


def test_unknown_names_are_refused_with_similar_ones():
    with pytest.raises(InputError, match=r"^name='swin_tiny_224' is unknown: did you mean"):
        default_config("swin_tiny_224")
    with pytest.raises(InputError, match=r"^name='flax.nnx:Linear' must be .*Model"):
        default_config("flax.nnx:Linear")
    with pytest.raises(InputError, match=r"^name='' is unknown"):
        check_fields(dict(width=64))
    with pytest.raises(InputError, match=r"^name='vit_tiny_patch16_224' is unknown"):
        check_fields(dict(name="vit_tiny_patch16_224"))  # its sizes would not be used


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_have_timms_parameter_counts(name):
    options = default_config(name)
    check_fields(options)
    create = functools.partial(create_model, options, channels=3)
    model = nnx.eval_shape(lambda: create(rngs=make_rngs(jax.random.key(0))))
    expected = COUNTS.get(name)  # the papers' variants are not in timm
    assert expected in (None, parameter_overview.count_parameters(split_model(model)[1]))
    assert expected or name.endswith("patch2_32") or name.startswith("convmixer_")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(image_size=(8, 0)), r"^image_size=\(8, 0\) must"),
        (dict(image_size=(8, 9)), r"^image_size=\(8, 9\) .* patch_size=2"),
        (dict(size=3), "^size does not exist"),
        (dict(dtype="float16"), "^dtype='float16' must be"),
        (dict(dtype="(0.5,)"), r"^dtype='\(0\.5,\)' must be"),
        (dict(name="vit", num_heads=3), "^num_heads=3 .* width=16"),
        (dict(name="vit", num_heads=8, positions="rope"), "^head_dim=2 .* of 4 .* number of heads"),
        (dict(name="swin", depths=(2,)), r"^num_heads=\[2, 4\] .* depths=\(2,\)"),
        (dict(name="swin", depths=(), num_heads=()), r"^num_heads=\(\) must be .*or more stages"),
        (dict(name="vit", mlp_ratio=0.05), "^hidden units of an MLP=0 must be 1 or more"),
        (dict(name="swin", image_size=3, patch_size=4), "^image_size=3 .* patch_size=4"),
    ],
)
def test_sizes_that_do_not_fit_and_invalid_fields_are_refused(fields, message):
    name = fields.get("name", "mixer")
    options = default_config(name) | SIZES[name] | dict(image_size=8) | fields
    with pytest.raises(InputError, match=message):
        create_model(options, channels=1, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("vit", (1, 4, 16, 1)),
        ("swin", (1, 8, 16, 1)),
        ("vit", (1, 8, 8, 3)),
        ("convmixer", (1, 9, 8, 1)),
    ],
)
def test_images_that_the_model_was_not_built_for_are_refused(family, shape):
    found = re.escape(f"type float32 and shape {shape}")
    with pytest.raises(InputError, match=f"^images have {found}"):
        make(family)(jnp.zeros(shape))


@pytest.mark.parametrize(
    ("shape", "dtype"), [((1, 8, 8, 1), "uint8"), ((8, 8, 1), "float32"), ((8, 8), "float32")]
)
def test_images_that_are_not_normalized_or_no_batch_are_refused(shape, dtype):
    embed = inspect.unwrap(PatchEmbedding.__call__)  # without the tests' type checker
    with pytest.raises(InputError, match=rf"^images have type {dtype}"):
        embed(make("vit").patch_embedding, jnp.zeros(shape, dtype))


@pytest.mark.parametrize("family", SIZES)
def test_an_empty_batch_has_empty_results(family):
    out = jax.eval_shape(functools.partial(make(family), with_maps=True), jnp.zeros((0, 8, 8, 1)))
    assert out[0].shape == (0, 4)


@pytest.mark.parametrize(("family", "changes"), [("vit", dict(positions="rope")), ("swin", {})])
def test_flax_can_tabulate_the_layers(family, changes):
    # `nnx.tabulate` traces the arrays that one module passes to another.
    assert "head" in nnx.tabulate(make(family, **changes), jnp.zeros((1, 8, 8, 1)))


def test_layer_norms_have_timms_epsilon():
    for family, epsilon in (("vit", 1e-6), ("swin", 1e-5), ("mixer", 1e-6)):
        nodes = [node for _, node in nnx.iter_graph(make(family))]
        assert {n.epsilon for n in nodes if isinstance(n, nnx.LayerNorm)} == {epsilon}


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_start_with_weights_of_their_own(family):
    model = make(family)
    for stack in model.stacks().values():
        for name, leaf in jax.tree.leaves_with_path(nnx.to_pure_dict(nnx.state(stack))):
            if name[-1].key == "kernel" and len(leaf) > 1:
                assert np.any(leaf[0] != leaf[1]), jax.tree_util.keystr(name)


@pytest.mark.filterwarnings("ignore:The 'split' argument of 'fork'")  # for a newer method
def test_rngs_have_the_keys_of_nnx():
    both = (make_rngs(jax.random.key(5)), nnx.Rngs(jax.random.key(5)))
    for draw in (
        lambda rngs: rngs.params(),
        lambda rngs: rngs.params(),
        lambda rngs: rngs.default.fork()(),
        lambda rngs: rngs.default.fork(split=2).key[...],
        lambda rngs: rngs.dropout(),
    ):
        np.testing.assert_array_equal(*[jax.random.key_data(draw(rngs)) for rngs in both])


def test_models_say_which_arrays_have_a_layer_axis():
    stacks = {family: tuple(make(family).stacks()) for family in SIZES}
    assert stacks.pop("swin") == ("stage1/blocks", "stage2/blocks")
    assert set(stacks.values()) == {("blocks",)}
    model = nnx.clone(make("vit"))
    model.stages = nnx.List([nnx.clone(model.blocks)])
    assert tuple(model.stacks()) == ("blocks", "stages/0")


@jax.jit
def descend(params, grads):
    norm = optax.tree.norm(grads)
    return jax.tree.map(lambda p, g: p - 0.02 * g / norm, params, grads)


@pytest.mark.parametrize(
    ("family", "name"), [(family, name) for family in SCHEMES for name in SCHEMES[family]]
)
def test_every_model_learns_from_every_scheme(family, name):
    graphdef, *start = split_model(make(family, dtype=jnp.bfloat16))
    options = dict(max_steps=3) if (family, name) == ("vit", "impulse_2024") else {}
    scheme, rng = attention_init.SCHEMES[name](**options), jax.random.key(0)

    def init(params, state, rng):
        model = nnx.merge(graphdef, params, state)
        model.initialize_attention(scheme, rng)
        return split_model(model)[1:]

    params, state = jax.jit(init, out_shardings=EVERYWHERE)(*start, rng)
    assert jax.tree.map(jnp.shape, [params, state]) == jax.tree.map(jnp.shape, start)
    loss_and_grads = train_fn(family, dtype=jnp.bfloat16)
    (before, (_, _, after)), grads = loss_and_grads(params, state, rng)
    assert {leaf.dtype.name for leaf in jax.tree.leaves((params, after, grads))} == {"float32"}
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
    assert loss_and_grads(descend(params, grads), state, rng)[0][0] < before


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_computed_in_bfloat16_and_stays_close_to_float32(family):
    graphdef, *start = split_model(make(family))
    run = jax.jit(lambda *start: nnx.merge(graphdef, *start)(IMAGES, rng=jax.random.key(0))[0])
    (_, (logits, out, _)), _ = train(family, dtype=jnp.bfloat16)
    blocks = out["stages"][0]["blocks"] if family == "swin" else out["blocks"]
    assert (blocks["output"].dtype, logits.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(logits, run(*start), atol=0.03)


@pytest.mark.parametrize(
    ("family", "weights", "message"),
    [
        ("vit", None, "^attention_init returned NoneType for AttentionSite"),
        ("swin", TokenMixingWeights(), "^attention_init returned TokenMixing"),
        ("mixer", AttentionWeights(), "^attention_init returned AttentionWeights"),
        ("convmixer", (np.ones((2, 3, 3, 16)),), "^attention_init returned tuple for ConvSite"),
        ("vit", AttentionWeights(bias=np.ones((2, 49, 2))), r"^weights\.bias"),
        # These would be broadcast.
        ("vit", AttentionWeights(patch_bias=np.ones(1)), r"^weights\.patch_bias=.*\(1,\)"),
        ("swin", AttentionWeights(bias=np.ones((49, 1))), r"^weights\.bias=.*\(49, 1\)"),
        ("mixer", TokenMixingWeights(fc1=np.ones((16, 1))), r"^weights\.fc1=.*\(16, 1\)"),
        ("convmixer", ConvWeights(np.ones((3, 3, 16))), r"^weights\.kernel=.*\(3, 3, 16\)"),
    ],
)
def test_weights_of_another_kind_or_shape_are_refused(family, weights, message):
    with pytest.raises(InputError, match=message):
        make(family).initialize_attention(lambda rng, site: weights, jax.random.key(0))
