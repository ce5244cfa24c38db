"""Layers and blocks that the model families share, with timm's conventions.

That is, exact (erf) GELU and LayerNorm with epsilon 1e-6. `dtype` is the type of the computation;
parameters are float32. Their start values come from the `params` stream of `rngs`.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PRNGKeyArray

from structinit_jax.attention_init import AttentionWeights
from structinit_jax.attention_init.draw import draw_flat
from structinit_jax.errors import InputError

Rng = PRNGKeyArray | None


# Name for `jax.checkpoint` of what a training step keeps besides the results of products.
RESIDUAL = "residual"


@jax.custom_jvp
def gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Exact GELU, x Φ(x), computed in float32.

    `jax.nn.gelu` is written with erfc, which takes several times as long as erf on CPUs.
    """
    wide = x.astype(jnp.float32)
    return (wide * _normal_cdf(wide)).astype(x.dtype)


@gelu.defjvp
def _gelu_jvp(primals, tangents):
    (x,), (tangent,) = primals, tangents
    wide = x.astype(jnp.float32)
    density = jnp.exp(-0.5 * jnp.square(wide)) * (2 * math.pi) ** -0.5
    return gelu(x), (_normal_cdf(wide) + wide * density).astype(x.dtype) * tangent


def _normal_cdf(x):
    return 0.5 + 0.5 * jax.lax.erf(x * 0.5**0.5)


ACTIVATIONS = {"gelu": gelu, "relu": jax.nn.relu}


def truncated_normal(rng, shape, dtype=jnp.float32, out_sharding=None):
    """As timm's `trunc_normal_(std=0.02)`, which cuts at ±2 (not ±2 std): practically never."""
    draw = nnx.initializers.truncated_normal(0.02, lower=-100.0, upper=100.0)
    return draw_flat(functools.partial(draw, dtype=dtype), rng, shape)


def uniform(bound: float) -> nnx.Initializer:
    """Returns PyTorch's default initializer of weights and biases; `bound` is fan_in^-1/2."""

    def init(rng, shape, dtype=jnp.float32, out_sharding=None):
        draw = functools.partial(jax.random.uniform, dtype=dtype, minval=-bound, maxval=bound)
        return draw_flat(draw, rng, shape)

    return init


def pytorch_init(fan_in: int) -> dict[str, nnx.Initializer]:
    """Returns PyTorch's default `kernel_init` and `bias_init` of a Linear or Conv2d layer."""
    init = uniform(fan_in**-0.5)
    return dict(kernel_init=init, bias_init=init)


def timm_init(fan_in: int) -> dict[str, nnx.Initializer]:
    """Returns the `kernel_init` and `bias_init` of linear layers in timm's ViT and Swin."""
    del fan_in
    return dict(kernel_init=truncated_normal, bias_init=nnx.initializers.zeros)


LinearInit = Callable[[int], dict[str, nnx.Initializer]]
BASE_INITS: dict[str, LinearInit] = {"timm": timm_init, "pytorch": pytorch_init}


def dropout(x: Array, rate: float, rng: Rng) -> Array:
    """Zeroes elements with probability `rate` and rescales the others; identity without `rng`."""
    return x if rate == 0 else _drop(x, rate, rng, x.shape)


def drop_path(x: Float[Array, "B *rest"], rate: Float[Array, ""] | None, rng: Rng) -> Array:
    """Drops the residual branch of whole examples (stochastic depth, Huang et al. 2016).

    Identity without `rate` or `rng`.
    """
    return x if rate is None else _drop(x, rate, rng, (len(x),) + (1,) * (x.ndim - 1))


def _drop(x, rate, rng, mask_shape):
    if rng is None:
        return x
    keep = checkpoint_name(jax.random.bernoulli(rng, 1 - rate, mask_shape), RESIDUAL)
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)


def layer_norm(width: int, *, dtype, rngs: nnx.Rngs, epsilon: float = 1e-6) -> nnx.LayerNorm:
    """Returns a LayerNorm without Flax's fast variance, which loses precision in float32."""
    return nnx.LayerNorm(width, epsilon=epsilon, dtype=dtype, use_fast_variance=False, rngs=rngs)


