"""Vision Transformer (Dosovitskiy et al. 2021) with timm's conventions, in Flax NNX."""

from __future__ import annotations  # so that signatures show the names of checked types

from typing import Any, ClassVar, Literal

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from structinit_jax.attention_init import AttentionInit, AttentionSite, RotarySite
from structinit_jax.attention_init.positions import sincos_positions
from structinit_jax.attention_init.rotary import rotary_angles
from structinit_jax.attention_init.sites import AttentionSizes
from structinit_jax.errors import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt, checked
from structinit_jax.models import layers
from structinit_jax.models.layers import BASE_INITS, BaseInit, Rng
from structinit_jax.models.model import Dtype, ImageSize, Model, Remat, make_stack, run_stack
from structinit_jax.models.transformer import Block


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
    # The 2024 paper's models (section 5, tables 3, 5 and 7).
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

    >>> sizes = dict(image_size=32, patch_size=8, channels=3, num_classes=10, depth=2)
    >>> model = si.VisionTransformer(**sizes, attention_init=si.impulse(), rngs=nnx.Rngs(0))
    >>> logits, intermediates = model(jax.numpy.zeros((1, 32, 32, 3)))

    Args:
      depth: Number of blocks L.
      num_heads: Number of heads h, a divisor of the width.
      mlp_ratio: Ratio of the MLP's hidden width to D.
      positions: 'sincos' (fixed) and 'learned' positions are added to the tokens. 'rope' rotates
        queries and keys by axial rotary positions with temperature 100 (Heo et al. 2024).
      pool: Pooling of the tokens before the final norm, 'mean' or 'class_token'.
      layer_scale: Initial value of LayerScale (Touvron et al. 2021); 0 omits it.
    """

    VARIANTS: ClassVar = _variants()

    @checked
    def __init__(
        self,
        *,
        image_size: ImageSize = 224,
        channels: PositiveInt,
        num_classes: PositiveInt = 1000,
        patch_size: PositiveInt = 16,
        width: PositiveInt = 192,
        depth: PositiveInt = 12,
        num_heads: PositiveInt = 3,
        mlp_ratio: PositiveFloat = 4.0,
        positions: Literal["sincos", "learned", "rope"] = "sincos",
        pool: Literal["mean", "class_token"] = "mean",
        layer_scale: NonNegativeFloat = 0.0,
        drop_path: Fraction = 0.0,
        base_init: BaseInit = "timm",
        dtype: Dtype = "float32",
        remat: Remat = "none",
        attention_init: AttentionInit | None = None,
        rngs: nnx.Rngs,
    ):
        self.grid = layers.token_grid(image_size, patch_size)
        self.width = width
        self.depth = depth
        self.num_heads = num_heads
        self.position_kind = positions
        self.pool = pool
        # Number of tokens before the image tokens: the class token, if there is one.
        self.num_prefix = int(pool == "class_token")
        self.drop_path = drop_path
        self.base_init = base_init
        self.remat = remat

        options = dict(dtype=jnp.dtype(dtype), rngs=rngs)
        self.patch_embedding = layers.PatchEmbedding(patch_size, channels, width, **options)
        if pool == "class_token":
            std = 1e-6 if base_init == "timm" else 0.0
            init = nnx.initializers.normal(std, jnp.float32)
            self.class_token = nnx.Param(init(rngs.params(), (width,)))
        if positions == "learned":
            shape = (self.num_prefix + self.grid[0] * self.grid[1], width)
            self.positions = nnx.Param(layers.truncated_normal(rngs.params(), shape))
        else:
            self.positions = None
        self.blocks = make_stack(
            Block,
            depth,
            width=width,
            num_heads=num_heads,
            mlp_ratio=mlp_ratio,
            layer_scale=layer_scale,
            base_init=base_init,
            **options,
        )
        VisionTransformer.sites(self)  # Raises if the sizes do not allow these positions.
        self.norm = layers.layer_norm(width, **options)
        self.head = nnx.Linear(width, num_classes, **BASE_INITS[base_init](width), rngs=rngs)
        if attention_init is not None:
            self.initialize_attention(attention_init, rngs.params())

    def sites(self) -> dict[str, AttentionSizes]:
        """See `Model.sites`."""
        options = dict(grid=self.grid, base_init=self.base_init, **self.blocks.sizes())
        if self.position_kind == "rope":
            angles = rotary_angles(self.grid, options["head_dim"])
            return {"blocks": RotarySite(angles=angles, **options)}
        if self.position_kind == "sincos":
            positions = sincos_positions(self.grid, self.width)
            return {"blocks": AttentionSite(positions=positions, **options)}
        positions = self.positions[...][self.num_prefix :]
        site = AttentionSite(positions=positions, positions_trainable=True, **options)
        return {"blocks": site}

    def __call__(
        self, images: Float[Array, "B H W C"], *, rng: Rng = None, with_maps: bool = False
    ) -> tuple[Float[Array, "B classes"], dict[str, Any]]:
        """Returns logits and intermediates; see `Model.__call__`.

        The intermediates are 'patch_embedding' [B, N, D]; 'embedded' [B, T, D], with positions and,
        if there is one, the class token in front; 'blocks' with 'attention', 'mlp', 'output'
        [L, B, T, D] and 'attention_maps' [L, B, h, T, T]; 'pooled' [B, D], after the norm.
        """
        patches = self.patch_embedding(images, self.grid)
        patches = patches.reshape(images.shape[0], self.grid[0] * self.grid[1], self.width)
        embedded = self._add_class_token_and_positions(patches)
        rates = np.linspace(0, self.drop_path, self.depth, dtype=np.float32).tolist()
        angles = None
        if self.position_kind == "rope":
            angles = rotary_angles(self.grid, self.width // self.num_heads)[0, 0]
            angles = np.pad(angles, ((self.num_prefix, 0), (0, 0)))  # a class token is not rotated
        options = dict(with_maps=with_maps, angles=angles)
        x, blocks = run_stack(
            self.blocks, embedded, remat=self.remat, drop_path_rates=rates, rng=rng, **options
        )
        pooled = self.norm(x[:, 0] if self.pool == "class_token" else x.mean(axis=1))
        out = dict(patch_embedding=patches, embedded=embedded, blocks=blocks, pooled=pooled)
        return self.head(pooled.astype(jnp.float32)), out

    def _add_class_token_and_positions(self, patches):
        if self.pool == "class_token":
            token = self.class_token[...].astype(patches.dtype)
            token = jnp.zeros_like(patches[:, :1]) + token[None, None]  # sharded like the patches
            patches = jnp.concatenate([token, patches], axis=1)
        if self.position_kind == "rope":
            return patches
        if self.position_kind == "sincos":  # The class token has no position on the grid.
            positions = sincos_positions(self.grid, self.width)
            positions = jnp.pad(positions, ((self.num_prefix, 0), (0, 0)))
        else:
            positions = self.positions[...]
        return patches + jnp.asarray(positions, patches.dtype)[None]
