"""Parameters in the layouts of other libraries' models, and of ours."""

import functools
import json
import math
import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from structinit_jax.attention_init import AttentionWeights, sincos_positions
from structinit_jax.interop import initialize
from structinit_jax.interop.foreign_model import ForeignModel
from structinit_jax.interop.layouts import FIELDS, find_stack, flatten

WIDTH, HEADS, DIM, LAYERS, GRID = 32, 4, 8, 2, (4, 4)
TOKENS = 16
FOLDER = pathlib.Path(__file__).parent / "references"
NAMES = json.loads((FOLDER / "state_dict_names.json").read_text())
STATE_DICTS = {  # number of heads and expected grid of each PyTorch state dict
    **dict.fromkeys(NAMES, (4, (6, 6))),
    **dict.fromkeys(("timm", "timm_distilled"), (3, (14, 14))),
    **dict.fromkeys(("open_clip", "equinox", "naflex", "compiled"), (3, (14, 14))),
    "vision_language": (4, (6, 6)),
    "timm_registers": (6, (37, 37)),
    "timm_separate": (12, (32, 32)),
}
del STATE_DICTS["timm_no_positions"], STATE_DICTS["simple_vit"]


@functools.cache
def noise(size):
    return 0.1 * np.random.default_rng(0).standard_normal(size, np.float32)


def state_dict(name, dtype=np.float32):
    """NumPy arrays with the names and shapes of a real state dict; norms have initial values."""
    shapes = NAMES[name]
    starts = range(len(shapes))  # no two arrays are equal

    def is_norm(key):
        return len(shapes.get(f"{key.rpartition('.')[0]}.weight", ())) == 1

    return {
        key: np.full(shape, key.endswith("weight"), dtype)
        if is_norm(key)
        else noise(2**22)[start : start + math.prod(shape)].reshape(shape).astype(dtype)
        for start, (key, shape) in zip(starts, shapes.items(), strict=True)
    }


def normal(rng, *shape):
    return rng.standard_normal(shape, np.float32)


def normal_scheme(rng, site):
    """A scheme with sharp random maps and new positions; needs no compilation."""
    rng = np.random.default_rng(1)
    layers = (site.num_layers, site.width, site.num_heads, site.head_dim)
    query, key, value = (site.width**-0.5 * normal(rng, *layers) for _ in range(3))
    out = normal(rng, layers[0], *layers[2:], layers[1])
    positions = sincos_positions(site.grid, site.width) if site.positions_trainable else None
    return AttentionWeights(*map(jnp.asarray, (query, key, value, out)), positions)


def write(params, weights, **given):
    return initialize(params, lambda rng, site: weights, jax.random.key(0), **given)


def read(params, num_heads=None):
    """The weights of a model's attention layers, as a scheme returns them."""
    leaves = flatten(params)[0]
    stack = find_stack(leaves, None)
    model = ForeignModel(leaves, stack, num_heads)
    heads = (model.num_heads, model.head_dim)
    kernels = {field: [] for field in FIELDS}
    for attention in stack.attentions:
        names = stack.layout.weights(attention)
        for i, (field, name) in enumerate(zip(FIELDS, names, strict=True)):
            kernel = np.asarray(leaves[name])
            if stack.layout.kind == "torch":
                kernel = np.split(kernel, names.count(name))[names[:i].count(name)].T
                ends = (*heads, model.width) if field == "out" else (model.width, *heads)
                kernel = kernel.reshape(ends)
            kernels[field].append(kernel)
    kernels = [each[0] if stack.stacked else np.stack(each) for each in kernels.values()]
    table = model.position_table(None)
    return AttentionWeights(
        *kernels, positions=None if table is None else table.rows[table.prefix :]
    )


def site_of(params, **given):
    """The site that a scheme gets."""
    sites = []

    def scheme(rng, site):
        sites.append(site)
        return AttentionWeights()

    initialize(params, scheme, jax.random.key(0), **given)
    return sites[0]


