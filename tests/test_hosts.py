"""Parameters as other projects name and shape them, and what `interop` makes of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from foreign_models import site_of, state_dict, write

from structinit_jax import interop
from structinit_jax.attention_init import AttentionWeights, sincos_positions
from structinit_jax.errors import InputError
from structinit_jax.models import create_model, default_config

HEADS, WIDTH, GRID, PATCH, LAYERS = 2, 16, (4, 4), 2, 2
RNG = jax.random.key(0)


def scheme(rng, site):
    """A scheme with random maps that needs no compilation."""
    rng = np.random.default_rng(1)
    shape = (site.num_layers, site.width, site.num_heads, site.head_dim)
    query, key, value = (jnp.asarray(rng.standard_normal(shape, np.float32)) for _ in range(3))
    positions = jnp.asarray(sincos_positions(site.grid, site.width), jnp.float32)
    return AttentionWeights(query, key, value, positions=positions, patch_scale=0.3, mlp_scale=0)


@functools.cache
def timm_tensors():
    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.standard_normal(shape, np.float32)

    params = {
        "cls_token": draw(1, 1, WIDTH),
        "pos_embed": np.pad(draw(1, 16, WIDTH), ((0, 0), (1, 0), (0, 0))),
        "patch_embed.proj.weight": draw(WIDTH, 3, PATCH, PATCH),
        "patch_embed.proj.bias": np.zeros(WIDTH, np.float32),
    }
    for i in range(LAYERS):
        for norm in ("norm1", "norm2"):
            params[f"blocks.{i}.{norm}.weight"] = np.ones(WIDTH, np.float32)
            params[f"blocks.{i}.{norm}.bias"] = np.zeros(WIDTH, np.float32)
        linears = dict(attn__qkv=(3, 1), attn__proj=(1, 1), mlp__fc1=(4, 1), mlp__fc2=(1, 4))
        for name, (outputs, inputs) in linears.items():
            module = f"blocks.{i}.{name.replace('__', '.')}"
            params[f"{module}.weight"] = draw(outputs * WIDTH, inputs * WIDTH)
            params[f"{module}.bias"] = np.zeros(outputs * WIDTH, np.float32)
    return params


def renamed(names, **more):
    """timm's tensors under other names, the first replacement that applies, and more of them."""
    params = {}
    for name, array in timm_tensors().items():
        for old, new in names.items():
            name = name.replace(old, new)
        params[name] = array
    return params | {name.replace("__", "."): array for name, array in more.items()}


OPEN_CLIP = {
    "cls_token": "class_embedding",
    "pos_embed": "positional_embedding",
    "patch_embed.proj": "conv1",
    "blocks": "transformer.resblocks",
    "norm": "ln_",
    "qkv.": "in_proj_",
    "attn.proj": "attn.out_proj",
    "fc1": "c_fc",
    "fc2": "c_proj",
}


def open_clip():
    """Both towers of CLIP, the one for text under names like those of the one for images."""
    vision = renamed(OPEN_CLIP)
    text = {name: array for name, array in vision.items() if "conv1" not in name}
    vision["class_embedding"] = vision["class_embedding"].reshape(WIDTH)
    vision["positional_embedding"] = vision["positional_embedding"][0]
    return text | {f"visual.{name}": array for name, array in vision.items()}


def split(params, fused, parts):
    """Splits the fused projections."""
    new = {}
    for name, array in params.items():
        if fused in name:
            for part, piece in zip(parts, np.split(array, 3), strict=True):
                new[name.replace(fused, part)] = piece
        else:
            new[name] = array
    return new


def equinox():
    """Equinox's modules have torch's layouts; the names beside attention are the user's."""
    params = renamed({"attn.proj": "attn.output_proj", "mlp.fc": "mlp.layers."})
    params = split(params, "qkv", ("query_proj", "key_proj", "value_proj"))
    bias = "patch_embed.proj.bias"
    return params | {"pos_embed": params["pos_embed"][0], bias: params[bias][:, None, None]}


def wrapped():
    """A compiled module in DataParallel."""
    return {f"_orig_mod.module.{name}": array for name, array in timm_tensors().items()}


def naflex():
    """NaFlexViT: patches through a linear layer, and a table with the axes of the grid."""
    params = renamed({"patch_embed": "embeds", "cls_token": "embeds.cls_token"})
    kernel = params["embeds.proj.weight"]
    params["embeds.proj.weight"] = kernel.transpose(0, 2, 3, 1).reshape(WIDTH, -1)
    params["embeds.pos_embed"] = params.pop("pos_embed")[:, 1:].reshape(1, *GRID, WIDTH)
    return params


SAME_MODEL = {
    "open_clip": open_clip,
    "naflex": naflex,
    "equinox": equinox,
    "wrapped": wrapped,
}


