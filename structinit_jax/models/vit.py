"""Vision Transformer (Dosovitskiy et al. 2021) with timm's conventions, in Flax NNX."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from structinit_jax.attention_init import (
    AttentionInit,
    AttentionSite,
    RotarySite,
    rotary_angles,
    sincos_positions,
)
from structinit_jax.errors import InputError, is_count, require
from structinit_jax.models import layers
from structinit_jax.models.attention import Block
from structinit_jax.models.fields import check_fields
from structinit_jax.models.layers import Rng
from structinit_jax.models.model import Model, make_stack, run_stack, token_grid


def _variants() -> dict[str, dict[str, Any]]:
    sizes = {
        "tiny": dict(width=192, depth=12, num_heads=3),
        "small": dict(width=384, depth=12, num_heads=6),
        "base": dict(width=768, depth=12, num_heads=12),
        "large": dict(width=1024, depth=24, num_heads=16),
    }
    inputs = [(2, 32), (4, 32), *((p, size) for p in (8, 14, 16, 32) for size in (224, 384))]
    variants = {
        f"vit_{name}_patch{patch}_{image}": size
        | dict(patch_size=patch, image_size=image, positions="learned", pool="class_token")
        for name, size in sizes.items()
        for patch, image in inputs
        if image % patch == 0
    }
    # The 2024 paper's models (section 5.2, tables 3 and 5).
    paper = dict(image_size=32, patch_size=2, positions="sincos", pool="mean")
    variants["vit_tiny_h8_patch2_32"] = dict(width=192, depth=12, num_heads=8) | paper
    variants["vit_small_h16_patch2_32"] = dict(width=384, depth=12, num_heads=16) | paper
    return variants | {
        f"vit_w{width}_h{heads}_patch2_32": dict(width=width, depth=8, num_heads=heads) | paper
        for width in (64, 128, 256, 512)
        for heads in (4, 8, 16, 32)
    }


class VisionTransformer(Model):
    """Patch embedding, positions, a stack of pre-norm blocks, pooling, norm and a linear head.

    For the arguments see `Model` and `default_config`.
    """

    VARIANTS: ClassVar = _variants()

    @staticmethod
    def default_config() -> dict[str, Any]:
        """See `Model.default_config`."""
        return dict(
            image_size=224,
            num_classes=1000,
            patch_size=16,  # side of a patch in pixels
            width=192,  # D; divisible by num_heads
            depth=12,  # L, the number of blocks
            num_heads=3,  # h
            mlp_ratio=4.0,  # hidden width of the MLP over D
            # Fixed encoding, or "learned", both added to the tokens, or "rope": axial rotary
            # positions of temperature 100 (Heo et al. 2024).
            positions="sincos",
            pool="mean",  # of the image tokens, or "class_token"; the final norm follows
            num_registers=0,  # additional tokens that are not on the grid (Darcet et al. 2024)
            drop_path=0.0,  # rate of the last block; it rises linearly from 0 in the first
            dropout=0.0,  # rate after positions, attention projections and MLP layers
            layer_scale=0.0,  # start of a trained factor per channel of each branch; 0 omits it
            qk_norm=False,  # LayerNorm on each head's queries and keys (Dehghani et al. 2023)
            # Start values: those of timm's ViT for all kinds of positions, or "pytorch": the
            # defaults of its layers.
            base_init="timm",
            dtype="float32",  # of the computation, or "bfloat16"; parameters are float32
            attention_implementation="auto",  # or "cudnn", a fused kernel
            unroll=1,  # blocks per step of the scan; 0 unrolls the stack, which compiles longer
            # What the training step recomputes to save memory: "none", "dots" or "full" (see
            # model.run_stack), or the first of them that fits the device.
            remat="auto",
        )

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
        base_init: str = "timm",
        dtype: str = "float32",
        attention_implementation: str = "auto",
        unroll: int = 1,
        remat: str = "auto",
        attention_init: AttentionInit | None = None,
        rngs: nnx.Rngs,
    ):
        check_fields(locals())
        require("config.model.num_heads", num_heads, "a single number for a ViT", is_count)
        self.grid = token_grid(image_size, patch_size)
        if width % num_heads:
            raise InputError(
                f"config.model.width={width} is not divisible by config.model.num_heads={num_heads}"
            )
        self.depth = depth
        self.rotary = positions == "rope"
        self.pool = pool
        self.num_registers = num_registers
        self.num_prefix = num_registers + (pool == "class_token")
        self.drop_path_rate = drop_path
        self.dropout_rate = dropout
        self.base_init = base_init
        self.dtype = jnp.dtype(dtype)
        self.unroll = unroll
        self.remat = remat

        options = dict(dtype=self.dtype, rngs=rngs)
        self.patch_embedding = layers.PatchEmbedding(patch_size, channels, width, **options)
        init = nnx.initializers.normal(1e-6 if base_init == "timm" else 0.0, jnp.float32)
        if pool == "class_token":
            self.class_token = nnx.Param(init(rngs.params(), (width,)))
        if num_registers:
            self.registers = nnx.Param(init(rngs.params(), (num_registers, width)))
        if positions == "learned":
            shape = (self.num_prefix + self.grid[0] * self.grid[1], width)
            self.positions = nnx.Param(layers.truncated_normal(rngs.params(), shape))
        else:  # computed in each call; here to raise if these sizes have none
            self.positions = None
            if self.rotary:
                rotary_angles(self.grid, width // num_heads)
            else:
                sincos_positions(self.grid, width)

        self.blocks = make_stack(
            Block,
            depth,
            width=width,
            num_heads=num_heads,
            mlp_ratio=mlp_ratio,
            dropout=dropout,
            layer_scale=layer_scale,
            qk_norm=qk_norm,
            base_init=base_init,
            attention_implementation=attention_implementation,
            **options,
        )
        self.norm = layers.layer_norm(width, **options)
        head_init = layers.BASE_INITS[base_init](width)
        self.head = nnx.Linear(width, num_classes, **head_init, rngs=rngs)
        if attention_init is not None:
            self.initialize_attention(attention_init, rngs.params())

    def sites(self) -> dict[str, AttentionSite]:
        """See `Model.sites`."""
        options = dict(grid=self.grid, base_init=self.base_init, **self.blocks.sizes())
        if self.rotary:
            angles = rotary_angles(self.grid, options["head_dim"])
            return {"blocks": RotarySite(angles=angles, **options)}
        if self.positions is None:
            positions = sincos_positions(self.grid, options["width"])
            return {"blocks": AttentionSite(positions=positions, **options)}
        positions = self.positions[...][self.num_prefix :]
        site = AttentionSite(positions=positions, positions_trainable=True, **options)
        return {"blocks": site}

    def __call__(
        self, images: Float[Array, "B H W C"], *, rng: Rng = None, with_maps: bool = False
    ) -> tuple[Float[Array, "B classes"], dict[str, Any]]:
        """Returns logits and intermediates; see `Model.__call__`.

        The intermediates are 'patch_embedding' [B, N, D]; 'embedded' [B, T, D] with positions, T
        counting the class token and registers, which come first; 'blocks' with 'attention', 'mlp',
        'output' [L, B, T, D] and 'attention_maps' [L, B, h, T, T]; 'pooled' [B, D] after the norm.
        """
        dropout_rng, blocks_rng = (None, None) if rng is None else jax.random.split(rng)
        patches = self.patch_embedding.embed(images, self.grid)
        embedded = self._add_prefix_and_positions(patches)
        x, blocks = run_stack(
            self.blocks,
            layers.dropout(embedded, self.dropout_rate, dropout_rng),
            drop_path_rates=np.linspace(0, self.drop_path_rate, self.depth, dtype=np.float32),
            rng=blocks_rng,
            unroll=self.unroll,
            remat=self.remat,
            with_maps=with_maps,
            angles=self._angles(),
        )
        if self.pool == "class_token":
            pooled = self.norm(x[:, 0])
        else:
            pooled = self.norm(x[:, self.num_prefix :].mean(axis=1))
        out = dict(patch_embedding=patches, embedded=embedded, blocks=blocks, pooled=pooled)
        return self.head(pooled.astype(jnp.float32)), out

    def _add_prefix_and_positions(self, patches):
        batch, _, width = patches.shape
        prefix = [self.class_token[...][None]] if self.pool == "class_token" else []
        if self.num_registers:
            prefix.append(self.registers[...])
        if prefix:
            prefix = jnp.concatenate(prefix).astype(self.dtype)
            prefix = jnp.broadcast_to(prefix, (batch, *prefix.shape))
            patches = jnp.concatenate([prefix, patches], axis=1)
        if self.rotary:
            return patches
        if self.positions is None:  # zero for the prefix, which is not on the grid
            positions = sincos_positions(self.grid, width)
            positions = jnp.pad(positions, ((self.num_prefix, 0), (0, 0)))
        else:
            positions = self.positions[...]
        return patches + jnp.asarray(positions, self.dtype)[None]

    def _angles(self):
        """Angles [T, d / 2] of the rotation of each token; None without rotary positions."""
        if not self.rotary:
            return None
        angles = rotary_angles(self.grid, self.blocks.attention.query.kernel.shape[-1])[0, 0]
        return np.pad(angles, ((self.num_prefix, 0), (0, 0)))  # class token and registers stay


def resample_positions(
    positions: Float[Array, "T D"], old_grid: tuple[int, int], new_grid: tuple[int, int]
) -> Float[Array, "S D"]:
    """Resamples learned positions to another grid, bicubic with antialiasing as in timm.

    `positions` begins with those of class token and registers, which are kept. Grids are
    (rows, cols). Raises `InputError` if there are fewer positions than tokens on the old grid.
    """
    num_prefix = len(positions) - old_grid[0] * old_grid[1]
    if num_prefix < 0:
        raise InputError(
            f"resample_positions: {len(positions)} positions are fewer than the "
            f"{old_grid[0]}x{old_grid[1]} tokens of old_grid"
        )
    width = positions.shape[-1]
    prefix, grid = positions[:num_prefix], positions[num_prefix:].reshape(*old_grid, width)
    grid = jax.image.resize(grid, (*new_grid, width), "cubic", antialias=True)
    return jnp.concatenate([prefix, grid.reshape(-1, width)])
