"""Self-attention and the transformer block that ViT and Swin share."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from structinit_jax.attention_init import AttentionWeights
from structinit_jax.errors import require
from structinit_jax.models import layers
from structinit_jax.models.layers import BASE_INITS, RESIDUAL, BaseInit, LinearInit, Rng


class Attention(nnx.Module):
    """Multi-head self-attention, with the parameters of Flax's `MultiHeadAttention`.

    Unlike Flax's, it keeps no maps for the gradient and can add a bias to the logits.
    """

    def __init__(
        self, width: int, num_heads: int, *, init: LinearInit, dtype: DTypeLike, rngs: nnx.Rngs
    ):
        require("num_heads", num_heads, f"a divisor of width={width}", lambda n: width % n == 0)
        heads = (num_heads, width // num_heads)
        options = dict(dtype=dtype, rngs=rngs, **init(width))
        self.query = nnx.LinearGeneral(width, heads, **options)
        self.key = nnx.LinearGeneral(width, heads, **options)
        self.value = nnx.LinearGeneral(width, heads, **options)
        self.out = nnx.LinearGeneral(heads, width, axis=(-2, -1), **options)

    def __call__(
        self,
        x: Float[Array, "B N D"],
        *,
        bias: Float[Array, "#B h N N"] | None = None,
        angles: Float[np.ndarray, "N p"] | None = None,
        with_maps: bool = False,
    ) -> tuple[Float[Array, "B N D"], dict[str, Float[Array, "B h N N"]]]:
        """Returns the output and, if requested, 'attention_maps'.

        Queries and keys are rotated by `angles` of each pair of channels, if there are any, and
        `bias` is added to the logits.
        """
        query, key, value = project(x, (self.query, self.key, self.value))
        if angles is not None:
            query = rotate(query, angles)
            key = rotate(key, angles)
        y = dot_product_attention(query, key, value, bias)
        maps = {}
        if with_maps:  # They are computed again in float32: the call above returns none.
            wide = (jnp.swapaxes(x.astype(jnp.float32), 1, 2) for x in (query, key))
            maps = {"attention_maps": jax.nn.softmax(_logits(*wide, bias))}
        return self.out(y), maps


def project(
    x: Float[Array, "B N D"], layers: tuple[nnx.LinearGeneral, ...]
) -> tuple[Float[Array, "B N h d"], ...]:
    """Applies linear layers of one size to the same tokens.

    On CUDA devices in bfloat16 they are one product, with which the program of a step of ViT-B/16
    accesses 6 % fewer bytes. On TPUs it would access 8 % fewer (v5e) or 2 % more (v5p).
    """

    def one_by_one(x, layers):
        return tuple(layer(x) for layer in layers)

    if x.dtype != jnp.bfloat16:
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


def rotate(x: Float[Array, "B N h d"], angles: Float[np.ndarray, "N p"]) -> Float[Array, "B N h d"]:
    """Rotates the pairs of channels (2 k, 2 k + 1) of each head by angles (RoPE), in float32."""
    # Channel 2 k takes (cos, -sin) of itself and its neighbor, channel 2 k + 1 (cos, sin).
    signs = np.tile(np.float32([-1, 1]), angles.shape[1])
    cos = jnp.asarray(np.repeat(np.cos(angles), 2, axis=1))[None, :, None]
    sin = jnp.asarray(np.repeat(np.sin(angles), 2, axis=1) * signs)[None, :, None]
    wide = x.astype(jnp.float32)
    swapped = jnp.flip(wide.reshape(*x.shape[:-1], -1, 2), axis=-1).reshape(x.shape)
    return (wide * cos + swapped * sin).astype(x.dtype)


def dot_product_attention(
    query: Float[Array, "B N h d"],
    key: Float[Array, "B N h d"],
    value: Float[Array, "B N h d"],
    bias: Float[Array, "#B h N N"] | None = None,
) -> Float[Array, "B N h d"]:
    """Returns softmax(query·key / √d + bias)·value, with logits and softmax in float32.

    No array [B, h, N, N] is kept for the gradient. Programs for CUDA devices call cuDNN in
    bfloat16, unless there is a bias: with one, its gradients have been NaN, see PyTorch's issue
    196678 and JAX's issue 32242.
    """
    if bias is None and _cudnn_takes(query, key, value):
        return jax.lax.platform_dependent(
            query, key, value, cuda=_attend_with_cudnn, default=_attend_with_xla
        )
    return _attend_with_xla(query, key, value, bias)


def _cudnn_takes(query, key, value):
    if query.dtype != jnp.bfloat16 or _has_old_gpu():
        return False
    if jax.typeof(query).sharding.mesh.explicit_axes:  # JAX's gradient of the call drops them
        return False
    try:
        jax.eval_shape(_attend_with_cudnn, query, key, value)
    except RuntimeError:  # JAX finds no cuDNN, or cuDNN takes no heads of this size
        return False
    return True


def _has_old_gpu():
    """Returns whether this machine has a CUDA GPU older than Ampere; JAX does not check."""
    old = ("5.", "6.", "7.")  # AMD's GPUs have names such as 'gfx942'
    return any(getattr(d, "compute_capability", "").startswith(old) for d in jax.local_devices())


def _attend_with_cudnn(query, key, value):
    num_tokens = query.shape[1]
    # JAX takes the gradient for even numbers of tokens only.
    padding = ((0, 0), (0, num_tokens % 2), (0, 0), (0, 0))
    query, key, value = (
        checkpoint_name(jnp.pad(x, padding), RESIDUAL) for x in (query, key, value)
    )
    # Without lengths, even where nothing is padded, cuDNN's gradients can be NaN unless tokens fill
    # its tiles (issues 160 and 1072 of NVIDIA/cudnn-frontend). They are constant, but depend on the
    # queries to be batched and sharded with them, without which JAX's vmap fails.
    lengths = jnp.where(query[:, 0, 0, 0] > 0, np.int32(num_tokens), np.int32(num_tokens))
    y = jax.nn.dot_product_attention(
        query,
        key,
        value,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        implementation="cudnn",
    )
    return y[:, :num_tokens]


@jax.custom_vjp
def _attend_with_xla(query, key, value, bias=None):
    """Recomputes the maps for the gradient, as FlashAttention does (Dao et al. 2022).

    `jax.jvp` works on gradients only. JAX's own derivative of the same product makes a step of
    ViT-T/2 with 256 tokens 13 % slower on CPUs.
    """
    return _attend_forward(query, key, value, bias)[0]


def _attend_forward(query, key, value, bias):
    # Heads come first, since the products over tokens are slow on CPUs in any other layout.
    query, key, value = (
        checkpoint_name(jnp.swapaxes(x, 1, 2), RESIDUAL) for x in (query, key, value)
    )
    logits = _logits(query, key, bias)
    largest = logits.max(axis=-1, keepdims=True)
    exponentials = jnp.exp(logits - largest)
    total = exponentials.sum(axis=-1, keepdims=True)
    # The sum divides the product rather than the maps, d columns instead of M.
    y = jnp.einsum(
        "bhnm,bhmd->bhnd",
        exponentials.astype(value.dtype),
        value,
        preferred_element_type=jnp.float32,
    )
    y = checkpoint_name((y / total).astype(value.dtype), RESIDUAL)
    normalizer = checkpoint_name(largest + jnp.log(total), RESIDUAL)
    return jnp.swapaxes(y, 1, 2), (query, key, value, bias, y, normalizer)


def _logits(query, key, bias):
    """Returns float32 logits [B, h, N, M] of queries [B, h, N, d] and keys [B, h, M, d]."""
    logits = jnp.einsum("bhnd,bhmd->bhnm", query, key, preferred_element_type=jnp.float32)
    logits = logits * query.shape[-1] ** -0.5
    return logits if bias is None else logits + bias


def _attend_backward(residuals, gradient):
    query, key, value, bias, y, normalizer = residuals
    gradient = jnp.swapaxes(gradient, 1, 2)
    maps = jnp.exp(_logits(query, key, bias) - normalizer)
    value_gradient = jnp.einsum("bhnm,bhnd->bhmd", maps.astype(value.dtype), gradient)
    map_gradient = jnp.einsum(
        "bhnd,bhmd->bhnm", gradient, value, preferred_element_type=jnp.float32
    )
    # The mean of a row of map_gradient, weighted by the map, is a product over d instead of M.
    mean = jnp.einsum("bhnd,bhnd->bhn", gradient, y, preferred_element_type=jnp.float32)
    logit_gradient = maps * (map_gradient - mean[..., None])
    bias_gradient = None
    if bias is not None:
        shared = logit_gradient.sum(axis=0, keepdims=True) if len(bias) == 1 else logit_gradient
        bias_gradient = shared.astype(bias.dtype)
    scaled = (logit_gradient * query.shape[-1] ** -0.5).astype(query.dtype)
    query_gradient = jnp.einsum("bhnm,bhmd->bhnd", scaled, key)
    key_gradient = jnp.einsum("bhnm,bhnd->bhmd", scaled, query)
    gradients = (query_gradient, key_gradient, value_gradient)
    return *(jnp.swapaxes(x, 1, 2) for x in gradients), bias_gradient


_attend_with_xla.defvjp(_attend_forward, _attend_backward)


class Block(layers.StackedBlock):
    """A pre-norm transformer block: x + attend(norm1(x)), then x + mlp(norm2(x)).

    `layer_scale` is the initial value of LayerScale (Touvron et al. 2021), trained factors [D] of
    what both branches add, and `position_bias_rows` the number of rows of a table
    `relative_position_bias` [rows, h], which subclasses add to the logits; 0 omits either.
    """

    scale1: nnx.Param | None = None
    scale2: nnx.Param | None = None

    def __init__(
        self,
        *,
        width: int,
        num_heads: int,
        mlp_ratio: float,
        base_init: BaseInit,
        dtype: DTypeLike,
        epsilon: float = 1e-6,
        layer_scale: float = 0.0,
        position_bias_rows: int = 0,
        rngs: nnx.Rngs,
    ):
        options = dict(dtype=dtype, rngs=rngs)
        init = BASE_INITS[base_init]
        self.norm1 = layers.layer_norm(width, epsilon=epsilon, **options)
        self.attention = Attention(width, num_heads, init=init, **options)
        if position_bias_rows:
            table = layers.truncated_normal(rngs.params(), (position_bias_rows, num_heads))
            self.relative_position_bias = nnx.Param(table)
        self.norm2 = layers.layer_norm(width, epsilon=epsilon, **options)
        self.mlp = layers.Mlp(width, int(mlp_ratio * width), init=init, **options)
        if layer_scale:
            self.scale1 = nnx.Param(jnp.full((width,), layer_scale, jnp.float32))
            self.scale2 = nnx.Param(jnp.full((width,), layer_scale, jnp.float32))

    def __call__(
        self,
        x: Float[Array, "B *grid D"],
        *,
        drop_path_rate: Float[Array, ""] | None,
        rng: Rng = None,
        **options,
    ) -> tuple[Float[Array, "B *grid D"], dict[str, Array]]:
        """Returns the output and the intermediates by name; `options` are those of `attend`."""
        attention_rng, mlp_rng = (None, None) if rng is None else jax.random.split(rng)
        attended, maps = self.attend(self.norm1(x), **options)
        attended = _scale_channels(attended, self.scale1)
        x = x + layers.drop_path(attended, drop_path_rate, attention_rng)
        x = checkpoint_name(x, RESIDUAL)
        hidden = _scale_channels(self.mlp(self.norm2(x)), self.scale2)
        x = x + layers.drop_path(hidden, drop_path_rate, mlp_rng)
        return x, dict(attention=attended, mlp=hidden, output=x, **maps)

    def attend(self, x, *, with_maps=False, angles=None):
        """Attends to all tokens [B, N, D], with rotary positions if there are angles [N, d / 2]."""
        return self.attention(x, angles=angles, with_maps=with_maps)

    def sizes(self) -> dict[str, Any]:
        """Returns the sizes of a stack of these blocks, named as in `AttentionSite`."""
        num_layers, width, num_heads, head_dim = self.attention.query.kernel.shape
        return dict(
            num_layers=num_layers,
            width=width,
            num_heads=num_heads,
            head_dim=head_dim,
            qk_scale=head_dim**-0.5,
        )

    def set_weights(self, weights: AttentionWeights) -> None:
        """Writes the weights that a scheme returns into a stack of these blocks."""
        for name in ("query", "key", "value", "out"):
            kernel = getattr(self.attention, name).kernel
            layers.set_weight(kernel, name, getattr(weights, name))
        if weights.bias is not None:
            layers.set_weight(self.relative_position_bias, "bias", weights.bias)


def _scale_channels(x, scale):
    return x if scale is None else x * scale[...].astype(x.dtype)[None, None]