class PatchEmbedding(nnx.Module):
    """Maps each p × p patch to a token, like a convolution of size and stride p.

    A matrix product rather than `nnx.Conv`: its gradient is deterministic on GPUs, whereas cuDNN's
    need not be. Start values are those of PyTorch's Conv2d, as in timm.
    """

    def __init__(self, patch_size: int, channels: int, width: int, *, dtype, rngs: nnx.Rngs):
        shape = (patch_size, patch_size, channels, width)
        init = uniform(math.prod(shape[:-1]) ** -0.5)
        self.kernel = nnx.Param(init(rngs.params(), shape))
        self.bias = nnx.Param(init(rngs.params(), (width,)))
        self.dtype = dtype

    def __call__(self, images: Float[Array, "B H W C"]) -> Float[Array, "B rows cols D"]:
        """Returns one token per patch."""
        p = self.kernel.shape[0]
        batch, height, width, channels = images.shape
        patches = images.reshape(batch, height // p, p, width // p, p, channels)
        kernel, bias = self.kernel[...].astype(self.dtype), self.bias[...].astype(self.dtype)
        tokens = jnp.einsum("brpcqi,pqid->brcd", patches.astype(self.dtype), kernel)
        return tokens + bias[None, None, None, :]


class Attention(nnx.Module):
    """Multi-head self-attention, with the parameters of Flax's `MultiHeadAttention`.

    Unlike Flax's, it runs fused kernels, adds a bias to the logits and returns the maps.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        dropout: float = 0.0,
        qk_norm: bool = False,
        implementation: str = "auto",
        init: LinearInit = timm_init,
        dtype,
        rngs: nnx.Rngs,
    ):
        heads = (num_heads, width // num_heads)
        options = dict(dtype=dtype, rngs=rngs, **init(width))
        self.query = nnx.LinearGeneral(width, heads, **options)
        self.key = nnx.LinearGeneral(width, heads, **options)
        self.value = nnx.LinearGeneral(width, heads, **options)
        self.out = nnx.LinearGeneral(heads, width, axis=(-2, -1), **options)
        self.dropout = dropout
        self.implementation = implementation
        self.query_norm = layer_norm(heads[1], dtype=dtype, rngs=rngs) if qk_norm else None
        self.key_norm = layer_norm(heads[1], dtype=dtype, rngs=rngs) if qk_norm else None

    def __call__(
        self,
        x: Float[Array, "B N D"],
        *,
        bias: Float[Array, "#B h N N"] | None = None,
        rng: Rng = None,
        with_maps: bool = False,
    ) -> tuple[Float[Array, "B N D"], dict[str, Float[Array, "B h N N"]]]:
        """Returns the output and, if requested, 'attention_maps'; adds `bias` to the logits."""
        query, key, value = self.query(x), self.key(x), self.value(x)
        if self.query_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if self.implementation == "cudnn":
            y = cudnn_attention(query, key, value, bias)
        else:
            y = dot_product_attention(query, key, value, bias)
        maps = {"attention_maps": _attention_maps(query, key, bias)} if with_maps else {}
        return dropout(self.out(y), self.dropout, rng), maps


def cudnn_attention(
    query: Float[Array, "B N h d"],
    key: Float[Array, "B N h d"],
    value: Float[Array, "B N h d"],
    bias: Float[Array, "#B h N N"] | None = None,
) -> Float[Array, "B N h d"]:
    """Computes `dot_product_attention` by cuDNN's fused kernel, in which the bias has their dtype.

    JAX takes gradients for even N only, and a class token often makes it odd, so without a bias a
    token is appended and masked.
    """
    tokens, lengths = query.shape[1], None
    if bias is not None:
        bias = bias.astype(query.dtype)
    elif tokens % 2:
        query, key, value = (
            jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (query, key, value)
        )
        lengths = jnp.full(len(query), tokens, jnp.int32)
    y = jax.nn.dot_product_attention(
        query,
        key,
        value,
        bias=bias,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        implementation="cudnn",
    )
    return y[:, :tokens]


def dot_product_attention(
    query: Float[Array, "B N h d"],
    key: Float[Array, "B M h d"],
    value: Float[Array, "B M h d"],
    bias: Float[Array, "#B h N M"] | None = None,
) -> Float[Array, "B N h d"]:
    """Returns softmax(query·key / √d + bias)·value, with logits and softmax in float32.

    As in FlashAttention (Dao et al. 2022), the gradient keeps no array [B, h, N, M]: it computes
    the maps again. `jax.nn.dot_product_attention` keeps several, and is half as fast on CPUs.
    """
    # Heads first, since the products over tokens are slow on CPUs in any other layout.
    query, key, value = (
        checkpoint_name(jnp.swapaxes(x, 1, 2), RESIDUAL) for x in (query, key, value)
    )
    return jnp.swapaxes(_attend(query, key, value, bias), 1, 2)


@jax.custom_vjp
def _attend(query, key, value, bias):
    return _attend_forward(query, key, value, bias)[0]


def _attend_forward(query, key, value, bias):
    logits = _logits(query, key, bias)
    largest = logits.max(axis=-1, keepdims=True)
    exponentials = jnp.exp(logits - largest)
    total = exponentials.sum(axis=-1, keepdims=True)
    # Divided by the sum after the product, which has d columns instead of M.
    y = jnp.einsum(
        "bhnm,bhmd->bhnd",
        exponentials.astype(value.dtype),
        value,
        preferred_element_type=jnp.float32,
    )
    y = checkpoint_name((y / total).astype(value.dtype), RESIDUAL)
    normalizer = checkpoint_name(largest + jnp.log(total), RESIDUAL)
    return y, (query, key, value, bias, y, normalizer)


def _logits(query, key, bias):
    logits = jnp.einsum("bhnd,bhmd->bhnm", query, key, preferred_element_type=jnp.float32)
    logits = logits * query.shape[-1] ** -0.5
    return logits if bias is None else logits + bias


def _attend_backward(residuals, gradient):
    query, key, value, bias, y, normalizer = residuals
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
    return query_gradient, key_gradient, value_gradient, bias_gradient


_attend.defvjp(_attend_forward, _attend_backward)


def _attention_maps(query, key, bias):
    """Computes the maps separately, in float32, since fused kernels do not return them."""
    query = query.astype(jnp.float32) * query.shape[-1] ** -0.5
    logits = jnp.einsum("bnhd,bmhd->bhnm", query, key.astype(jnp.float32))
    return jax.nn.softmax(logits if bias is None else logits + bias, axis=-1)


class Mlp(nnx.Module):
    """Two linear layers, each followed by dropout, with a GELU between them."""

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        dropout: float = 0.0,
        init: LinearInit = timm_init,
        dtype,
        rngs: nnx.Rngs,
    ):
        options = dict(dtype=dtype, rngs=rngs)
        self.fc1 = nnx.Linear(width, hidden, **init(width), **options)
        self.fc2 = nnx.Linear(hidden, width, **init(hidden), **options)
        self.dropout = dropout

    def __call__(self, x: Float[Array, "*B D"], *, rng: Rng = None) -> Float[Array, "*B D"]:
        """Applies both layers."""
        rngs = (None, None) if rng is None else jax.random.split(rng)
        hidden = checkpoint_name(self.fc1(x), RESIDUAL)
        hidden = dropout(gelu(hidden), self.dropout, rngs[0])
        return dropout(self.fc2(hidden), self.dropout, rngs[1])


class PreNormBlock(nnx.Module):
    """A residual block: x + mix(norm1(x)), then x + mlp(norm2(x)).

    A subclass creates `norm1`, `norm2` and `mlp` and defines `mix`.
    """

    mix_name: ClassVar[str]  # of the output of `mix` among the block's intermediates
    scale1: nnx.Param | None = None  # trained factor [D] on the output of `mix`
    scale2: nnx.Param | None = None  # and of `mlp` (LayerScale, Touvron et al. 2021)

    def mix(
        self, x: Float[Array, "B *grid D"], *, rng: Rng, with_maps: bool
    ) -> tuple[Float[Array, "B *grid D"], dict[str, Array]]:
        """Mixes tokens; returns the result and further intermediates such as maps."""
        raise NotImplementedError

    def __call__(
        self,
        x: Float[Array, "B *grid D"],
        *,
        drop_path_rate: Float[Array, ""] | None,
        rng: Rng = None,
        with_maps: bool = False,
        **mix_options,
    ) -> tuple[Float[Array, "B *grid D"], dict[str, Array]]:
        """Returns the block's output and its intermediates by name."""
        rngs = (None,) * 4 if rng is None else jax.random.split(rng, 4)
        mixed, maps = self.mix(self.norm1(x), rng=rngs[0], with_maps=with_maps, **mix_options)
        mixed = _scale_channels(mixed, self.scale1)
        x = checkpoint_name(x + drop_path(mixed, drop_path_rate, rngs[1]), RESIDUAL)
        hidden = _scale_channels(self.mlp(self.norm2(x), rng=rngs[2]), self.scale2)
        x = x + drop_path(hidden, drop_path_rate, rngs[3])
        return x, {self.mix_name: mixed, "mlp": hidden, "output": x} | maps


def _scale_channels(x, scale):
    if scale is None:
        return x
    return x * scale[...].astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))