@pytest.mark.parametrize("name", SAME_MODEL)
def test_names_of_other_projects(name):
    """The same tensors under other names become the same model."""
    results = []
    for start in (SAME_MODEL[name](), timm_tensors()):
        new = interop.initialize(start, scheme, RNG, num_heads=HEADS)
        assert new.keys() == start.keys()
        results.append(interop.read(new, num_heads=HEADS))
        text = [key for key in start if key.startswith("transformer")]
        assert all(new[key] is start[key] for key in text)
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_vit_pytorch():
    """Its norms are in its attention and MLP, and SimpleViT does not store its positions."""
    params = state_dict("simple_vit")
    given = dict(num_heads=4, positions=sincos_positions((6, 6), 32))
    site = site_of(params, **given)
    assert (site.num_layers, site.grid, site.positions_trainable) == (2, (6, 6), False)
    params["transformer.layers.0.0.norm.weight"] += 1
    with pytest.raises(InputError, match=r"0\.norm\.weight is not 1"):
        site_of(params, **given)


@pytest.mark.parametrize("out", ["out", "attention_output"])
def test_keras_hub_and_flax(out):
    shapes = {"query": (WIDTH, HEADS, 8), "key": (WIDTH, HEADS, 8), "value": (WIDTH, HEADS, 8)}
    shapes[out] = (HEADS, 8, WIDTH)
    params = {f"block_{i}/mha/{n}/kernel": np.ones(s) for i in (1, 2) for n, s in shapes.items()}
    params["embedding/position_embedding/embeddings"] = np.ones((16, WIDTH))
    site = site_of(params)
    assert (site.num_layers, site.num_heads, site.grid) == (2, HEADS, GRID)


def torchvision_swin():
    """Two stages of torchvision's Swin, as far as schemes need them."""
    params = {}
    for stage in (1, 3):
        for layer in range(2):
            block = f"features.{stage}.{layer}"
            params[f"{block}.norm1.weight"] = np.ones(WIDTH, np.float32)
            params[f"{block}.attn.qkv.weight"] = np.ones((3 * WIDTH, WIDTH), np.float32)
            params[f"{block}.attn.proj.weight"] = np.ones((WIDTH, WIDTH), np.float32)
            table = np.ones((9, HEADS), np.float32)
            params[f"{block}.attn.relative_position_bias_table"] = table
    return params


def test_every_stage_of_torchvisions_swin():
    sites = []

    def bias_alone(rng, site):
        sites.append(site)
        return AttentionWeights(bias=jnp.full((2, 9, HEADS), len(sites), jnp.float32))

    new = interop.initialize(torchvision_swin(), bias_alone, RNG)
    assert [site.grid for site in sites] == [(2, 2), (2, 2)]
    for number, stage in enumerate((1, 3), 1):
        table = new[f"features.{stage}.1.attn.relative_position_bias_table"]
        np.testing.assert_array_equal(table, number)


def test_a_patch_embedding_of_zeros_stays_one():
    name = "patch_embed.proj.weight"
    zeros = timm_tensors() | {name: np.zeros((WIDTH, 3, PATCH, PATCH), np.float32)}
    new = interop.initialize(zeros, scheme, RNG, num_heads=HEADS)
    np.testing.assert_array_equal(new[name], 0)


# -- models that are refused -----------------------------------------------------------------------


class Module:
    def state_dict(self):
        raise AssertionError("its tensors would have to be converted")


def changed(**tensors):
    return timm_tensors() | {k.replace("__", "."): v for k, v in tensors.items()}


def without(part):
    return {name: value for name, value in timm_tensors().items() if part not in name}


def shapes(**modules):
    names = {k.replace("__", "."): shape for k, shape in modules.items()}
    return {f"{name}.weight": np.ones(shape, np.float32) for name, shape in names.items()}


def pvt():
    """As timm names pvt_v2: stages of attention with fewer keys."""
    params = {}
    for s, width in enumerate((8, 16)):
        block = f"stages__{s}__blocks__0__attn"
        params |= shapes(**{f"{block}__q": (width, width), f"{block}__kv": (2 * width, width)})
        params |= shapes(**{f"{block}__proj": (width, width), f"{block}__sr": (width, width, 2, 2)})
    return params


def stages():
    """Attention of several sizes, as in MViT, Hiera and DaViT."""
    params = {}
    for s, width in enumerate((8, 16)):
        block = f"stages__{s}__blocks__0__attn"
        params |= shapes(**{f"{block}__qkv": (3 * width, width), f"{block}__proj": (width, width)})
    return params