def linen_block(rng, lead=(), number=0):
    def module(inputs, outputs):
        return {
            "kernel": normal(rng, *lead, *inputs, *outputs),
            "bias": normal(rng, *lead, *outputs),
        }

    attention = {name: module((WIDTH,), (HEADS, DIM)) for name in ("query", "key", "value")}
    attention["out"] = module((HEADS, DIM), (WIDTH,))
    return {
        "LayerNorm_0": {"scale": np.ones((*lead, WIDTH)), "bias": np.zeros((*lead, WIDTH))},
        f"MultiHeadDotProductAttention_{number}": attention,
        "MlpBlock_0": {
            "Dense_0": module((WIDTH,), (2 * WIDTH,)),
            "Dense_1": module((2 * WIDTH,), (WIDTH,)),
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
    """Parameters in the layout of deit3-jax, whose position table has the grid's axes."""
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
    """Named as in jimm, with a class token, a pooling head and position indices as a parameter."""

    def __init__(self, rngs):
        self.cls_token = nnx.Param(jnp.zeros((1, 1, WIDTH)))
        self.position_embeddings = nnx.Param(jnp.ones((1, TOKENS + 1, WIDTH)))
        self.vision_position_ids = nnx.Param(jnp.arange(TOKENS + 1.0)[None])
        self.patches = nnx.Conv(3, WIDTH, kernel_size=(4, 4), strides=4, rngs=rngs)
        self.encoder = Encoder(rngs)
        self.MAPHead = Block(rngs)


def renamed(**names):
    """timm's tensors under other names."""
    params = {}
    for name, array in state_dict("timm").items():
        for old, new in names.items():
            name = name.replace(old.replace("__", "."), new)
        params[name] = array
    return params


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


def open_clip():
    """Both towers of CLIP; the text tower's names resemble the image tower's."""
    names = dict(cls_token="class_embedding", pos_embed="positional_embedding")
    names |= dict(patch_embed__proj="conv1", blocks="transformer.resblocks", norm="ln_")
    names |= dict(qkv__="in_proj_", attn__proj="attn.out_proj", fc1="c_fc", fc2="c_proj")
    vision = renamed(**names)
    text = {name: array for name, array in vision.items() if "conv1" not in name}
    vision["class_embedding"] = vision["class_embedding"].reshape(-1)
    vision["positional_embedding"] = vision["positional_embedding"][0]
    return text | {f"visual.{name}": array for name, array in vision.items()}


def vision_language():
    """InternVL with its language model, whose projections are named as in another project."""
    vision = {f"model.vision_tower.{k}": array for k, array in state_dict("internvl").items()}
    attention, square = "model.language_model.layers.{}.self_attn.{}_proj.weight", np.ones((32, 32))
    return vision | {attention.format(i, field): square for i in range(3) for field in "qkvo"}


def equinox():
    """Equinox modules have PyTorch's layouts; users choose the names outside attention."""
    params = renamed(attn__proj="attn.output_proj", mlp__fc="mlp.layers.")
    params = split(params, "qkv", ("query_proj", "key_proj", "value_proj"))
    params["patch_embed.proj.bias"] = params["patch_embed.proj.bias"][:, None, None]
    return params | {"pos_embed": params["pos_embed"][0]}


def naflex():
    """NaFlexViT: a linear patch embedding, and a position table with the grid's axes."""
    params = renamed(patch_embed="embeds", cls_token="embeds.cls_token")
    kernel = params["embeds.proj.weight"]
    params["embeds.proj.weight"] = kernel.transpose(0, 2, 3, 1).reshape(len(kernel), -1)
    params["embeds.pos_embed"] = params.pop("pos_embed")[:, 1:].reshape(1, 14, 14, -1)
    return params


def compiled():
    """A compiled module in DataParallel."""
    return {f"_orig_mod.module.{name}": array for name, array in state_dict("timm").items()}


MODELS = {
    **{name: lambda name=name: state_dict(name) for name in STATE_DICTS if name in NAMES},
    **{
        family.__name__: family
        for family in (open_clip, vision_language, equinox, naflex, compiled)
    },
    **{
        name: lambda name=name: linen_tree(name)
        for name in ("big_vision", "big_vision_scan", "vit_jax")
    },
    "deit3_jax": deit3_tree,
    "nnx": lambda: NNXModel(nnx.Rngs(0)),
    "nnx_pure": lambda: nnx.to_pure_dict(nnx.state(NNXModel(nnx.Rngs(0)), nnx.Param)),
    "frozen": lambda: nn.FrozenDict({"params": linen_tree("big_vision")}),
    "flat": lambda: {
        f"params/{name}": np.asarray(array)
        for name, array in flatten(linen_tree("vit_jax"))[0].items()
    },
}


def arguments(name):
    """The arguments that `initialize` needs for a model of `MODELS`."""
    return dict(num_heads=STATE_DICTS[name][0]) if name in STATE_DICTS else {}
