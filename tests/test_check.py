import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from structinit_jax import interop
from structinit_jax.attention_init import AttentionWeights
from structinit_jax.attention_init.kernels import convolution_maps, impulse_kernels
from structinit_jax.errors import InputError
from structinit_jax.interop.check import natural_noise
from structinit_jax.models.vit import VisionTransformer

HEADS, WIDTH, GRID = 2, 16, (4, 4)


@functools.cache
def model():
    """A ViT of timm's shapes, whose start values are large enough for maps that differ."""
    vit = nnx.eval_shape(
        lambda: VisionTransformer(
            image_size=8,
            patch_size=2,
            channels=3,
            num_classes=3,
            width=WIDTH,
            depth=2,
            num_heads=HEADS,
            positions="learned",
            pool="class_token",
            num_registers=2,
            layer_scale=0.5,
            rngs=nnx.Rngs(0),
        )
    )
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        name = jax.tree_util.keystr(path)
        if "norm" in name:
            return jnp.full(leaf.shape, float("scale" in name))
        return jnp.asarray(0.3 * rng.standard_normal(leaf.shape, np.float32))

    nnx.update(vit, jax.tree_util.tree_map_with_path(draw, nnx.state(vit)))
    return vit


def test_maps_are_those_of_the_model():
    vit = model()
    images = np.random.default_rng(1).standard_normal((3, 8, 8, 3), np.float32)
    out = jax.jit(lambda images: vit(images, with_maps=True)[1])(images)
    maps = np.asarray(out["blocks"]["attention_maps"])[..., -16:, -16:]
    expected = [interop.hit_rates(layer, GRID) for layer in maps]
    for params, num_heads in ((interop.to_timm(vit), HEADS), (nnx.state(vit, nnx.Param), None)):
        found = interop.check(params, images, num_heads=num_heads)
        assert found.modeled.startswith("standard pre-norm ViT")
        np.testing.assert_array_equal(found.offset, [hits.offset for hits in expected])
        np.testing.assert_array_equal(found.hit_rate, [hits.hit_rate for hits in expected])
        masses = [hits.target_mass for hits in expected]
        np.testing.assert_allclose(found.target_mass, masses, atol=1e-5)
        content = np.square(out["patch_embedding"]).mean()
        ratio = np.square(interop.read(params, num_heads=num_heads).positions).mean() / content
        np.testing.assert_allclose(found.position_to_content, ratio**0.5, rtol=1e-5)
    assert len({rate for hits in expected for rate in hits.hit_rate}) > 2


def test_less_content_makes_maps_more_regular():
    params = interop.to_timm(model())
    scaled = interop.write(params, AttentionWeights(patch_scale=0.01, mlp_scale=0), num_heads=HEADS)
    old, new = (interop.check(p, num_heads=HEADS) for p in (params, scaled))
    assert new.position_to_content > 3 * old.position_to_content
    assert (new.hit_rate[0] >= old.hit_rate[0]).all()


def test_flat_maps_hit_without_mass_on_the_target():
    maps = np.asarray(convolution_maps(impulse_kernels(3), (3, 5)))[None]
    hits = interop.hit_rates(maps + 1e-3, (3, 5))  # border rows without a target are uniform
    assert hits.offset.tolist() == [[y, x] for y in (-1, 0, 1) for x in (-1, 0, 1)]
    np.testing.assert_array_equal(hits.hit_rate, 1)
    np.testing.assert_allclose(hits.target_mass, 1.001, rtol=1e-6)
    flat = interop.hit_rates(0.1 * maps + 0.05, (3, 5))
    np.testing.assert_array_equal(flat.hit_rate, 1)
    np.testing.assert_allclose(flat.target_mass, 0.15, rtol=1e-6)


def test_heads_that_attend_to_one_token_are_no_convolutions():
    for token in (0, 7):
        maps = np.zeros((2, 1, 12, 12), np.float32)
        maps[..., token] = 1
        hits = interop.hit_rates(maps, (3, 4))
        assert hits.offset.tolist() == [[0, 0]]
        np.testing.assert_allclose(hits.hit_rate, 1 / 12)


@pytest.mark.parametrize("maps", [np.ones((1, 1, 13, 13)), np.full((1, 1, 12, 12), np.nan)])
def test_maps_that_have_no_hits_are_refused(maps):
    with pytest.raises(InputError, match=r"^maps"):
        interop.hit_rates(maps, (3, 4))


def test_noise_has_the_spectrum_of_natural_images():
    noise = natural_noise(4, 64, 48, 3)
    assert noise.shape == (4, 64, 48, 3)
    np.testing.assert_allclose(noise.std(), 1, rtol=1e-3)
    power = np.square(np.abs(np.fft.fft(noise, axis=1))).mean(axis=(0, 2, 3))
    assert power[2] / power[8] > 3  # 4 along one axis if the amplitudes are 1 / f in the plane
    assert np.corrcoef(noise[..., 0].ravel(), noise[..., 1].ravel())[0, 1] > 0.8


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("blocks.1.conv.weight", (3, 3, 16), r"others blocks\.1\.conv\.weight.*`torch_maps`"),
        ("blocks.1.mlp.w1.weight", (64, WIDTH), r"mlp_in .*w1"),
        ("blocks.0.attn.q_norm.weight", (8,), r"q_norm\.weight changes the attention maps"),
        ("rope.freqs", (2, 4), r"rope\.freqs is not part of"),
        ("patch_embed.backbone.stem.weight", (3, 3), r"backbone\.stem\.weight is not part of"),
        ("patch_embed.proj.weight", (WIDTH, 8), r"proj\.weight is not part of"),
        ("blocks.0.attn.relative_position_bias_table", (9, 2), "bias_table is not part of"),
    ],
)
def test_models_of_another_form_are_refused(name, shape, message):
    params = interop.to_timm(model())
    if "table" in name:
        params |= {name.replace("0", "1", 1): np.ones(shape, np.float32)}
    with pytest.raises(InputError, match=message):
        interop.check(params | {name: np.ones(shape, np.float32)}, num_heads=HEADS)


def test_images_of_another_size_are_refused():
    images = np.zeros((1, 9, 8, 3), np.float32)
    with pytest.raises(InputError, match=r"images has shape \(1, 9, 8, 3\).*4x4 tokens.*2x2 pix"):
        interop.check(interop.to_timm(model()), images, num_heads=HEADS)