ONES, WIDE = np.ones(WIDTH, np.float32), np.ones((2 * WIDTH, WIDTH), np.float32)
REFUSED = {  # parameters, and what the message says
    "nothing": (dict, "no attention layers, only nothing"),
    "other_names": (
        lambda: shapes(body__attn__wqkv=(3, 3)),
        r"attn\.wqkv\..* rename them for",
    ),
    "torch_module": (Module, r"params is a Module, a torch module: pass \{k: v\.detach"),
    "torch_tensor": (
        lambda: changed(blocks__0__attn__proj__weight=Module()),
        r"weight is a .*Module",
    ),
    "query_norm": (lambda: changed(blocks__0__attn__q_norm__weight=ONES), r"q_norm.weight changes"),
    "gate": (lambda: changed(blocks__0__attn__gate=ONES), r"attn.gate changes the attention maps"),
    "relative": (lambda: changed(rel_pos__mlp__fc1__weight=ONES), r"rel_pos.* changes the atten"),
    "trained": (lambda: changed(blocks__1__norm1__weight=2 * ONES), r"norm1\.weight is not 1"),
    "trained_bias": (lambda: changed(blocks__1__norm2__bias=ONES), r"norm2\.bias is not 0"),
    "no_positions": (lambda: without("pos_embed"), r"positions: .* width 16: pass"),
    "incomplete": (lambda: without("blocks.1.attn.qkv"), r"params have no blocks\.1\.attn\.qkv\."),
    "unequal": (
        lambda: changed(blocks__1__attn__qkv__weight=WIDE),
        r"\.qkv\.weight .*not supported",
    ),
    "two": (
        lambda: {f"{k}.{n}": v for k in "ab" for n, v in timm_tensors().items()},
        r"several models \(a\.blocks\.0\.attn, b\..*\): pass the subtree",
    ),
    "pvt": (pvt, r"attn\.kv\.weight.* other attention is not supported"),
    "convolution": (
        lambda: changed(blocks__0__attn__proj__weight=ONES[:, None, None, None]),
        r"no linear layer; .* not supported",
    ),
    "stages": (stages, r"several stages is not supported"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unusable_parameters_are_refused(case):
    params, message = REFUSED[case]
    with pytest.raises(InputError, match=message):
        interop.initialize(params(), scheme, RNG, num_heads=HEADS)


OPTIONS = {
    "layout": dict(layout="keras_3"),
    "num_heads": dict(num_heads=5),
    "grid": dict(grid=(5, 5)),
    "AttentionSite.positions": dict(positions=np.zeros((16, 8), np.float32)),
}


@pytest.mark.parametrize("argument", OPTIONS)
def test_arguments_that_do_not_fit_are_refused(argument):
    options = dict(num_heads=HEADS) | OPTIONS[argument]
    with pytest.raises(InputError, match=f"^{argument}"):
        interop.initialize(timm_tensors(), scheme, RNG, **options)


def test_rotary_positions_beside_a_table_are_reported():
    params = changed(rope__freqs=ONES)
    with pytest.warns(UserWarning, match=r"rope\.freqs rotates queries and keys"):
        interop.initialize(params, scheme, RNG, num_heads=HEADS)
    del params["pos_embed"]
    with pytest.raises(InputError, match=r"rope\.freqs rotates .* pass rotations="):
        interop.initialize(params, scheme, RNG, num_heads=HEADS)


def test_weights_and_schemes_that_do_not_fit_are_refused():
    weights = interop.read(timm_tensors(), num_heads=HEADS)
    for change in (
        dict(query=weights.query[:1]),
        dict(positions=weights.positions[:9]),
        dict(bias=weights.query),
    ):
        with pytest.raises(InputError, match=rf"^weights\.{next(iter(change))}"):
            write(timm_tensors(), weights._replace(**change), num_heads=HEADS)
    with pytest.raises(InputError, match=r"^weights\.positions"):
        write(without("pos_embed"), weights, num_heads=HEADS, grid=GRID)
    own = nnx.eval_shape(lambda: create_model(default_config("vit"), channels=3, rngs=nnx.Rngs(0)))
    with pytest.raises(InputError, match=r"call model\.initialize_attention\(scheme, rng\)"):
        interop.initialize(own, scheme, RNG)


def test_what_cannot_be_scaled_is_refused():
    attention = nnx.MultiHeadAttention(HEADS, WIDTH, rngs=nnx.Rngs(0))
    with pytest.raises(InputError, match=r"no kernel where a patch embedding .*patch_scale=1"):
        write(attention, AttentionWeights(patch_scale=0.5), grid=GRID)
    with pytest.raises(InputError, match=r"nothing where the output .*mlp_scale=1"):
        write(attention, AttentionWeights(mlp_scale=0), grid=GRID)


@pytest.mark.parametrize("names", [("w3", "w1", "w2"), ("fc2", "fc1_g", "fc1_x"), ("fc2", "fc1")])
def test_an_mlp_as_wide_as_the_model(names):
    square = np.ones((WIDTH, WIDTH), np.float32)
    params = without(".mlp.")
    params |= {f"blocks.{i}.mlp.{n}.weight": square for i in range(LAYERS) for n in names}
    new = write(params, AttentionWeights(mlp_scale=0), num_heads=HEADS)
    found = {name for name in params if not np.array_equal(new[name], params[name])}
    assert found == {f"blocks.{i}.mlp.{names[0]}.weight" for i in range(LAYERS)}
