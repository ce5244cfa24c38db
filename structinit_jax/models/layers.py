"""The parts that models share, with timm's conventions: exact GELU, LayerNorm epsilon 1e-6.

Modules hold parameters only and no random state: randomness comes in as a PRNG key, and a key of
None means evaluation. So a module is a plain pytree, and a stack of equal layers is one module
whose parameters have a leading layer axis.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray

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
        implementation: str | None = None,
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
        self.implementation = implementation

    def __call__(
        self, x: Float[Array, "B N D"], *, key: Key = None, with_maps: bool = False
    ) -> tuple[Float[Array, "B N D"], Float[Array, "B h N N"] | None]:
        """Returns the output and, on request, the attention maps."""
        query, key_, value = self.query(x), self.key(x), self.value(x)
        y = jax.nn.dot_product_attention(query, key_, value, implementation=self.implementation)
        return dropout(self.out(y), self.dropout, key), (
            _attention_maps(query, key_) if with_maps else None
        )


def _attention_maps(query, key):
    """The maps again, in float32: fused implementations do not give them away."""
    query = query.astype(jnp.float32) * query.shape[-1] ** -0.5
    logits = jnp.einsum("bnhd,bmhd->bhnm", query, key.astype(jnp.float32))
    return jax.nn.softmax(logits, axis=-1)


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
      attention_implementation: None lets JAX choose; 'xla' or 'cudnn'.
      dtype: type of the computation; parameters stay float32.
    """

    width: int
    num_heads: int
    mlp_ratio: float
    dropout: float
    attention_implementation: str | None
    dtype: jnp.dtype


class Block(nnx.Module):
    """A pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: BlockConfig, *, rngs: nnx.Rngs):
        options = dict(dtype=config.dtype, rngs=rngs)
        self.norm1 = layer_norm(config.width, **options)
        self.attention = Attention(
            config.width,
            config.num_heads,
            dropout=config.dropout,
            implementation=config.attention_implementation,
            **options,
        )
        self.norm2 = layer_norm(config.width, **options)
        hidden = int(config.width * config.mlp_ratio)
        self.mlp = Mlp(config.width, hidden, dropout=config.dropout, **options)

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
        x = x + drop_path(attended, drop_path_rate, keys[1])
        mixed = self.mlp(self.norm2(x), key=keys[2])
        x = x + drop_path(mixed, drop_path_rate, keys[3])
        out = {"attention": attended, "mlp": mixed, "output": x}
        return x, out | ({"attention_maps": maps} if with_maps else {})


def stack_layers(make_layer, num_layers: int, rngs: nnx.Rngs):
    """One module whose parameters carry a leading layer axis, each layer drawn by its own key."""
    keys = jax.random.split(rngs.params(), num_layers)
    return jax.vmap(lambda key: make_layer(rngs=nnx.Rngs(key)))(keys)
