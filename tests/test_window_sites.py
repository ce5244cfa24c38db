import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close
from flax import nnx
from foreign_models import split, state_dict

from structinit_jax import interop
from structinit_jax.attention_init import AttentionWeights, WindowSite
from structinit_jax.errors import InputError
from structinit_jax.models import timm
from structinit_jax.models.swin import SwinTransformer

RNG = jax.random.key(0)
SWIN = dict(image_size=16, channels=1, num_classes=3, patch_size=2)
SWIN |= dict(width=16, depths=(2, 2), num_heads=(2, 4), window_size=4)


def scheme(rng, site):
    """Random weights that depend on the key and need no compilation."""
    draw = np.random.default_rng(np.asarray(jax.random.key_data(rng))).standard_normal

    def normal(*shape):
        return jnp.asarray(draw((site.num_layers, *shape), np.float32))

    heads, (rows, cols) = (site.num_heads, site.head_dim), site.grid
    query, key, value = (normal(site.width, *heads) for _ in range(3))
    out, bias = normal(*heads, site.width), normal((2 * rows - 1) * (2 * cols - 1), heads[0])
    return AttentionWeights(query, key, value, out, bias=bias)


@functools.cache
def model():
    """A Swin whose scales are 1 and biases 0, as at the start; all other values are 0.1."""
    abstract = nnx.eval_shape(lambda: SwinTransformer(**SWIN, rngs=nnx.Rngs(0)))

    def fill(path, leaf):
        name = jax.tree_util.keystr(path)
        return jnp.full(leaf.shape, 1.0 if "scale" in name else 0.0 if "bias" in name else 0.1)

    nnx.update(abstract, jax.tree_util.tree_map_with_path(fill, nnx.state(abstract)))
    return abstract


def test_a_swin_gets_the_weights_of_our_trainer():
    ours = nnx.clone(model())
    ours.initialize_attention(scheme, RNG)
    expected, start = timm.to_timm(ours), timm.to_timm(model())
    found = interop.initialize(start, scheme, RNG)
    assert_close(found, expected, atol=1e-6)
    assert all(found[key].dtype == start[key].dtype for key in start)
    assert any(not np.array_equal(value, start[key]) for key, value in found.items())


SWIN_NAMES = {  # their names by timm's, and the names of query, key and value
    "files of transformers": (
        {"attn.relative": "attention.self.relative", "attn.proj": "attention.output.dense"},
        [f"attention.self.{field}" for field in ("query", "key", "value")],
    ),
    "torchvision": ({"layers.0.blocks": "features.1", "layers.1.blocks": "features.3"}, None),
}


@pytest.mark.parametrize("project", SWIN_NAMES)
def test_swin_of_other_projects(project):
    names, parts = SWIN_NAMES[project]
    start = timm.to_timm(model())

    def renamed(params):
        for old, new in names.items():
            params = {name.replace(old, new): array for name, array in params.items()}
        return split(params, "attn.qkv", parts) if parts else params

    found = interop.initialize(renamed(start), scheme, RNG)
    expected = renamed(interop.initialize(start, scheme, RNG))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_rows_of_the_class_token_stay():
    params = state_dict("timm_no_positions")
    name = "blocks.1.attn.relative_position_bias_table"
    assert params[name].shape == (27**2 + 3, 12)
    new = interop.initialize(params, scheme, RNG)
    site = WindowSite((14, 14), 768, 12, 64, 2, 64**-0.5)
    np.testing.assert_array_equal(new[name][:-3], scheme(RNG, site).bias[1])
    np.testing.assert_array_equal(new[name][-3:], params[name][-3:])


def test_windows_that_are_not_square_in_one_stage():
    """Images of 256×128 pixels in timm's Swin-T, whose last stage has fewer columns."""
    params = timm.to_timm(model())
    tables = [name for name in params if name.endswith("bias_table")]
    params |= dict.fromkeys(tables[2:], np.zeros((7 * 5, 4), np.float32))
    with pytest.raises(InputError, match=r"^grid=.* 35 rows of layers\.1\."):
        interop.initialize(params, scheme, RNG)
    sites, keys = [], set()

    def recording(rng, site):
        sites.append(site)
        keys.add(tuple(np.asarray(jax.random.key_data(rng))))
        return scheme(rng, site)

    with pytest.raises(InputError, match=r"^positions=.* must be left out"):
        interop.initialize(params, scheme, RNG, grid=(4, 3), positions=np.ones((49, 8)))
    new = interop.initialize(params, recording, RNG, grid=(4, 3))
    assert [site.grid for site in sites] == [(4, 4), (4, 3)]
    assert len(keys) == 2
    assert all(new[name].any() for name in tables)


def test_models_and_grids_that_do_not_fit_are_refused():
    params = timm.to_timm(model())
    for name, message in (
        ("attn.tau", "attn.tau"),
        ("attn_grid.qkv.weight", "grid attention of MaxViT"),
    ):
        more = {f"layers.0.blocks.0.{name}": np.ones((2, 2), np.float32)}
        with pytest.raises(InputError, match=message):
            interop.initialize(params | more, scheme, RNG)
    with pytest.raises(InputError, match=r"grid=\(4, 5\) must be one of the windows \[\(4, 4\)"):
        interop.initialize(params, scheme, RNG, grid=(4, 5))
