"""One tiny model of each family, its compiled gradient, and a family of the user's own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from structinit_jax.models import create_model, default_config
from structinit_jax.training.state import split_model

SIZES = {
    "vit": dict(width=16, depth=2, num_heads=2, patch_size=2),
    # Lists, as in a config read from JSON.
    "swin": dict(width=16, depths=[2, 1], num_heads=[2, 4], patch_size=1, window_size=4),
    "mixer": dict(width=16, depth=2, patch_size=2, token_mlp_ratio=2.0),
    "convmixer": dict(width=16, depth=2, patch_size=2, kernel_size=3),
}
MESH = Mesh(np.asarray(jax.devices()[:2]), ("data",))
EVERYWHERE = NamedSharding(MESH, PartitionSpec())
SPLIT = NamedSharding(MESH, PartitionSpec("data"))
IMAGES = jnp.asarray(np.random.default_rng(1).standard_normal((8, 8, 8, 1), np.float32))
BATCH = jax.device_put((IMAGES, jnp.arange(8) % 4), SPLIT)


@functools.cache
def make(family, **changes):
    options = default_config(family) | SIZES[family]
    options |= dict(image_size=8, num_classes=4, drop_path=0.5)
    model = create_model(options | changes, channels=1, rngs=nnx.Rngs(params=0))
    # Mixer's starts at zero, and no gradient would reach its blocks.
    model.head.kernel[...] = 0.1 * jax.random.normal(jax.random.key(2), model.head.kernel.shape)
    return model


@functools.cache
def train_fn(family, **changes):
    """(params, state, rng) -> (loss, (logits, intermediates, new state)), gradient."""
    graphdef, *_ = split_model(make(family, **changes))

    def loss_fn(params, state, rng, images, labels):
        model = nnx.merge(graphdef, params, state)
        logits, out = model(images, rng=rng)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), (logits, out, split_model(model)[2])

    compiled = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
    return lambda *args: compiled(*jax.device_put(args, EVERYWHERE), *BATCH)


def train(family, rng=0, **changes):
    start = split_model(make(family))[1:]
    return train_fn(family, **changes)(*start, jax.random.key(rng))
