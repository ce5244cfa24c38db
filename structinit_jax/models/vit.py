"""Vision Transformer (Dosovitskiy et al. 2021) with timm's conventions, in Flax NNX."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from structinit_jax.attention_init import (
    AttentionInit,
    AttentionSite,
    AttentionWeights,
    SolveReport,
    sincos_positions,
)
from structinit_jax.errors import InputError
from structinit_jax.models import layers
from structinit_jax.models.layers import Key


class VisionTransformer(nnx.Module):
    """Patch embedding, positions, a stack of pre-norm blocks, pooling, norm and a linear head.

    The stack is one `Block` whose parameters have a leading layer axis; it runs under `lax.scan`,
    so that a deep model compiles as fast as a shallow one.

    Args:
      image_size: side of the square input in pixels, a multiple of the patch size.
      patch_size: side of a patch in pixels.
      channels: input channels.
      num_classes: logits.
      width: D, divisible by `num_heads`.
      depth: L, the number of blocks.
      num_heads: h.
      mlp_ratio: hidden width of the MLP over D.
      positions: 'sincos' (fixed) or 'learned'.
      pool: 'mean' over the tokens, or 'class_token'; the final norm comes behind it.
      drop_path: rate of the last block; it rises linearly from 0 at the first.
      dropout: rate behind positions, projections and MLP layers.
      dtype: type of the computation ('float32' or 'bfloat16'); parameters are float32.
      attention_implementation: None lets JAX choose; 'xla' or 'cudnn'.
      unroll: blocks to a scan step; `depth` unrolls the stack, for more compile time.
      attention_init: scheme for the attention weights; None keeps `attention_init.default`.
      rngs: its `params` stream draws the start values.
    """

    def __init__(
        self,
        *,
        image_size: int,
        patch_size: int,
        channels: int,
        num_classes: int,
        width: int,
        depth: int,
        num_heads: int,
        mlp_ratio: float = 4.0,
        positions: str = "sincos",
        pool: str = "mean",
        drop_path: float = 0.0,
        dropout: float = 0.0,
        dtype: str = "float32",
        attention_implementation: str | None = None,
        unroll: int = 1,
        attention_init: AttentionInit | None = None,
        rngs: nnx.Rngs,
    ):
        _check_sizes(image_size, patch_size, width, num_heads)
        layers.check_choice("positions", positions, ("sincos", "learned"))
        layers.check_choice("pool", pool, ("mean", "class_token"))
        layers.check_choice("dtype", dtype, ("float32", "bfloat16"))
        self.grid = (image_size // patch_size,) * 2
        self.pool = pool
        self.drop_path_rate = drop_path
        self.dropout_rate = dropout
        self.dtype = jnp.dtype(dtype)
        self.unroll = unroll

        options = dict(dtype=self.dtype, rngs=rngs)
        self.patch_embedding = layers.PatchEmbedding(patch_size, channels, width, **options)
        prefix = 1 if pool == "class_token" else 0
        if prefix:
            self.class_token = nnx.Param(1e-6 * jax.random.normal(rngs.params(), (width,)))
        if positions == "learned":
            shape = (prefix + self.grid[0] * self.grid[1], width)
            self.positions = nnx.Param(layers.truncated_normal()(rngs.params(), shape))
        else:
            sincos_positions(self.grid, width)  # refuses a width that it cannot encode
            self.positions = None
        config = layers.BlockConfig(
            width, num_heads, mlp_ratio, dropout, attention_implementation, self.dtype
        )
        self.blocks = layers.stack_layers(lambda rngs: layers.Block(config, rngs=rngs), depth, rngs)
        self.norm = layers.layer_norm(width, **options)
        # The head is float32 whatever the blocks are: logits are what the loss exponentiates.
        self.head = nnx.Linear(width, num_classes, kernel_init=layers.truncated_normal(), rngs=rngs)
        if attention_init is not None:
            self.initialize_attention(attention_init, rngs.params())

    @property
    def attention_site(self) -> AttentionSite:
        """What an attention scheme may know of this model."""
        depth, width, num_heads, head_dim = self.blocks.attention.query.kernel.shape
        if self.positions is None:
            positions = sincos_positions(self.grid, width)
        else:
            positions = self.positions[...][-self.grid[0] * self.grid[1] :]
        return AttentionSite(
            grid=self.grid,
            width=width,
            num_heads=num_heads,
            head_dim=head_dim,
            num_layers=depth,
            qk_scale=head_dim**-0.5,
            positions=positions,
            positions_trainable=self.positions is not None,
        )

    def initialize_attention(
        self, attention_init: AttentionInit, key: jax.Array
    ) -> SolveReport | None:
        """Puts a scheme's weights in place and returns what its solve reports."""
        weights: AttentionWeights = attention_init(key, self.attention_site)
        attention = self.blocks.attention
        for name in ("query", "key", "value", "out"):
            start = getattr(weights, name)
            if start is not None:
                getattr(attention, name).kernel[...] = start
        if weights.positions is not None:
            if self.positions is None:
                raise InputError(
                    "attention_init: the scheme sets the position encoding, which needs "
                    "model.positions='learned'; fixed 'sincos' positions cannot take it"
                )
            self.positions[...] = (
                self.positions[...].at[-len(weights.positions) :].set(weights.positions)
            )
        return weights.report

    def __call__(
        self, images: Float[Array, "B H W C"], *, key: Key = None, with_maps: bool = False
    ) -> tuple[Float[Array, "B classes"], dict]:
        """Computes logits.

        Args:
          images: normalized images.
          key: draws dropout and drop path in training; None in evaluation.
          with_maps: whether to return attention maps too (memory grows with N²).

        Returns:
          float32 logits [B, classes] and the intermediates by name: 'patch_embedding' [B, N, D],
          'embedded' [B, T, D] with positions (T = N, or N + 1 with the class token first),
          'blocks' (each with a leading layer axis L: 'attention', 'mlp', 'output' [L, B, T, D],
          'attention_maps' [L, B, h, T, T]), 'pooled' [B, D] behind the final norm.
        """
        keys = (None, None) if key is None else jax.random.split(key)
        patches = self.patch_embedding(images)
        batch, rows, cols, width = patches.shape
        patches = patches.reshape(batch, rows * cols, width)
        embedded = self._add_positions(patches)
        x = layers.dropout(embedded, self.dropout_rate, keys[0])
        x, blocks = self._run_blocks(x, keys[1], with_maps)
        pooled = self.norm(x[:, 0] if self.pool == "class_token" else x.mean(axis=1))
        logits = self.head(pooled.astype(jnp.float32))
        return logits, {
            "patch_embedding": patches,
            "embedded": embedded,
            "blocks": blocks,
            "pooled": pooled,
        }

    def _add_positions(self, patches):
        batch, _, width = patches.shape
        fixed = self.positions is None
        positions = sincos_positions(self.grid, width) if fixed else self.positions[...]
        tokens = patches
        if self.pool == "class_token":
            class_token = self.class_token[...].astype(self.dtype)
            class_token = jnp.broadcast_to(class_token, (batch, 1, width))
            tokens = jnp.concatenate([class_token, patches], axis=1)
            if fixed:  # the class token has no place on the grid
                positions = jnp.pad(positions, ((1, 0), (0, 0)))
        return tokens + jnp.asarray(positions, self.dtype)[None]

    def _run_blocks(self, x, key, with_maps):
        depth = len(self.blocks.attention.query.kernel[...])
        rates = jnp.linspace(0, self.drop_path_rate, depth)
        keys = None if key is None else jax.random.split(key, depth)

        def body(x, layer):
            block, rate, key = layer
            return block(x, drop_path_rate=rate, key=key, with_maps=with_maps)

        return jax.lax.scan(body, x, (self.blocks, rates, keys), unroll=self.unroll)


def _check_sizes(image_size, patch_size, width, num_heads):
    if image_size % patch_size:
        raise InputError(
            f"data.image_size={image_size} is not divisible by model.patch_size={patch_size}: "
            "choose sizes of which one divides the other"
        )
    if width % num_heads:
        raise InputError(
            f"model.width={width} is not divisible by model.num_heads={num_heads}: "
            "each head takes an equal share of the channels"
        )
