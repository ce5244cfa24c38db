"""Self-attention as functions: projection, rotary positions, and softmax(Q Kᵀ / √d + bias) V.

The implementation is chosen when a model is traced:

| type | device | bias | products for query, key and value | attention |
|---|---|---|---|---|
| float32 | any | any | three | `_attend_with_xla` |
| bfloat16 | CPU, TPU, other GPUs | any | three | `_attend_with_xla` |
| bfloat16 | CUDA | no | one | cuDNN from Ampere on, if it supports the head size |
| bfloat16 | CUDA | yes | one | `_attend_with_xla` |
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import export
from jaxtyping import Array, Float

from structinit_jax.models.layers import keep

# Returns float32 for bfloat16 operands too.
_wide_einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def project(
    x: Float[Array, "B N D"], layers: tuple[nnx.Module, ...]
) -> tuple[Float[Array, "B N h d"], ...]:
    """Applies linear layers of equal size to the same tokens.

    In bfloat16 on CUDA devices, the layers are fused into one product, so a ViT-B/16 training step
    accesses 6 % fewer bytes. On TPUs it would access 8 % fewer (v5e) or 2 % more (v5p). Layers that
    a user has put in place of ours, such as LoRA's, are called one by one.
    """

    def one_by_one(x, layers):
        return tuple(layer(x) for layer in layers)

    are_ours = all(type(layer) is nnx.LinearGeneral and layer.bias is not None for layer in layers)
    if x.dtype != jnp.bfloat16 or not are_ours:
        return one_by_one(x, layers)
    return jax.lax.platform_dependent(x, layers, cuda=_project_at_once, default=one_by_one)


def _project_at_once(x, layers):
    width, *heads = layers[0].kernel.shape
    kernel = jnp.stack([layer.kernel[...] for layer in layers], axis=1).astype(x.dtype)
    bias = jnp.stack([layer.bias[...] for layer in layers]).astype(x.dtype)
    # With the outputs on one axis, cuBLAS adds the bias.
    y = x @ kernel.reshape(width, -1) + bias.reshape(1, 1, -1)
    y = y.reshape(*y.shape[:2], len(layers), *heads)
    return tuple(y[:, :, i] for i in range(len(layers)))


def rotate(
    x: Float[Array, "B N h d"], angles: Float[np.ndarray | Array, "N p"]
) -> Float[Array, "B N h d"]:
    """Rotates channel pairs (2 k, 2 k + 1) of each head by the given angles (RoPE), in float32."""
    xp = np if isinstance(angles, np.ndarray) else jnp  # `nnx.tabulate` traces the angles
    # Channel 2 k weights itself and its neighbor by (cos, -sin), channel 2 k + 1 by (cos, sin).
    signs = np.tile(np.float32([-1, 1]), angles.shape[1])
    cos = jnp.asarray(xp.repeat(xp.cos(angles), 2, axis=1))[None, :, None]
    sin = jnp.asarray(xp.repeat(xp.sin(angles), 2, axis=1) * signs)[None, :, None]
    wide = x.astype(jnp.float32)
    swapped = jnp.flip(wide.reshape(*x.shape[:-1], -1, 2), axis=-1).reshape(x.shape)
    return (wide * cos + swapped * sin).astype(x.dtype)


def attention_maps(
    query: Float[Array, "B N h d"],
    key: Float[Array, "B N h d"],
    bias: Float[Array, "#B h N N"] | None = None,
) -> Float[Array, "B h N N"]:
    """Returns softmax(query·key / √d + bias) in float32."""
    query, key = (jnp.swapaxes(x, 1, 2) for x in (query, key))
    return jax.nn.softmax(_logits(query, key, bias))


def dot_product_attention(
    query: Float[Array, "B N h d"],
    key: Float[Array, "B N h d"],
    value: Float[Array, "B N h d"],
    bias: Float[Array, "#B h N N"] | None = None,
) -> Float[Array, "B N h d"]:
    """Returns softmax(query·key / √d + bias)·value, with logits and softmax in float32.

    No [B, h, N, N] array is kept for the gradient. On CUDA devices, bfloat16 inputs without a bias
    use cuDNN if `_cudnn_supports` them. With a bias, cuDNN's gradients have been NaN; see PyTorch's
    issue 196678 and JAX's issue 32242.
    """
    if bias is None and _cudnn_supports(query, key, value):
        return jax.lax.platform_dependent(
            query, key, value, cuda=_attend_with_cudnn, default=_attend_with_xla
        )
    return _attend_with_xla(query, key, value, bias)


def _cudnn_supports(query, key, value):
    if query.dtype != jnp.bfloat16 or _has_old_gpu():
        return False
    if jax.typeof(query).sharding.mesh.explicit_axes:  # the cuDNN call's gradient drops them
        return False
    try:
        jax.eval_shape(_attend_with_cudnn, query, key, value)
    except RuntimeError:  # JAX finds no cuDNN, or cuDNN does not support this head size
        return False
    return True


def _has_old_gpu():
    """Returns whether this machine has a CUDA GPU older than Ampere; JAX does not check."""
    old = ("5.", "6.", "7.")  # AMD's GPUs have names such as 'gfx942'
    return any(getattr(d, "compute_capability", "").startswith(old) for d in jax.local_devices())


def _attend_with_cudnn(query, key, value):
    num_tokens = query.shape[1]
    # JAX supports the gradient only for even numbers of tokens.
    padding = ((0, 0), (0, num_tokens % 2), (0, 0), (0, 0))
    query, key, value = (keep(jnp.pad(x, padding)) for x in (query, key, value))
    # Without lengths, even with no padding, cuDNN's gradients can be NaN unless tokens fill its
    # tiles (issues 160 and 1072 of NVIDIA/cudnn-frontend). The lengths are constant, but computed
    # from the queries so that they are batched and sharded alike; otherwise JAX's vmap fails.
    lengths = jnp.where(query[:, 0, 0, 0] > 0, np.int32(num_tokens), np.int32(num_tokens))
    options = dict(query_seq_lengths=lengths, key_value_seq_lengths=lengths)
    y = jax.nn.dot_product_attention(query, key, value, **options, implementation="cudnn")
    return y[:, :num_tokens]


@jax.custom_vjp
def _attend_with_xla(query, key, value, bias=None):
    """Recomputes the maps for the gradient, as FlashAttention does (Dao et al. 2022).

    `jax.jvp` can differentiate the gradient, but not the function itself. On CPUs, JAX's own
    attention and its gradient take 1.2 to 2.7 times as long with 197 or 256 tokens.
    """
    return _attend_forward(query, key, value, bias)[0]


def _attend_forward(query, key, value, bias):
    # Heads come first because products over tokens are slow on CPUs in any other layout.
    query, key, value = (keep(jnp.swapaxes(x, 1, 2)) for x in (query, key, value))
    y, normalizer = map(keep, _by_image(_attend, bias, query, key, value))
    return jnp.swapaxes(y, 1, 2), (query, key, value, bias, y, normalizer)


def _attend(query, key, value, bias):
    logits = _logits(query, key, bias)
    # The maximum cancels in the results, but its derivative can be NaN where two fusions round the
    # logits differently.
    largest = jax.lax.stop_gradient(logits).max(axis=-1, keepdims=True)
    exponentials = jnp.exp(logits - largest)
    total = exponentials.sum(axis=-1, keepdims=True)
    # Normalize the product rather than the maps: d columns instead of M.
    y = _wide_einsum("bhnm,bhmd->bhnd", exponentials.astype(value.dtype), value)
    return (y / total).astype(value.dtype), largest + jnp.log(total)


def _by_image(function, bias, *arrays):
    """Returns function(*arrays, bias), computed image by image on CPUs if the maps are large.

    The maps of one image fit in a CPU's cache; the maps of a whole batch do not.
    """

    def at_once(*arrays):
        return function(*arrays, bias)

    def in_turn(*arrays):
        # The batch is split equally over the devices; each turn takes one image from every part.
        num_parts = math.gcd(batch, jax.device_count())
        turns = [jnp.swapaxes(x.reshape(num_parts, -1, *x.shape[1:]), 0, 1) for x in arrays]
        results = jax.lax.map(lambda turn: at_once(*turn), turns)
        return jax.tree.map(lambda y: jnp.swapaxes(y, 0, 1).reshape(-1, *y.shape[2:]), results)

    batch, num_heads, num_tokens, _ = arrays[0].shape
    if bias is not None or num_heads * num_tokens**2 < 2**17 or export.is_symbolic_dim(batch):
        return at_once(*arrays)
    return jax.lax.platform_dependent(*arrays, cpu=in_turn, default=at_once)


def _logits(query, key, bias):
    """Returns float32 logits [B, h, N, M] of queries [B, h, N, d] and keys [B, h, M, d]."""
    logits = _wide_einsum("bhnd,bhmd->bhnm", query, key) * query.shape[-1] ** -0.5
    return logits if bias is None else logits + bias


def _attend_backward(residuals, gradient):
    query, key, value, bias, y, normalizer = residuals
    gradient = jnp.swapaxes(gradient, 1, 2)
    gradients = _by_image(_gradients, bias, query, key, value, y, normalizer, gradient)
    query_gradient, key_gradient, value_gradient, bias_gradient = gradients
    return (
        jnp.einsum("bhnd->bnhd", query_gradient),
        jnp.einsum("bhdm->bmhd", key_gradient),
        jnp.einsum("bhdm->bmhd", value_gradient),
        bias_gradient,
    )


def _gradients(query, key, value, y, normalizer, gradient, bias):
    maps = jnp.exp(_logits(query, key, bias) - normalizer)
    # In the usual order, bhnm,bhnd->bhmd, this product is up to four times as slow on CPUs.
    value_gradient = jnp.einsum("bhnd,bhnm->bhdm", gradient, maps.astype(value.dtype))
    map_gradient = _wide_einsum("bhnd,bhmd->bhnm", gradient, value)
    # The map-weighted mean of each map_gradient row is computed as a product over d instead of M.
    mean = _wide_einsum("bhnd,bhnd->bhn", gradient, y)
    logit_gradient = maps * (map_gradient - mean[..., None])
    bias_gradient = None
    if bias is not None:
        # JAX sums over what was broadcast, in `jax.shard_map` over the devices too.
        (bias_gradient,) = jax.vjp(lambda bias: maps + bias, bias)[1](logit_gradient)
    scaled = (logit_gradient * query.shape[-1] ** -0.5).astype(query.dtype)
    query_gradient = jnp.einsum("bhnm,bhmd->bhnd", scaled, key)
    key_gradient = jnp.einsum("bhnd,bhnm->bhdm", query, scaled)
    return query_gradient, key_gradient, value_gradient, bias_gradient


_attend_with_xla.defvjp(_attend_forward, _attend_backward)
