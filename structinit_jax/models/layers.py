"""The parts that models share, with timm's conventions: exact GELU, LayerNorm epsilon 1e-6.

Modules hold parameters only and no random state: randomness comes in as a PRNG key, and a key of
None means evaluation. So a module is a plain pytree, and a stack of equal layers is one module
whose parameters have a leading layer axis.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray

from structinit_jax.errors import InputError

Key = PRNGKeyArray | None


def truncated_normal(std: float = 0.02):
    """The `trunc_normal_` of timm: a normal cut at ±2 in absolute terms, so in effect never."""

    def init(key, shape, dtype=jnp.float32, out_sharding=None):
        return std * jax.random.truncated_normal(key, -2 / std, 2 / std, shape, dtype)

    return init


def dropout(x: Array, rate: float | Array, key: Key) -> Array:
    """Zeroes single elements at the given rate and scales the rest up; identity without a key."""
    if key is None or (isinstance(rate, float) and rate == 0):
        return x
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)


def drop_path(x: Float[Array, "B *rest"], rate: Array, key: Key) -> Float[Array, "B *rest"]:
    """Drops the whole residual branch of single examples (stochastic depth, Huang et al. 2016)."""
    if key is None:
        return x
    keep = jax.random.bernoulli(key, 1 - rate, (len(x),) + (1,) * (x.ndim - 1))
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)


class PatchEmbedding(nnx.Module):
    """Cuts images into p × p patches and maps each to a token.

    Equal to a convolution of size and stride p; start values are those of PyTorch's Conv2d, which
    timm leaves in place.
    """

    def __init__(self, patch_size: int, channels: int, width: int, *, dtype, rngs: nnx.Rngs):
        shape = (patch_size, patch_size, channels, width)
        bound = (patch_size * patch_size * channels) ** -0.5
        uniform = jax.random.uniform
        self.kernel = nnx.Param(uniform(rngs.params(), shape, minval=-bound, maxval=bound))
        self.bias = nnx.Param(uniform(rngs.params(), (width,), minval=-bound, maxval=bound))
        self.dtype = dtype

    def __call__(self, images: Float[Array, "B H W C"]) -> Float[Array, "B rows cols D"]:
        """Returns one token for each patch, on its grid."""
        p = self.kernel.shape[0]
        batch, height, width, channels = images.shape
        patches = images.reshape(batch, height // p, p, width // p, p, channels)
        kernel, bias = self.kernel[...].astype(self.dtype), self.bias[...].astype(self.dtype)
        tokens = jnp.einsum("brpcqi,pqid->brcd", patches.astype(self.dtype), kernel)
        return tokens + bias[None, None, None, :]


def layer_norm(width: int, *, dtype, rngs: nnx.Rngs, epsilon: float = 1e-6) -> nnx.LayerNorm:
    """LayerNorm whose variance does not cancel (Flax's fast variance does, in float32)."""
    return nnx.LayerNorm(width, epsilon=epsilon, dtype=dtype, use_fast_variance=False, rngs=rngs)


class Attention(nnx.Module):
    """Multi-head self-attention; kernels are laid out as in Flax's `MultiHeadAttention`."""

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        dropout: float = 0.0,
        qk_norm: bool = False,
        implementation: str = "auto",
        dtype,
        rngs: nnx.Rngs,
    ):
        heads = (num_heads, width // num_heads)
        options = dict(dtype=dtype, kernel_init=truncated_normal(), rngs=rngs)
        self.query = nnx.LinearGeneral(width, heads, **options)
        self.key = nnx.LinearGeneral(width, heads, **options)
        self.value = nnx.LinearGeneral(width, heads, **options)
        self.out = nnx.LinearGeneral(heads, width, axis=(-2, -1), **options)
        self.dropout = dropout
        self.implementation = None if implementation == "auto" else implementation
        self.query_norm = layer_norm(heads[1], dtype=dtype, rngs=rngs) if qk_norm else None
        self.key_norm = layer_norm(heads[1], dtype=dtype, rngs=rngs) if qk_norm else None

    def __call__(
        self,
        x: Float[Array, "B N D"],
        *,
        bias: Float[Array, "#B h N N"] | None = None,
        key: Key = None,
        with_maps: bool = False,
    ) -> tuple[Float[Array, "B N D"], Float[Array, "B h N N"] | None]:
        """Returns the output and, on request, the attention maps; a bias is added to the logits."""
        query, key_, value = self.query(x), self.key(x), self.value(x)
        if self.query_norm is not None:
            query, key_ = self.query_norm(query), self.key_norm(key_)
        if bias is not None and self.implementation == "cudnn":
            bias = bias.astype(query.dtype)  # cuDNN takes no other; elsewhere logits are float32
        y = jax.nn.dot_product_attention(
            query, key_, value, bias=bias, implementation=self.implementation
        )
        return dropout(self.out(y), self.dropout, key), (
            _attention_maps(query, key_, bias) if with_maps else None
        )


def _attention_maps(query, key, bias):
    """The maps again, in float32: fused implementations do not give them away."""
    query = query.astype(jnp.float32) * query.shape[-1] ** -0.5
    logits = jnp.einsum("bnhd,bmhd->bhnm", query, key.astype(jnp.float32))
    return jax.nn.softmax(logits if bias is None else logits + bias, axis=-1)


class Mlp(nnx.Module):
    """Two linear layers with an exact (erf) GELU between them.

    Start values are truncated normal with zero biases, unless given as functions of (key, shape).
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        dropout: float = 0.0,
        kernel_init: nnx.Initializer | None = None,
        bias_init: nnx.Initializer = nnx.initializers.zeros,
        dtype,
        rngs: nnx.Rngs,
    ):
        kernel_init = kernel_init or truncated_normal()
        options = dict(dtype=dtype, kernel_init=kernel_init, bias_init=bias_init, rngs=rngs)
        self.fc1 = nnx.Linear(width, hidden, **options)
        self.fc2 = nnx.Linear(hidden, width, **options)
        self.dropout = dropout

    def __call__(self, x: Float[Array, "*B D"], *, key: Key = None) -> Float[Array, "*B D"]:
        """Mixes channels; dropout follows both layers."""
        keys = (None, None) if key is None else jax.random.split(key)
        hidden = dropout(jax.nn.gelu(self.fc1(x), approximate=False), self.dropout, keys[0])
        return dropout(self.fc2(hidden), self.dropout, keys[1])


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """What the blocks of a stack have in common.

    Attributes:
      width: D.
      num_heads: h.
      mlp_ratio: hidden width of the channel MLP over D.
      dropout: rate behind the attention projection and both MLP layers.
      attention_implementation: 'auto' lets JAX choose; 'xla' or 'cudnn'.
      dtype: type of the computation; parameters stay float32.
      layer_scale: start of a trained factor for each channel of both branches; 0 for none.
      qk_norm: whether queries and keys of each head go through a LayerNorm.
    """

    width: int
    num_heads: int
    mlp_ratio: float
    dropout: float
    attention_implementation: str
    dtype: jnp.dtype
    layer_scale: float = 0.0
    qk_norm: bool = False


class Block(nnx.Module):
    """A pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: BlockConfig, *, rngs: nnx.Rngs):
        options = dict(dtype=config.dtype, rngs=rngs)
        self.norm1 = layer_norm(config.width, **options)
        self.attention = Attention(
            config.width,
            config.num_heads,
            dropout=config.dropout,
            qk_norm=config.qk_norm,
            implementation=config.attention_implementation,
            **options,
        )
        self.norm2 = layer_norm(config.width, **options)
        hidden = int(config.width * config.mlp_ratio)
        self.mlp = Mlp(config.width, hidden, dropout=config.dropout, **options)
        if config.layer_scale:
            self.scale1 = nnx.Param(jnp.full((config.width,), config.layer_scale))
            self.scale2 = nnx.Param(jnp.full((config.width,), config.layer_scale))
        self.layer_scale = config.layer_scale

    def __call__(
        self,
        x: Float[Array, "B N D"],
        *,
        drop_path_rate: Float[Array, ""],
        key: Key = None,
        with_maps: bool = False,
    ) -> tuple[Float[Array, "B N D"], dict[str, Array]]:
        """Returns the block's output and its intermediates by name."""
        keys = (None,) * 4 if key is None else jax.random.split(key, 4)
        attended, maps = self.attention(self.norm1(x), key=keys[0], with_maps=with_maps)
        if self.layer_scale:
            attended = attended * self.scale1[...].astype(attended.dtype)[None, None, :]
        x = x + drop_path(attended, drop_path_rate, keys[1])
        mixed = self.mlp(self.norm2(x), key=keys[2])
        if self.layer_scale:
            mixed = mixed * self.scale2[...].astype(mixed.dtype)[None, None, :]
        x = x + drop_path(mixed, drop_path_rate, keys[3])
        out = {"attention": attended, "mlp": mixed, "output": x}
        return x, out | ({"attention_maps": maps} if with_maps else {})


