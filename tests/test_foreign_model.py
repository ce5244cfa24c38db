"""Parameters with other projects' names and shapes, and how `interop` reads them."""

import jax
import numpy as np
import pytest
from foreign_models import normal_scheme, read, site_of, state_dict, write

from structinit_jax import interop
from structinit_jax.attention_init import AttentionWeights, sincos_positions
from structinit_jax.errors import InputError

HEADS, WIDTH, GRID = 3, 192, (14, 14)
RNG = jax.random.key(0)


def test_vit_pytorch():
    """The norms are inside attention and MLP, and SimpleViT does not store its positions."""
    params = state_dict("simple_vit")
    given = dict(num_heads=4, positions=sincos_positions((6, 6), 32))
    with pytest.warns(UserWarning, match=r"to_patch_embedding\.3\.weight normalizes the patches"):
        site = site_of(params, **given)
    assert (site.num_layers, site.grid, site.positions_trainable) == (2, (6, 6), False)
    params["transformer.layers.0.0.norm.weight"] += 1
    with pytest.raises(InputError, match=r"0\.norm\.weight is not 1"):
        site_of(params, **given)


OWN_NAMES = ("query", "key", "value", "fc.0")


@pytest.mark.parametrize("out", ["out", "attention_output", "fc.0"])
def test_flax_kernels(out):
    shapes = {"query": (WIDTH, HEADS, 8), "key": (WIDTH, HEADS, 8), "value": (WIDTH, HEADS, 8)}
    shapes[out] = (HEADS, 8, WIDTH)
    params = {f"block_{i}/mha/{n}/kernel": np.ones(s) for i in (1, 2) for n, s in shapes.items()}
    params["embedding/position_embedding/embeddings"] = np.ones((16, WIDTH))
    site = site_of(params, projections=OWN_NAMES if out == "fc.0" else None)
    assert (site.num_layers, site.num_heads, site.grid) == (2, HEADS, (4, 4))


def own_names(name, leaf):
    return name.replace("attn.qkv", "msa.w").replace("attn.proj", "msa.fc.0"), leaf


def linear_layers_of_flax(name, leaf):
    if not name.endswith(".weight"):
        return name, leaf
    return name.removesuffix("weight") + ("kernel" if leaf.ndim > 1 else "scale"), leaf.T


def layers_of_keras(name, leaf):
    return name.replace("blocks.1.attn", "attn_1").replace("blocks.0.attn", "attn"), leaf


def layers_in_chunks(name, leaf):
    return name.replace("blocks.1.", "blocks.1.1.").replace("blocks.0.", "blocks.0.0."), leaf


def a_longer_name_of_the_class_token(name, leaf):
    return name.replace("cls_token", "cls_token_emb"), leaf


@pytest.mark.parametrize(
    ("convert", "projections"),
    [
        (own_names, ("w", "w", "w", "fc.0")),
        (own_names, ("msa.w", "msa.w", "msa.w", "msa.fc.0")),
        (linear_layers_of_flax, None),
        (layers_of_keras, None),
        (layers_in_chunks, None),
        (a_longer_name_of_the_class_token, None),
    ],
)
def test_other_names_and_kernels_get_the_same_weights(convert, projections):
    def converted(params):
        return dict(convert(name, leaf) for name, leaf in params.items())

    given = dict(num_heads=HEADS, rng=RNG, attention_init=normal_scheme)
    params = converted(state_dict("timm"))
    new = interop.initialize(params, projections=projections, **given)
    for name, leaf in converted(interop.initialize(state_dict("timm"), **given)).items():
        np.testing.assert_array_equal(new[name], leaf)
    with pytest.raises(InputError, match=r"^params hold no .* projections=.*, only"):
        interop.initialize(params, projections=OWN_NAMES, **given)


class Module:
    def state_dict(self):
        raise AssertionError("its tensors would have to be converted")


def changed(**tensors):
    return state_dict("timm") | {k.replace("__", "."): v for k, v in tensors.items()}


def without(part):
    return {name: value for name, value in state_dict("timm").items() if part not in name}


def shapes(**modules):
    return {f"{k.replace('__', '.')}.weight": np.ones(s, np.float32) for k, s in modules.items()}


def stages():
    """Attention of several sizes, as in MViT, Hiera and DaViT."""
    return {
        f"stages.{stage}.blocks.{i}.attn.{name}.weight": np.ones((rows * width, width), np.float32)
        for stage, width in ((0, 8), (1, 16))
        for i in range(2)
        for name, rows in (("qkv", 3), ("proj", 1))
    }