class Block(PreNormBlock):
    """A pre-norm transformer block.

    For most arguments see `VisionTransformer.default_config`. `position_bias_rows` is the number of
    rows of a table `relative_position_bias` [rows, h], for subclasses whose `mix` adds it to the
    logits; 0 omits it.
    """

    mix_name = "attention"

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        mlp_ratio: float = 4.0,
        dropout: float = 0.0,
        layer_scale: float = 0.0,
        qk_norm: bool = False,
        attention_implementation: str = "auto",
        position_bias_rows: int = 0,
        epsilon: float = 1e-6,
        base_init: str = "timm",
        dtype,
        rngs: nnx.Rngs,
    ):
        options, init = dict(dtype=dtype, rngs=rngs), BASE_INITS[base_init]
        self.norm1 = layer_norm(width, epsilon=epsilon, **options)
        self.attention = Attention(
            width,
            num_heads,
            dropout=dropout,
            qk_norm=qk_norm,
            implementation=attention_implementation,
            init=init,
            **options,
        )
        if position_bias_rows:
            table = truncated_normal(rngs.params(), (position_bias_rows, num_heads))
            self.relative_position_bias = nnx.Param(table)
        self.norm2 = layer_norm(width, epsilon=epsilon, **options)
        self.mlp = Mlp(width, int(width * mlp_ratio), dropout=dropout, init=init, **options)
        self.layer_scale = layer_scale
        if layer_scale:
            self.scale1 = nnx.Param(jnp.full((width,), layer_scale))
            self.scale2 = nnx.Param(jnp.full((width,), layer_scale))

    def mix(self, x, *, rng, with_maps):
        """Attends to all tokens [B, N, D]."""
        return self.attention(x, rng=rng, with_maps=with_maps)

    def sizes(self) -> dict[str, Any]:
        """Returns the sizes of a stack of these blocks, named as in `AttentionSite`."""
        names = ("num_layers", "width", "num_heads", "head_dim")
        sizes = dict(zip(names, self.attention.query.kernel.shape, strict=True))
        return sizes | dict(qk_scale=sizes["head_dim"] ** -0.5)

    def set_weights(self, weights: AttentionWeights) -> None:
        """Replaces the weights of a stack of these blocks by those that a scheme sets."""
        if self.attention.query_norm is not None and weights.filter_index is not None:
            raise InputError(
                "config.model.qk_norm=True would rescale the queries and keys that this scheme "
                "solves for: set it to False, or config.attention_init.name='mimetic' or 'default'"
            )
        for name in ("query", "key", "value", "out"):
            kernel = getattr(weights, name)
            if kernel is not None:
                getattr(self.attention, name).kernel[...] = kernel
        if weights.mlp_scale is not None:
            self.mlp.fc2.kernel[...] = weights.mlp_scale * self.mlp.fc2.kernel[...]
        if weights.bias is not None:
            self.relative_position_bias[...] = weights.bias
