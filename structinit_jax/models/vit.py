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
      image_size: side of the input in pixels, or (height, width); multiples of the patch size.
      patch_size: side of a patch in pixels.
      channels: input channels.
      num_classes: logits.
      width: D, divisible by `num_heads`.
      depth: L, the number of blocks.
      num_heads: h.
      mlp_ratio: hidden width of the MLP over D.
      positions: 'sincos' (fixed) or 'learned'.
      pool: 'mean' over the image tokens, or 'class_token'; the final norm comes behind it.
      num_registers: further tokens without a place on the grid (Darcet et al. 2024).
      drop_path: rate of the last block; it rises linearly from 0 at the first.
      dropout: rate behind positions, projections and MLP layers.
      layer_scale: start of a trained factor for each channel of each branch (Touvron et al. 2021);
        0 for none.
      qk_norm: whether each head's queries and keys go through a LayerNorm (Dehghani et al. 2023).
        No scheme that solves attention maps fits such a model.
      dtype: type of the computation ('float32' or 'bfloat16'); parameters are float32.
      attention_implementation: 'auto' lets JAX choose; 'xla' or 'cudnn'.
      unroll: blocks to a step of the loop over the stack; 0 unrolls it, for more compile time.
      remat: what a block keeps for the gradient: 'none' keeps everything, 'dots', 'full'
        (see `layers.run_layers`).
      attention_init: scheme for the attention weights; None keeps `attention_init.default`.
      rngs: its `params` stream draws the start values.
    """

    def __init__(
        self,
        *,
        image_size: int | tuple[int, int],
        patch_size: int,
        channels: int,
        num_classes: int,
        width: int,
        depth: int,
        num_heads: int,
        mlp_ratio: float = 4.0,
        positions: str = "sincos",
        pool: str = "mean",
        num_registers: int = 0,
        drop_path: float = 0.0,
        dropout: float = 0.0,
        layer_scale: float = 0.0,
        qk_norm: bool = False,
        dtype: str = "float32",
        attention_implementation: str = "auto",
        unroll: int = 1,
        remat: str = "none",
        attention_init: AttentionInit | None = None,
        rngs: nnx.Rngs,
    ):
        self.grid = layers.token_grid(image_size, patch_size)
        layers.check_heads(width, num_heads)
        layers.check_choices(
            positions=positions,
            pool=pool,
            dtype=dtype,
            attention_implementation=attention_implementation,
            remat=remat,
        )
        self.pool = pool
        self.num_registers = num_registers
        self.num_prefix = num_registers + (pool == "class_token")
        self.drop_path_rate = drop_path
        self.dropout_rate = dropout
        self.dtype = jnp.dtype(dtype)
        self.unroll = unroll
        self.remat = remat

        options = dict(dtype=self.dtype, rngs=rngs)
        self.patch_embedding = layers.PatchEmbedding(patch_size, channels, width, **options)
        if pool == "class_token":
            self.class_token = nnx.Param(1e-6 * jax.random.normal(rngs.params(), (width,)))
        if num_registers:
            shape = (num_registers, width)
            self.registers = nnx.Param(1e-6 * jax.random.normal(rngs.params(), shape))
        if positions == "learned":
            shape = (self.num_prefix + self.grid[0] * self.grid[1], width)
            self.positions = nnx.Param(layers.truncated_normal()(rngs.params(), shape))
        else:
            sincos_positions(self.grid, width)  # refuses a width that it cannot encode
            self.positions = None
        config = layers.BlockConfig(
            width=width,
            num_heads=num_heads,
            mlp_ratio=mlp_ratio,
            dropout=dropout,
            layer_scale=layer_scale,
            qk_norm=qk_norm,
            attention_implementation=attention_implementation,
            dtype=self.dtype,
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
        if attention.query_norm is not None and weights.filter_index is not None:
            raise InputError(
                "model.qk_norm=True does not fit this attention_init: its maps are solved for "
                "queries and keys that no norm rescales; set model.qk_norm=False, or "
                "attention_init.name='mimetic' or 'default'"
            )
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
          'embedded' [B, T, D] with positions (T = N and the class token and registers, which come
          first),
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
        if self.pool == "class_token":
            pooled = self.norm(x[:, 0])
        else:
            pooled = self.norm(x[:, self.num_prefix :].mean(axis=1))
        logits = self.head(pooled.astype(jnp.float32))
        return logits, {
            "patch_embedding": patches,
            "embedded": embedded,
            "blocks": blocks,
            "pooled": pooled,
        }

    def _add_positions(self, patches):
        batch, _, width = patches.shape
        prefix = [self.class_token[...][None]] if self.pool == "class_token" else []
        if self.num_registers:
            prefix.append(self.registers[...])
        tokens = patches
        if prefix:
            prefix = jnp.concatenate(prefix).astype(self.dtype)
            prefix = jnp.broadcast_to(prefix, (batch, *prefix.shape))
            tokens = jnp.concatenate([prefix, patches], axis=1)
        if self.positions is None:  # the prefix has no place on the grid
            positions = sincos_positions(self.grid, width)
            positions = jnp.pad(positions, ((self.num_prefix, 0), (0, 0)))
        else:
            positions = self.positions[...]
        return tokens + jnp.asarray(positions, self.dtype)[None]

    def _run_blocks(self, x, key, with_maps):
        depth = len(self.blocks.attention.query.kernel[...])
        rates = jnp.linspace(0, self.drop_path_rate, depth)
        keys = None if key is None else jax.random.split(key, depth)

        def body(x, layer):
            block, rate, key = layer
            return block(x, drop_path_rate=rate, key=key, with_maps=with_maps)

        return layers.run_layers(
            body, x, (self.blocks, rates, keys), unroll=self.unroll, remat=self.remat
        )


def resample_positions(
    positions: Float[Array, "T D"], old_grid: tuple[int, int], new_grid: tuple[int, int]
) -> Float[Array, "S D"]:
    """Learned positions for another grid, bicubic with antialiasing as timm does it.

    Args:
      positions: of class token and registers, which stay as they are, then of the old grid.
      old_grid: (rows, cols) of the tokens.
      new_grid: the same of the result.

    Raises:
      InputError: if there are fewer positions than the old grid has tokens.
    """
    num_prefix = len(positions) - old_grid[0] * old_grid[1]
    if num_prefix < 0:
        raise InputError(
            f"resample_positions: {len(positions)} positions are fewer than the {old_grid[0]}x"
            f"{old_grid[1]} tokens of old_grid"
        )
    positions = jnp.asarray(positions)
    prefix, grid = positions[:num_prefix], positions[num_prefix:]
    grid = grid.reshape(*old_grid, -1)
    grid = jax.image.resize(grid, (*new_grid, grid.shape[-1]), "cubic", antialias=True)
    return jnp.concatenate([prefix, grid.reshape(-1, grid.shape[-1])])


def _variants() -> dict[str, dict]:
    sizes = {
        "tiny": dict(width=192, depth=12, num_heads=3),
        "small": dict(width=384, depth=12, num_heads=6),
        "base": dict(width=768, depth=12, num_heads=12),
        "large": dict(width=1024, depth=24, num_heads=16),
    }
    inputs = [(2, 32), (4, 32), *((p, size) for p in (8, 14, 16, 32) for size in (224, 384))]
    timm = dict(positions="learned", pool="class_token")
    named = {
        f"vit_{size}_patch{patch}_{image}": options
        | dict(patch_size=patch, image_size=image)
        | timm
        for size, options in sizes.items()
        for patch, image in inputs
        if image % patch == 0
    }
    # The 2024 paper's (section 5.2, tables 3 and 5): fixed sin-cos positions, average pooling.
    small = dict(image_size=32, patch_size=2, positions="sincos", pool="mean")
    named |= {
        "vit_tiny_h8_patch2_32": dict(width=192, depth=12, num_heads=8) | small,
        "vit_small_h16_patch2_32": dict(width=384, depth=12, num_heads=16) | small,
    }
    named |= {
        f"vit_w{width}_h{heads}_patch2_32": dict(width=width, depth=8, num_heads=heads) | small
        for width in (64, 128, 256, 512)
        for heads in (4, 8, 16, 32)
    }
    return named


VARIANTS = _variants()