ONES, WIDE = np.ones(WIDTH, np.float32), np.ones((2 * WIDTH, WIDTH), np.float32)
SEQUENCE_PATCHES = np.ones((WIDTH, 3, 16), np.float32)  # a convolution over a sequence
REFUSED = {  # parameters, by a part of the message
    r"attn\.kv\.weight.* other attention is not": lambda: shapes(
        a__attn__kv=(8, 4), a__attn__sr=(4,)
    ),
    r"params is a Module, .* state_dict\(\)": Module,
    "q_norm.weight may change the attention": lambda: changed(blocks__0__attn__q_norm__weight=ONES),
    "norm1.alpha may change the attention": lambda: changed(blocks__0__norm1__alpha=ONES[:1]),
    "norm1.linear.weight may change": lambda: changed(blocks__0__norm1__linear__weight=WIDE),
    "rel_pos.* may change the attention": lambda: changed(rel_pos__mlp__fc1__weight=ONES),
    r"norm1\.weight is not 1": lambda: changed(blocks__1__norm1__weight=2 * ONES),
    r"params: norm1\.weight is not 1": lambda: {  # a single block
        name.removeprefix("blocks.1."): 2 * leaf
        for name, leaf in state_dict("timm").items()
        if name.startswith("blocks.1.")
    },
    r"ada_norm\.weight is not 1": lambda: changed(blocks__1__ada_norm__weight=2 * WIDE),
    r"norm2\.bias is not 0": lambda: changed(blocks__1__norm2__bias=ONES),
    # The last stage has a single layer.
    r"several kinds .*stages\.1\.blocks\.0": lambda: {
        name: leaf for name, leaf in stages().items() if "stages.1.blocks.1" not in name
    },
    "positions: .* width 192 with 'pos' in its name: rename": lambda: without("pos_embed"),
    r"\.qkv\.weight .*not supported": lambda: changed(blocks__1__attn__qkv__weight=WIDE),
    "^grid: patch_embed": lambda: changed(patch_embed__proj__weight=SEQUENCE_PATCHES),
    r"attn\.proj\.bias has dtype int8": lambda: changed(blocks__1__attn__proj__bias=np.int8(ONES)),
    r"proj\.weight has shape \(0,\), as if .* partitioned": lambda: dict.fromkeys(
        state_dict("timm"), np.zeros(0, np.float32)
    ),
    r"proj\.weight has shape \(3, 64, 192\), as if": lambda: changed(
        blocks__0__attn__proj__weight=np.ones((3, 64, 192), np.float32)
    ),
    "several position tables": lambda: changed(decoder_pos_embed=state_dict("timm")["pos_embed"]),
    "has type ShapeDtypeStruct": lambda: jax.eval_shape(lambda: state_dict("timm")),
    r"hold no attention layers .* blocks\.1\.attn\.proj": lambda: without("blocks.1.attn.qkv"),
    r"hold no attention layers [^:]*, only fc\.weight": lambda: shapes(norm=(8,), fc=(8, 4)),
    "several stages are not supported": stages,
    "detection_tokens belongs to tokens that": lambda: changed(detection_tokens=ONES),
    "^grid: token_embedding": lambda: without("patch_embed") | {"token_embedding.weight": WIDE},
}


@pytest.mark.parametrize("message", REFUSED)
def test_unusable_parameters_are_refused(message):
    with pytest.raises(InputError, match=message):
        interop.initialize(REFUSED[message](), normal_scheme, RNG, num_heads=HEADS)


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("^num_heads=5 .* 192 channels", dict(num_heads=5)),
        ("^num_heads=None", dict(num_heads=None)),
        ("^projections=", dict(projections=("qkv", "proj"))),
        ("^grid=", dict(grid=(5, 5))),
        ("^grid=", dict(grid=(15, 14))),
        (r"^grid=\(14, 0\) must be", dict(grid=(14, 0))),
        (r"^positions=.* \(1, 16, 8\)", dict(positions=np.zeros((1, 16, 8), np.float32))),
        (r"^positions=.* \(197, 192\)", dict(positions=np.zeros((197, WIDTH)))),
        (r"^positions=.* grid=\(3, 2\)", dict(positions=np.zeros((4, WIDTH)), grid=(3, 2))),
    ],
)
def test_arguments_that_do_not_fit_are_refused(message, options):
    options = dict(num_heads=HEADS) | options
    with pytest.raises(InputError, match=message):
        interop.initialize(state_dict("timm"), normal_scheme, RNG, **options)


def test_a_linear_layer_is_no_norm():
    params = changed(blocks__0__1__net__0__weight=2 * WIDE)
    assert site_of(params, num_heads=HEADS).grid == (14, 14)