def stack_layers(make_layer, num_layers: int, rngs: nnx.Rngs):
    """One module whose parameters carry a leading layer axis, each layer drawn by its own key."""
    keys = jax.random.split(rngs.params(), num_layers)
    return jax.vmap(lambda key: make_layer(rngs=nnx.Rngs(key)))(keys)


REMAT_POLICIES = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


def run_layers(body: Callable, x: Array, stacked: Any, *, unroll: int, remat: str):
    """Runs `(x, layer) -> (x, outputs)` over the leading axis of a stack of layers.

    Args:
      body: one layer.
      x: what the first layer gets.
      stacked: pytree with a leading layer axis.
      unroll: layers to a step of the loop; 0 unrolls it whole, for more compile time.
      remat: what of a layer is kept for the gradient: 'none' keeps everything, 'dots' the outputs
        of its linear layers, 'full' its input only. The rest is computed again: less memory, more
        time.

    Returns:
      x behind the last layer, and the outputs stacked.
    """
    if REMAT_POLICIES[remat] is not None:
        body = jax.checkpoint(body, policy=REMAT_POLICIES[remat], prevent_cse=False)
    return jax.lax.scan(body, x, stacked, unroll=unroll or True)


ACTIVATIONS = {"gelu": functools.partial(jax.nn.gelu, approximate=False), "relu": jax.nn.relu}
CHOICES = {
    "activation": tuple(ACTIVATIONS),
    "spatial_filters": ("trained", "fixed"),
    "positions": ("sincos", "learned"),
    "pool": ("mean", "class_token"),
    "dtype": ("float32", "bfloat16"),
    "attention_implementation": ("auto", "xla", "cudnn"),
    "remat": tuple(REMAT_POLICIES),
}


def check_choices(**fields: str) -> None:
    """Raises `InputError` unless each field of `config.model` is one of its choices."""
    for field, value in fields.items():
        if value not in CHOICES[field]:
            raise InputError(f"model.{field}={value!r}: choose one of {', '.join(CHOICES[field])}")


def check_heads(width: int, num_heads: int) -> None:
    """Raises `InputError` unless the heads can share the channels evenly."""
    if width % num_heads:
        raise InputError(
            f"model.width={width} is not divisible by model.num_heads={num_heads}: "
            "each head takes an equal share of the channels"
        )


def image_sides(image_size: int | Sequence[int]) -> tuple[int, int]:
    """(height, width) of images, of which a single number is both."""
    return (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)


def token_grid(image_size: int | Sequence[int], patch_size: int) -> tuple[int, int]:
    """(rows, cols) of the patches.

    Raises:
      InputError: if the patches do not fill the image.
    """
    height, width = image_sides(image_size)
    if height % patch_size or width % patch_size:
        raise InputError(
            f"data.image_size={image_size} is not divisible by model.patch_size={patch_size}: "
            "choose sizes of which one divides the other"
        )
    return height // patch_size, width // patch_size
