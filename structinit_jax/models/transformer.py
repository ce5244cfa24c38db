"""The transformer block that ViT and Swin share, and its attention layer."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from structinit_jax.attention_init import AttentionWeights
from structinit_jax.errors import require
from structinit_jax.models import attention, layers
from structinit_jax.models.layers import BASE_INITS, BaseInit, LinearInit, Rng


class Attention(nnx.Module):
    """Multi-head self-attention, with the parameters of Flax's `MultiHeadAttention`.

    Unlike Flax's, it keeps no maps for the gradient and can add a bias to the logits.
    """

    def __init__(
        self, width: int, num_heads: int, *, init: LinearInit, dtype: DTypeLike, rngs: nnx.Rngs
    ):
        needs = f"a divisor of width={width}"
        require("num_heads", num_heads, needs, width % num_heads == 0)
        heads = (num_heads, width // num_heads)
        options = dict(dtype=dtype, rngs=rngs, dot_general=layers.dot_general, **init(width))
        self.query = nnx.LinearGeneral(width, heads, **options)
        self.key = nnx.LinearGeneral(width, heads, **options)
        self.value = nnx.LinearGeneral(width, heads, **options)
        self.out = nnx.LinearGeneral(heads, width, axis=(-2, -1), **options)

    def __call__(
        self,
        x: Float[Array, "B N D"],
        *,
        bias: Float[Array, "#B h N N"] | None = None,
        angles: Float[np.ndarray | Array, "N p"] | None = None,
        with_maps: bool = False,
    ) -> tuple[Float[Array, "B N D"], dict[str, Float[Array, "B h N N"]]]:
        """Returns the output and, if requested, 'attention_maps'.

        `angles` rotate each pair of channels of queries and keys; `bias` is added to the logits.
        """
        query, key, value = attention.project(x, (self.query, self.key, self.value))
        if angles is not None:
            query = attention.rotate(query, angles)
            key = attention.rotate(key, angles)
        y = attention.dot_product_attention(query, key, value, bias)
        maps = {}
        if with_maps:  # Recomputed, because the call above does not return them.
            maps = {"attention_maps": attention.attention_maps(query, key, bias)}
        return self.out(y), maps


class Block(layers.StackedBlock):
    """A pre-norm transformer block: x + attend(norm1(x)), then x + mlp(norm2(x)).

    `layer_scale` is the initial value of LayerScale (Touvron et al. 2021), trained factors [D] on
    the output of each branch. `position_bias_rows` is the number of rows of the table
    `relative_position_bias` [rows, h], which subclasses add to the logits. 0 omits either.
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
        """Returns the output and the intermediates by name; `options` are passed to `attend`."""
        attention_rng, mlp_rng = (None, None) if rng is None else jax.random.split(rng)
        attended, maps = self.attend(self.norm1(x), **options)
        attended = _scale_channels(attended, self.scale1)
        x = x + layers.drop_path(attended, drop_path_rate, attention_rng)
        x = layers.keep(x)
        hidden = _scale_channels(self.mlp(self.norm2(x)), self.scale2)
        x = x + layers.drop_path(hidden, drop_path_rate, mlp_rng)
        return x, dict(attention=attended, mlp=hidden, output=x, **maps)

    def attend(self, x, *, with_maps=False, angles=None):
        """Attends to all tokens [B, N, D], with rotary positions if given `angles` [N, d / 2]."""
        return self.attention(x, angles=angles, with_maps=with_maps)

    def sizes(self) -> dict[str, Any]:
        """Returns the sizes of a stack of these blocks, named as in `AttentionSite`."""
        num_layers, width, num_heads, head_dim = self.attention.query.kernel.shape
        heads = dict(num_heads=num_heads, head_dim=head_dim, qk_scale=head_dim**-0.5)
        return dict(num_layers=num_layers, width=width, **heads)

    def set_weights(self, weights: AttentionWeights) -> None:
        """Writes the weights that a scheme returns into a stack of these blocks."""
        for name in ("query", "key", "value", "out"):
            kernel = getattr(self.attention, name).kernel
            layers.set_weight(kernel, name, getattr(weights, name))
        if weights.bias is not None:
            layers.set_weight(self.relative_position_bias, "bias", weights.bias)


def _scale_channels(x, scale):
    return x if scale is None else x * scale[...].astype(x.dtype)[None, None]