def test_linear_layers_and_queries_are_no_position_tables():
    params = {k: v for k, v in state_dict("huggingface").items() if "position" not in k}
    square = {"pos_proj.weight": np.ones((36, 32), np.float32)}
    assert site_of(params | square, num_heads=4).grid == (6, 6)
    queries = {"query_position_embeddings.weight": np.ones((36, 32), np.float32)}
    for others in (square | {"pos_proj.bias": np.ones(36, np.float32)}, queries):
        with pytest.raises(InputError, match=r"^positions: .* no position table"):
            site_of(params | others, num_heads=4)


def test_a_table_can_have_a_row_that_the_model_drops():
    params = changed(pos_embed=np.ones((1, 17, WIDTH), np.float32))
    del params["cls_token"]
    with pytest.raises(InputError, match=r"^grid=None must be .* has 17 rows, at most 0 of them"):
        site_of(params, num_heads=HEADS)
    weights = AttentionWeights(positions=np.zeros((16, WIDTH)))
    new = write(params, weights, num_heads=HEADS, grid=(4, 4))
    assert new["pos_embed"].any(axis=-1).tolist() == [[True] + 16 * [False]]


def test_a_sequence_of_tokens_is_a_grid_of_one_row():
    positions = np.ones((1, 17, WIDTH), np.float32)
    params = changed(patch_embed__proj__weight=SEQUENCE_PATCHES, pos_embed=positions)
    assert site_of(params, num_heads=HEADS, grid=(1, 16)).grid == (1, 16)
    new = write(params, AttentionWeights(patch_bias=np.ones(WIDTH)), num_heads=HEADS, grid=(1, 16))
    assert new["patch_embed.proj.bias"].all()


@pytest.mark.parametrize("name", ["rope.freqs", "blocks.0.attn.rope.freqs_cos"])
def test_rotary_positions_beside_a_table_are_reported(name):
    params = state_dict("timm") | {name: ONES}
    with pytest.warns(UserWarning, match=rf"{name} rotates queries and keys"):
        interop.initialize(params, normal_scheme, RNG, num_heads=HEADS)
    del params["pos_embed"]
    given = dict(num_heads=HEADS, positions=sincos_positions(GRID, WIDTH))
    with pytest.warns(UserWarning, match=rf"{name} rotates queries and keys"):
        site_of(params, **given)
    with pytest.raises(InputError, match=rf"{name} rotates .* pass rotations=model"):
        interop.initialize(params, normal_scheme, RNG, num_heads=HEADS)


@pytest.mark.parametrize(
    "name", ["ls1.gamma", "gamma_1", "layer_scale1.lambda1", "scale1", "attn.gamma1.weight"]
)
def test_a_layer_scale_that_hides_values_is_reported(name):
    params = state_dict("timm") | {f"blocks.0.{name}": 1e-5 * ONES}
    with pytest.warns(UserWarning, match=rf"blocks\.0\.{name} .* LayerScale") as caught:
        interop.initialize(params, normal_scheme, RNG, num_heads=HEADS)
    assert caught[0].filename == __file__


def test_norms_that_may_be_rms_norms_are_reported():
    with pytest.warns(UserWarning, match=r"blocks\.0\.norm1 has no bias: if it is an RMSNorm"):
        interop.initialize(without("norm1.bias"), normal_scheme, RNG, num_heads=HEADS)


def test_weights_and_schemes_that_do_not_fit_are_refused():
    weights = read(state_dict("timm"), num_heads=HEADS)
    wrong = dict(query=weights.query[:1], positions=weights.positions[:9])
    wrong |= dict(bias=weights.query, patch_bias=ONES[:9])
    for name, array in wrong.items():
        with pytest.raises(InputError, match=rf"^weights\.{name}"):
            write(state_dict("timm"), weights._replace(**{name: array}), num_heads=HEADS)
    with pytest.raises(InputError, match=r"^attention_init returned NoneType for"):
        write(state_dict("timm"), None, num_heads=HEADS)


@pytest.mark.parametrize("params", [state_dict("timm"), without("pos_embed")])
@pytest.mark.parametrize("field", ["positions", "position_scale"])
def test_positions_that_the_model_does_not_store_are_not_set(params, field):
    weights = AttentionWeights(**{field: 2.0 * sincos_positions(GRID, WIDTH)})
    given = dict(num_heads=HEADS, positions=sincos_positions(GRID, WIDTH))
    with pytest.raises(InputError, match=rf"^weights\.{field}="):
        write(params, weights, **given)
