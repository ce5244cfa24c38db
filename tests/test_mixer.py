import jax
import jax.numpy as jnp
import numpy as np
import references
from flax import nnx

from structinit_jax.models.mixer import MlpMixer
from structinit_jax.models.timm import from_timm

SIZES = dict(image_size=(8, 12), patch_size=2, channels=3, num_classes=5, width=16, depth=2)
REFERENCE = references.load("mixer")
STATE = references.part(REFERENCE, "state")


def test_every_block_and_the_logits_agree_with_timm():
    model = nnx.eval_shape(lambda: MlpMixer(**SIZES, rngs=nnx.Rngs(0)))
    from_timm(model, STATE)
    logits, out = jax.jit(model)(jnp.asarray(REFERENCE["images"]))
    np.testing.assert_allclose(out["blocks"]["output"], REFERENCE["blocks"], atol=1e-4)
    np.testing.assert_allclose(logits, REFERENCE["logits"], atol=1e-4)
