"""MLP-Mixer against timm with the same weights, its maps, and its start values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from flax import nnx

from structinit_jax.interop import from_timm
from structinit_jax.models.mixer import MlpMixer

SIZES = dict(image_size=(8, 12), patch_size=2, channels=3, num_classes=5, width=16, depth=2)
REFERENCE = references.load("mixer")
STATE = references.part(REFERENCE, "state")


@jax.jit
def run(model):
    return model(jnp.asarray(REFERENCE["images"]), with_maps=True)


@pytest.fixture(scope="module")
def loaded():
    """A model with the weights of the recorded one."""
    model = jax.jit(lambda: MlpMixer(**SIZES, rngs=nnx.Rngs(0)))()
    from_timm(model, STATE)
    return model


def test_every_block_and_the_logits_agree_with_timm(loaded):
    logits, out = run(loaded)
    np.testing.assert_allclose(out["blocks"]["output"], REFERENCE["blocks"], atol=1e-4)
    np.testing.assert_allclose(logits, REFERENCE["logits"], atol=1e-4)


def test_token_maps_are_the_mean_jacobian_over_channels(loaded):
    _, out = run(loaded)
    block = jax.tree.map(lambda leaf: leaf[0], loaded.blocks)
    normed = block.norm1(out["patch_embedding"][:1])[0]
    jacobians = jax.jit(jax.vmap(jax.jacobian(block.token_mlp)))(normed.T)
    maps = out["blocks"]["token_maps"]
    np.testing.assert_allclose(maps[0, 0], jacobians.mean(axis=0), atol=1e-5)
