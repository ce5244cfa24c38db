"""Parameters, weights and schemes that `interop.initialize` and `write` refuse."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from foreign_models import (
    HEADS,
    TOKENS,
    WIDTH,
    linen_block,
    linen_tree,
    normal_scheme,
    state_dict,
    timm_with,
)

from structinit_jax import interop
from structinit_jax.attention_init import (
    AttentionWeights,
    impulse,
    impulse_2025,
    sincos_positions,
)
from structinit_jax.errors import InputError
from structinit_jax.interop.host import find_host
from structinit_jax.models import create_model, default_config

RNG = jax.random.key(0)
BIG_VISION = functools.partial(linen_tree, "big_vision")
HEADS_OF_TIMM = dict(num_heads=3)


class Tensor:
    shape = (192, 192)


class TorchModule:
    def state_dict(self):
        raise AssertionError("its tensors would have to be converted")


PARTS = {  # that no scheme knows
    "blocks__0__attn__q_norm__weight": r"q_norm\.weight normalizes queries or keys",
    "blocks__0__attn__temperature": r"temperature rescales the logits",
    "blocks__0__attn__logit_scale": r"logit_scale belongs to cosine attention, as in SwinV2",
    "blocks__1__attn__proj_l__weight": r"proj_l\.weight mixes the maps of the heads",
    "blocks__0__attn__norm__weight": r"attn\.norm\.weight normalizes what the output projection",
    "blocks__0__attn__rel_pos_h": r"rel_pos_h adds a bias",
    "shared_rel_pos__mlp__fc1__weight": r"shared_rel_pos.* adds a bias",
    "blocks__0__attn__gate": r"attn\.gate is a part of the attention that schemes do not know",
}


def without(part):
    return {name: value for name, value in state_dict("timm").items() if part not in name}


def odd_table():
    return linen_tree("big_vision") | {"pos_embedding": jnp.zeros((1, 12, WIDTH))}


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
        (
            lambda: jax.eval_shape(BIG_VISION),
            {},
            r"is abstract: build the model first, or .* inside jax\.jit",
        ),
        (dict, dict(layout="keras"), r"layout='keras'.*timm, huggingface"),
        (lambda: state_dict("timm"), {}, r"num_heads: .*192 channels"),
        (lambda: state_dict("timm"), dict(num_heads=5), r"num_heads=5: .*192 channels"),
        (BIG_VISION, dict(num_heads=5), r"num_heads=5, but Transformer\..*query\.kernel has 4"),
        (lambda: without("pos_embed"), HEADS_OF_TIMM, r"positions: .* width 192 .*pos_embed"),
        (
            lambda: state_dict("timm_no_positions"),
            dict(num_heads=12, positions=sincos_positions((14, 14), 768)),
            r"positions: leave it out, .* blocks\.0\..*relative_position_bias_table in its place",
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
        (odd_table, {}, r"grid: the 12 rows of pos_embedding.*, or positions=\[N, D\] if "),
        (
            odd_table,
            dict(grid=(5, 5)),
            r"grid=\(5, 5\) has 25 tokens, but pos_embedding has 12.*, or positions=\[N, D\] if ",
        ),
        (odd_table, dict(grid=(-3, -4)), r"grid=\(-3, -4\): needs a tuple \(rows, cols\)"),
        (odd_table, dict(positions=np.zeros((12, WIDTH), np.float32)), r"grid: 12 positions"),
        (
            odd_table,
            dict(positions=np.zeros((1, 16, WIDTH), np.float32)),
            r"positions has shape \(1, 16, 32\).*\[N, 32\]",
        ),
        (
            lambda: without("blocks.1.attn.qkv"),
            HEADS_OF_TIMM,
            r"blocks\.1\.attn has no .*qkv\.weight, only .*1\.attn\.proj\.weight.*\. Rename .*Site",
        ),
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
        (
            lambda: timm_with(blocks__0__attn__proj__weight=np.zeros((192, 192), np.int8)),
            HEADS_OF_TIMM,
            r"proj\.weight holds int8, not floating-point",
        ),
    ],
)
def test_unusable_parameters_are_refused(params, options, message):
    with pytest.raises(InputError, match=message):
        interop.initialize(params(), normal_scheme, RNG, **options)


SIGLIP_TEXT = "embeddings.token_embedding.weight"


def siglip_of_text():
    """The text tower of SigLIP, with as many positions as an image of 6×6 tokens."""
    tower = {k: v for k, v in state_dict("siglip").items() if "patch_embedding" not in k}
    return tower | {SIGLIP_TEXT: np.ones((60, 32), np.float32)}


def big_vision_of_text():
    tower = linen_tree("big_vision")
    return {
        "Embed_0": {"embedding": np.ones((60, WIDTH))},
        "pos_embedding": tower["pos_embedding"],
        "Encoder_0": tower["Transformer"],
    }


@pytest.mark.parametrize(
    ("params", "num_heads", "message"),
    [
        (siglip_of_text, 4, rf"{SIGLIP_TEXT} embeds words, .* text model"),
        (big_vision_of_text, None, r"Embed_0\.embedding embeds words"),
        (
            lambda: timm_with(patch_embed__proj__weight=np.ones((192, 3, 2, 16, 16), np.float32)),
            3,
            r"proj\.weight has shape \(192, 3, 2, 16, 16\), a patch embedding of videos",
        ),
    ],
)
def test_models_of_text_and_videos_are_refused(params, num_heads, message):
    for call in (interop.attention_site, interop.check):
        with pytest.raises(InputError, match=message):
            call(params(), num_heads=num_heads)


def test_positions_that_are_no_array_are_refused():
    with pytest.raises(InputError, match=r"positions: the encoding is a builtins\.list"):
        find_host(state_dict("timm"), None, 3).positions([[1.0]], None)


def test_a_table_of_zeros_tells_no_tokens_apart():
    zeros = timm_with(pos_embed=np.zeros((1, 197, 192), np.float32))
    with pytest.raises(InputError, match="positions are equal for all tokens"):
        interop.initialize(zeros, impulse_2025(), RNG, num_heads=3)


def test_a_scheme_that_was_not_called_is_refused():
    with pytest.raises(InputError, match=r"attention_init=impulse is not .*as in impulse\(\)"):
        interop.initialize(linen_tree("big_vision"), impulse, RNG)


def test_a_scheme_that_returns_no_weights_is_refused():
    def scheme(rng, site):
        return None

    with pytest.raises(InputError, match=r"=scheme returned NoneType: .*return AttentionWeights"):
        interop.initialize(linen_tree("big_vision"), scheme, RNG)


def test_a_learned_table_of_a_width_without_an_encoding():
    layer = {"attn.qkv.weight": (90, 30), "attn.proj.weight": (30, 30)}
    shapes = {f"blocks.0.{name}": shape for name, shape in layer.items()}
    params = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    params["pos_embed"] = np.random.default_rng(0).standard_normal((1, 16, 30), np.float32)
    with pytest.raises(InputError, match=r"width=30: .* divisible by 4; .* such as 'mimetic'"):
        interop.initialize(params, impulse(), RNG, num_heads=3)
    with pytest.raises(InputError, match="attention_init=impulse is not a function"):
        interop.initialize(params, impulse, RNG, num_heads=3)


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
    with pytest.raises(InputError, match=r"weights\.patch_bias has shape \(1,\)"):
        interop.write(tree, weights._replace(patch_bias=jnp.ones(1)))
    del tree["pos_embedding"]
    with pytest.raises(InputError, match=r"weights\.positions: "):
        interop.write(tree, weights)
    table = jnp.zeros((TOKENS, WIDTH))
    layers = [linen_block(np.random.default_rng(0))]
    with pytest.raises(InputError, match=r"several position tables \(pos, pos_embed\)"):
        interop.read({"layers": layers, "pos": table, "pos_embed": table}, layout="nnx")


def test_what_cannot_be_scaled_is_refused():
    attention = nnx.MultiHeadAttention(HEADS, WIDTH, rngs=nnx.Rngs(0))
    with pytest.raises(InputError, match=r"no kernel where a patch embedding .*patch_scale=1"):
        interop.write(attention, AttentionWeights(patch_scale=0.5))
    with pytest.raises(InputError, match=r"nothing where the output .*mlp_scale=1"):
        interop.write(attention, AttentionWeights(mlp_scale=0))
    params = timm_with(blocks__1__adapter__weight=np.ones((192, 8), np.float32))
    with pytest.raises(InputError, match=r"beside blocks\.1\.attn .*adapter, .*fc2 "):
        interop.write(params, AttentionWeights(mlp_scale=0), num_heads=3)


@pytest.mark.parametrize("name", ["convmixer", "vit"])
def test_models_of_this_package_name_their_own_method(name):
    options = default_config(name) | {"image_size": 32}
    model = nnx.eval_shape(lambda: create_model(options, channels=3, rngs=nnx.Rngs(0)))
    with pytest.raises(InputError, match=r"call model\.initialize_attention\(scheme, rng\)"):
        interop.initialize(model, impulse(), RNG)
