"""Swin Transformer (Liu et al. 2021, arXiv:2103.14030) with timm's conventions, in Flax NNX."""

from __future__ import annotations  # so that signatures show the names of checked types

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from structinit_jax.attention_init import AttentionInit, WindowSite
from structinit_jax.errors import Fraction, PositiveFloat, PositiveInt, checked, require
from structinit_jax.models import layers
from structinit_jax.models.layers import BASE_INITS, BaseInit, Rng
from structinit_jax.models.model import Dtype, ImageSize, Model, Remat, make_stack, run_stack
from structinit_jax.models.transformer import Block

Sides = tuple[int, int]
EPSILON = 1e-5  # timm's Swin, unlike its ViT, uses this epsilon in every LayerNorm.
UNSHIFTED = (0, 0)
MASKED = -100.0  # As in timm, added to the logits between tokens that a shift made neighbors.

_TINY = dict(width=96, depths=(2, 2, 6, 2), num_heads=(3, 6, 12, 24), image_size=224, window_size=7)
_SMALL = _TINY | dict(depths=(2, 2, 18, 2))
_BASE = _SMALL | dict(width=128, num_heads=(4, 8, 16, 32))


class SwinTransformer(Model):
    """Patch embedding, stages of windowed attention separated by patch merging, pooling and head.

    As in timm, `image_size` can be any size: grids are zero-padded to whole windows, and to even
    sides before merging; partial patches are dropped. Meshes with explicit axes are not supported.

    >>> sizes = dict(image_size=32, width=16, depths=(2, 1), num_heads=(2, 4), window_size=4)
    >>> options = dict(channels=3, num_classes=10, rngs=nnx.Rngs(0))
    >>> model = si.SwinTransformer(**sizes, attention_init=si.impulse(), **options)

    Args:
      width: Number of channels D of the first stage. It doubles in each later stage.
      depths: Number of blocks in each stage.
      num_heads: Number of heads h in each stage.
      mlp_ratio: Ratio of the MLP's hidden width to D.
      window_size: Side of a window in tokens. A smaller grid forms a single unshifted window.
    """

    VARIANTS: ClassVar = {
        "swin_tiny_patch4_window7_224": _TINY,
        "swin_small_patch4_window7_224": _SMALL,
        "swin_base_patch4_window7_224": _BASE,
        "swin_base_patch4_window12_384": _BASE | dict(image_size=384, window_size=12),
        "swin_large_patch4_window7_224": _BASE | dict(width=192, num_heads=(6, 12, 24, 48)),
    }

    @checked
    def __init__(
        self,
        *,
        image_size: ImageSize = 224,
        channels: PositiveInt,
        num_classes: PositiveInt = 1000,
        patch_size: PositiveInt = 4,
        width: PositiveInt = 96,
        depths: Sequence[PositiveInt] = (2, 2, 6, 2),
        num_heads: Sequence[PositiveInt] = (3, 6, 12, 24),
        mlp_ratio: PositiveFloat = 4.0,
        window_size: PositiveInt = 7,
        drop_path: Fraction = 0.0,
        base_init: BaseInit = "timm",
        dtype: Dtype = "float32",
        remat: Remat = "none",
        attention_init: AttentionInit | None = None,
        rngs: nnx.Rngs,
    ):
        needs = f"one number for each of one or more stages, like depths={depths}"
        require("num_heads", num_heads, needs, 0 < len(num_heads) == len(depths))
        self.patch_size = patch_size
        self.grid = tuple(side // patch_size for side in layers.image_sides(image_size))
        needs = f"at least patch_size={patch_size}"
        require("image_size", image_size, needs, min(self.grid) > 0)
        self.depths = tuple(depths)  # a list in JSON configs
        self.drop_path = drop_path
        self.base_init = base_init
        self.remat = remat

        options = dict(dtype=jnp.dtype(dtype), rngs=rngs)
        self.patch_embedding = layers.PatchEmbedding(patch_size, channels, width, **options)
        self.patch_norm = layers.layer_norm(width, epsilon=EPSILON, **options)
        shared = dict(window_size=window_size, mlp_ratio=mlp_ratio, base_init=base_init, **options)
        grid = self.grid
        for i, (depth, heads) in enumerate(zip(depths, num_heads, strict=True)):
            if i:
                grid = tuple(-(-side // 2) for side in grid)
                width = 2 * width
            sizes = dict(grid=grid, depth=depth, width=width, num_heads=heads)
            setattr(self, f"stage{i + 1}", SwinStage(merge=i > 0, **sizes, **shared))
        self.norm = layers.layer_norm(width, epsilon=EPSILON, **options)
        self.head = nnx.Linear(width, num_classes, **BASE_INITS[base_init](width), rngs=rngs)
        if attention_init is not None:
            self.initialize_attention(attention_init, rngs.params())

    @property
    def stages(self) -> tuple[SwinStage, ...]:
        """The stages, first to last."""
        return tuple(getattr(self, f"stage{i + 1}") for i in range(len(self.depths)))

    def sites(self) -> dict[str, WindowSite]:
        """See `Model.sites`."""
        return {
            f"stage{i + 1}/blocks": WindowSite(
                grid=stage.window, base_init=self.base_init, **stage.blocks.sizes()
            )
            for i, stage in enumerate(self.stages)
        }

    def __call__(
        self, images: Float[Array, "B H W C"], *, rng: Rng = None, with_maps: bool = False
    ) -> tuple[Float[Array, "B classes"], dict[str, Any]]:
        """Returns logits and intermediates; see `Model.__call__`.

        The intermediates are 'patch_embedding' [B, rows, cols, D] after its norm; 'stages', one
        dict per stage, with 'merged' [B, r, c, E] (except in the first) and 'blocks': 'attention',
        'mlp', 'output' [L, B, r, c, E] and 'attention_maps' [L, B, W, h, n, n] for the W windows of
        the shifted and padded grid; 'pooled' [B, E] after the norm.
        """
        rates = np.linspace(0, self.drop_path, sum(self.depths), dtype=np.float32)
        rates = np.split(rates, np.cumsum(self.depths)[:-1])
        stages = self.stages
        rngs = [None] * len(stages) if rng is None else jax.random.split(rng, len(stages))
        height, width = (side - side % self.patch_size for side in images.shape[1:3])
        embedded = self.patch_norm(self.patch_embedding(images[:, :height, :width], self.grid))
        x = embedded
        outs = []
        for stage, stage_rates, stage_rng in zip(stages, rates, rngs, strict=True):
            options = dict(remat=self.remat, with_maps=with_maps)
            x, out = stage(x, drop_path_rates=stage_rates.tolist(), rng=stage_rng, **options)
            outs.append(out)
        pooled = self.norm(x).mean(axis=(1, 2))
        out = dict(patch_embedding=embedded, stages=tuple(outs), pooled=pooled)
        return self.head(pooled.astype(jnp.float32)), out


class SwinStage(nnx.Module):
    """Patch merging (except in the first stage), then a stack of blocks, every second shifted."""

    def __init__(
        self,
        *,
        grid: Sides,
        window_size: int,
        merge: bool,
        depth: int,
        width: int,
        base_init: BaseInit,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
        **block_options,
    ):
        options = dict(base_init=base_init, dtype=dtype, rngs=rngs)
        self.window = tuple(min(side, window_size) for side in grid)
        self.shift = tuple(window_size // 2 if side > window_size else 0 for side in grid)
        self.merging = PatchMerging(width // 2, **options) if merge else None
        self.blocks = make_stack(
            SwinBlock, depth, window=self.window, width=width, **options, **block_options
        )

    def __call__(
        self, x: Float[Array, "B rows cols D"], **run_options
    ) -> tuple[Float[Array, "B r c E"], dict[str, Any]]:
        """Returns the output and the intermediates. For `run_options` see `run_stack`."""
        out = {}
        if self.merging is not None:
            x = self.merging(x)
            out["merged"] = x
        shifts = (UNSHIFTED,) if self.shift == UNSHIFTED else (UNSHIFTED, self.shift)
        cycle = tuple({"shift": shift} for shift in shifts)
        x, out["blocks"] = run_stack(self.blocks, x, cycle=cycle, **run_options)
        return x, out


class PatchMerging(nnx.Module):
    """Concatenates the channels of 2×2 neighbors, normalizes them, and maps 4 D to 2 D channels."""

    def __init__(self, width: int, *, base_init: BaseInit, dtype: DTypeLike, rngs: nnx.Rngs):
        options = dict(dtype=dtype, rngs=rngs)
        inputs = 4 * width
        self.norm = layers.layer_norm(inputs, epsilon=EPSILON, **options)
        init = BASE_INITS[base_init](inputs)
        self.reduction = nnx.Linear(inputs, 2 * width, use_bias=False, **init, **options)

    def __call__(self, x: Float[Array, "B rows cols D"]) -> Float[Array, "B r c E"]:
        """Halves the grid and doubles the channels."""
        batch, rows, cols, width = x.shape
        x = jnp.pad(x, ((0, 0), (0, rows % 2), (0, cols % 2), (0, 0)))
        x = x.reshape(batch, -(-rows // 2), 2, -(-cols // 2), 2, width)
        # Channels in timm's order: column within the pair, row within the pair, channel.
        x = jnp.einsum("brycxd->brcxyd", x).reshape(batch, x.shape[1], x.shape[3], 4 * width)
        return self.reduction(self.norm(x))


class SwinBlock(Block):
    """A pre-norm block that attends within windows, with a relative position bias."""

    def __init__(self, *, window: Sides, **options):
        rows = (2 * window[0] - 1) * (2 * window[1] - 1)
        super().__init__(position_bias_rows=rows, epsilon=EPSILON, **options)
        self.window = window

    def attend(self, x, *, shift, with_maps=False):
        """Attends within the windows of the grid [B, rows, cols, D], cyclically shifted."""
        batch, *grid, _ = x.shape
        x = jnp.roll(x, (-shift[0], -shift[1]), axis=(1, 2))
        tokens = partition(x, self.window)
        bias = self._bias(tuple(grid), shift, batch)
        y, maps = self.attention(tokens, bias=bias, with_maps=with_maps)
        y = jnp.roll(unpartition(y, self.window, tuple(grid)), shift, axis=(1, 2))
        windows = math.prod(-(-side // size) for side, size in zip(grid, self.window, strict=True))
        return y, {name: m.reshape(batch, windows, *m.shape[1:]) for name, m in maps.items()}

    def _bias(self, grid, shift, batch):
        """Returns the logit bias [1, h, n, n], or [B W, h, n, n] if it includes a shift's mask."""
        bias = spread_bias(self.relative_position_bias[...], self.window)[None]
        if shift == UNSHIFTED:
            return bias
        bias = bias + jnp.asarray(shift_mask(grid, self.window, shift))[:, None]
        return jnp.tile(bias, (batch, 1, 1, 1))


def partition(x: Float[Array, "B rows cols D"], window: Sides) -> Float[Array, "BW n D"]:
    """Splits a grid, zero-padded at its ends, into windows of n tokens."""
    batch, rows, cols, width = x.shape
    r, c = window
    down = -(-rows // r)
    across = -(-cols // c)
    x = jnp.pad(x, ((0, 0), (0, down * r - rows), (0, across * c - cols), (0, 0)))
    return x.reshape(batch, down, r, across, c, width).swapaxes(2, 3).reshape(-1, r * c, width)


def unpartition(
    windows: Float[Array, "BW n D"], window: Sides, grid: Sides
) -> Float[Array, "B rows cols D"]:
    """Inverts `partition` and removes the padding."""
    rows, cols = grid
    r, c = window
    width = windows.shape[-1]
    down = -(-rows // r)
    across = -(-cols // c)
    x = windows.reshape(-1, down, across, r, c, width).swapaxes(2, 3)
    return x.reshape(-1, down * r, across * c, width)[:, :rows, :cols]


def shift_mask(grid: Sides, window: Sides, shift: Sides) -> Float[np.ndarray, "W n n"]:
    """Returns the mask that is added to the logits of each window of a shifted grid.

    The last windows hold tokens from both ends of the grid, which must not attend to each other:
    the mask is `MASKED` for such pairs, else 0. As in timm, the grid includes its padding.
    """
    wrapped = []  # whether each row or column was moved from the start to the end
    for side, size, move in zip(grid, window, shift, strict=True):
        padded = side + -side % size
        wrapped.append(np.arange(padded) >= padded - move)
    labels = 2 * wrapped[0][:, None] + wrapped[1][None, :]
    r, c = window
    labels = labels.reshape(len(labels) // r, r, -1, c).swapaxes(1, 2).reshape(-1, r * c)
    apart = labels[:, :, None] != labels[:, None, :]
    return np.where(apart, np.float32(MASKED), np.float32(0))


def spread_bias(table: Float[Array, "R h"], window: Sides) -> Float[Array, "h n n"]:
    """Returns `table[relative_index(window)]`, the bias of each query and key, heads first.

    It uses slices: the gradient of indexing is a scatter, which adds in no fixed order on GPUs.
    """
    rows, cols = window
    x = table.reshape(2 * rows - 1, 2 * cols - 1, -1)
    x = jnp.moveaxis(_spread(x, rows), 2, 0)  # [column offset, query row, key row, h]
    x = _spread(x, cols).transpose(4, 2, 0, 3, 1)
    return x.reshape(-1, rows * cols, rows * cols)


def _spread(x, size):
    """Returns an array whose entry [query, key] is x[query - key + size - 1]."""
    return jnp.stack([x[query : query + size][::-1] for query in range(size)])
