"""Parameters as other projects name and shape them, and what `interop` makes of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from structinit_jax import interop
from structinit_jax.attention_init import AttentionWeights, sincos_positions
from structinit_jax.errors import InputError

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


def naflex():
    """NaFlexViT: patches through a linear layer, and a table with the axes of the grid."""
    params = renamed({"patch_embed": "embeds", "cls_token": "embeds.cls_token"})
    kernel = params["embeds.proj.weight"]
    params["embeds.proj.weight"] = kernel.transpose(0, 2, 3, 1).reshape(WIDTH, -1)
    params["embeds.pos_embed"] = params.pop("pos_embed")[:, 1:].reshape(1, *GRID, WIDTH)
    return params


@pytest.mark.parametrize("params", [open_clip, naflex])
def test_names_of_other_projects(params):
    """The same tensors under other names become the same model."""
    images = np.random.default_rng(2).standard_normal((3, 8, 8, 3), np.float32)
    results = []
    for start in (params(), timm_tensors()):
        new = interop.initialize(start, scheme, RNG, num_heads=HEADS)
        maps = interop.check(new, images, num_heads=HEADS)
        results.append((interop.read(new, num_heads=HEADS), maps))
        text = [name for name in start if name.startswith("transformer")]
        assert all(new[name] is start[name] for name in text)
    jax.tree.map(np.testing.assert_array_equal, *results)


def nnx_model(gain):
    """Parameters of a model of one's own in Flax NNX, without a class token."""
    rngs = nnx.Rngs(0)
    block = nnx.Dict(
        norm1=nnx.LayerNorm(WIDTH, rngs=rngs),
        attn=nnx.MultiHeadAttention(HEADS, WIDTH, rngs=rngs),
        norm2=nnx.LayerNorm(WIDTH, rngs=rngs),
        fc1=nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs),
        fc2=nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs),
    )
    patches = nnx.Conv(3, WIDTH, (PATCH, PATCH), PATCH, rngs=rngs)
    patches.kernel[...] *= gain
    positions = nnx.Param(jnp.ones((1, 16, WIDTH)))
    return nnx.Dict(patches=patches, positions=positions, blocks=nnx.List([block]))


def timm_times(gain, name="patch_embed.proj.weight"):
    params = dict(timm_tensors())
    return params | {name: gain * params.get(name, np.ones(WIDTH, np.float32))}


HOSTS = {  # by the gain of the patch embeddings
    "convolution": timm_times,
    "linear": lambda gain: naflex() | {"embeds.proj.weight": gain * naflex()["embeds.proj.weight"]},
    "norm": functools.partial(timm_times, name="patch_embed.norm.weight"),
    "nnx": nnx_model,
}


@pytest.mark.parametrize("host", HOSTS)
def test_positions_are_equally_loud_in_every_host(host):
    """PyTorch's default kernel has a variance of 1 / (3 fan-in)."""
    options = {} if host == "nnx" else dict(num_heads=HEADS)
    kernel = np.random.default_rng(0).uniform(-1, 1, (WIDTH, 3, PATCH, PATCH)) / 12**0.5
    kernel *= (1 / 36 / np.square(kernel).mean()) ** 0.5
    pytorch = timm_times(0) | {"patch_embed.proj.weight": kernel.astype(np.float32)}
    images = np.random.default_rng(2).standard_normal((64, 8, 8, 3), np.float32)
    pytorch = interop.write(
        pytorch, scheme(RNG, interop.attention_site(pytorch, num_heads=HEADS)), num_heads=HEADS
    )
    expected = interop.check(pytorch, images, num_heads=HEADS).position_to_content
    for gain in (0.5, 3):
        new = interop.initialize(HOSTS[host](gain), scheme, RNG, **options)
        found = interop.check(new, images, **options).position_to_content
        np.testing.assert_allclose(found, expected, rtol=0.02)


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


def test_norms_without_bias_are_rms_norms():
    """Equal to LayerNorms where no channel mean is left to subtract."""
    params = interop.initialize(timm_tensors(), scheme, RNG, num_heads=HEADS)
    centered = dict(params)
    for name in ("cls_token", "pos_embed"):
        centered[name] = params[name] - params[name].mean(-1, keepdims=True)
    for name in ("patch_embed.proj.weight", "blocks.0.attn.proj.weight"):
        centered[name] = params[name] - params[name].mean(0, keepdims=True)

    def without_bias(params):
        return {name: v for name, v in params.items() if "norm" not in name or "weight" in name}

    layer_norm, rms_norm = (
        interop.check(p, num_heads=HEADS) for p in (centered, without_bias(centered))
    )
    jax.tree.map(np.testing.assert_array_equal, layer_norm, rms_norm)
    other = interop.check(without_bias(params), num_heads=HEADS)
    assert (other.hit_rate != interop.check(params, num_heads=HEADS).hit_rate).any()


def test_check_of_models_without_positions():
    with pytest.raises(
        InputError, match=r"bias_table belongs to .* within windows.*itself .*`hit_rates`"
    ):
        interop.check(torchvision_swin())
    mixer = {
        "blocks.0.norm1.weight": np.ones(WIDTH, np.float32),
        "blocks.0.mlp_tokens.fc1.weight": np.ones((8, 16), np.float32),
        "blocks.0.mlp_tokens.fc2.weight": np.ones((16, 8), np.float32),
    }
    with pytest.raises(InputError, match=r"fc1\.weight belongs to a model without attention maps"):
        interop.check(mixer)


def test_check_refuses_a_network_before_the_patch_embedding():
    params = timm_tensors() | {"patch_embed.backbone.stem.weight": np.ones((3, 3), np.float32)}
    with pytest.raises(InputError, match=r"backbone\.stem\.weight .*before .*`hit_rates`"):
        interop.check(params, num_heads=HEADS)


def test_check_refuses_flattened_patches_of_another_kind():
    params = timm_tensors() | {"patch_embed.proj.weight": np.ones((WIDTH, 8), np.float32)}
    with pytest.raises(InputError, match=r"proj\.weight has shape \(16, 8\), not .* 3 channels"):
        interop.check(params, num_heads=HEADS)


def test_a_patch_embedding_of_zeros_stays_one():
    new = interop.initialize(timm_times(0), scheme, RNG, num_heads=HEADS)
    np.testing.assert_array_equal(new["patch_embed.proj.weight"], 0)
