"""Schemes in other projects' models with rotary positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close
from flax import nnx
from foreign_models import renamed, site_of, split, write
from tiny_models import make

from structinit_jax import interop
from structinit_jax.analysis.measures import measure_mean_maps
from structinit_jax.attention_init import AttentionWeights, default, impulse, rotary_angles
from structinit_jax.errors import InputError
from structinit_jax.models import timm

HEADS, WIDTH, DIM, DEPTH, GRID = 2, 16, 8, 2, (4, 4)
RNG = jax.random.key(0)
ANGLES = rotary_angles(GRID, DIM)[0, 0]
TABLE = np.concatenate([np.sin(ANGLES).repeat(2, -1), np.cos(ANGLES).repeat(2, -1)], axis=-1)
HALVES = (np.tile(np.cos(ANGLES), 2), np.tile(np.sin(ANGLES), 2))  # as Hugging Face orders them
scheme = impulse()


@pytest.fixture(scope="module")
def model():
    """A ViT shaped like timm's RoPE ViTs, with layer scales far from 0."""
    return make("vit", positions="rope", pool="class_token", layer_scale=0.5)


@pytest.fixture(scope="module")
def params(model):
    return timm.to_timm(model)


@pytest.fixture(scope="module")
def written(params):
    return interop.initialize(params, scheme, RNG, num_heads=HEADS, rotations=TABLE)


def test_the_model_gets_the_weights_that_it_would_get_as_ours(model, written):
    ours = nnx.clone(model)
    ours.initialize_attention(scheme, RNG)
    for name, expected in timm.to_timm(ours).items():
        # The solve amplifies the rounding errors of the angles in the table.
        tolerance = 0.1 * np.abs(expected).max() if "qkv" in name else 1e-5
        np.testing.assert_allclose(written[name], expected, atol=tolerance, err_msg=name)


def test_the_written_model_hits(model, written):
    ours = nnx.clone(model)
    timm.from_timm(ours, written)
    images = np.random.default_rng(1).standard_normal((3, 8, 8, 1), np.float32)
    run = jax.jit(lambda images: ours(images, with_maps=True)[1]["blocks"]["attention_maps"])

    def first_layer(images):
        maps = np.asarray(run(images))[0, ..., -16:, -16:].mean(axis=0)
        return measure_mean_maps(maps, GRID)["neighbor_mass"]

    np.testing.assert_allclose(first_layer(0 * images), 0.3, atol=0.01)  # the target mass
    assert first_layer(images).min() > 0.2  # less, because content takes some


def test_a_position_table_gets_the_vector_that_all_tokens_share(params, written):
    bias = "patch_embed.proj.bias"
    table = np.random.default_rng(0).standard_normal((1, 17, WIDTH), np.float32)
    with_table = params | {"pos_embed": table}
    del with_table[bias]  # Perception Encoder has none
    new = interop.initialize(with_table, scheme, RNG, num_heads=HEADS, rotations=TABLE)
    np.testing.assert_array_equal(new["pos_embed"][:, :1], table[:, :1])  # of the class token
    np.testing.assert_array_equal(new["pos_embed"][0, 1:], np.tile(written[bias], (16, 1)))
    del new["pos_embed"]
    assert_close(new, {name: written[name] for name in new}, rtol=0)


def test_tables_are_read_in_every_form(params):
    tables = np.stack([[TABLE, -TABLE], [TABLE, TABLE]])
    pair = tuple(np.stack([part] * HEADS) for part in HALVES)
    for rotations, lead, pairs in (
        (TABLE, (1, 1), "interleaved"),
        (jnp.asarray(tables), (DEPTH, HEADS), "interleaved"),
        (HALVES, (1, 1), "halves"),
        (pair, (1, HEADS), "halves"),
    ):
        found = site_of(params, num_heads=HEADS, rotations=rotations)
        assert (found.grid, found.pairs, found.angles.shape[:2]) == (GRID, pairs, lead)
        turns = np.exp(1j * found.angles[0, 0]) / np.exp(1j * ANGLES)
        np.testing.assert_allclose(turns, 1, atol=1e-5)


def test_the_angles_have_to_fit_the_grid(params):
    def site(angles, dtype=np.float32, **options):
        pair = (np.cos(angles), np.sin(angles))
        table = tuple(np.tile(part, 2).astype(dtype) for part in pair)
        return site_of(params, num_heads=HEADS, rotations=table, **options)

    wide = rotary_angles((2, 8), DIM)[0, 0]
    for dtype in (np.float32, np.float16, jnp.bfloat16):
        assert site(wide, dtype, grid=(2, 8)).grid == (2, 8)
    mixed = np.random.default_rng(0).normal(size=(DEPTH, HEADS, 2, DIM // 2))
    y, x = np.indices((8, 2)).reshape(2, -1, 1)
    turned = y * mixed[:, :, :1] + x * mixed[:, :, 1:] + 0.5
    assert site(turned, grid=(8, 2)).grid == (8, 2)
    uneven = ANGLES + np.random.default_rng(0).uniform(-0.1, 0.1, ANGLES.shape)
    for angles in (wide, turned, uneven, np.random.default_rng(0).permutation(ANGLES), ANGLES[:15]):
        with pytest.raises(InputError, match=r"^grid=.* row by row"):
            site(angles)


def test_huggingface_dinov3_is_found():
    names = dict(blocks="model.layer", attn="attention", attention__proj="attention.o_proj")
    names |= dict(cls_token="embeddings.cls_token")
    names |= dict(patch_embed__proj="embeddings.patch_embeddings")
    params = split(renamed(**names), "qkv", [f"{field}_proj" for field in "qkv"])
    del params["pos_embed"]
    angles = rotary_angles((14, 14), 64)[0, 0]
    halves = (np.tile(np.cos(angles), 2), np.tile(np.sin(angles), 2))
    given = dict(num_heads=3, rotations=halves)
    query = jnp.ones((DEPTH, 192, 3, 64))
    new = write(params, AttentionWeights(query, patch_bias=jnp.ones(192)), **given)
    changed = {name for name in params if not np.array_equal(new[name], params[name])}
    layer = ("attention.q_proj.weight", "attention.q_proj.bias")
    expected = {f"model.layer.{i}.{name}" for i in range(DEPTH) for name in layer}
    assert changed == expected | {"embeddings.patch_embeddings.bias"}


@pytest.mark.parametrize(
    "rotations",
    [TABLE[:, :8], (TABLE, TABLE), TABLE[0], np.stack([TABLE] * 3), "rope", [TABLE] * 3, []],
)
def test_tables_that_do_not_fit_are_refused(params, rotations):
    with pytest.raises(InputError, match=r"^rotations"):
        interop.initialize(params, default(), RNG, num_heads=HEADS, rotations=rotations)


def test_models_that_the_rotations_do_not_describe_are_refused(params):
    options = dict(num_heads=HEADS, rotations=TABLE)
    with pytest.raises(InputError, match=r"^positions=.* left out: with rotations"):
        interop.initialize(params, scheme, RNG, positions=np.eye(16), **options)
    no_bias = {k: v for k, v in params.items() if k != "patch_embed.proj.bias"}
    with pytest.raises(InputError, match=r"hold patch_embed\.proj\.weight, but .* bias"):
        interop.initialize(no_bias, scheme, RNG, **options)
    no_kernel = {k: v for k, v in no_bias.items() if k != "patch_embed.proj.weight"}
    with pytest.raises(InputError, match="no kernel, but this scheme needs one patch embedding"):
        interop.initialize(no_kernel, scheme, RNG, **options)
