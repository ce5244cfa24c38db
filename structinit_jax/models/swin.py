"""Swin Transformer (Liu et al. 2021, arXiv:2103.14030) with timm's conventions, in Flax NNX."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from structinit_jax.attention_init import AttentionInit, AttentionWeights, WindowSite
from structinit_jax.errors import InputError
from structinit_jax.models import layers
from structinit_jax.models.attention import Block
from structinit_jax.models.fields import check_fields
from structinit_jax.models.layers import Rng
from structinit_jax.models.model import Model, image_sides, make_stack, run_stack
from structinit_jax.models.shifted_windows import (
    Sides,
    partition,
    shift_mask,
    spread_bias,
    unpartition,
)

EPSILON = 1e-5  # of every LayerNorm
UNSHIFTED = (0, 0)

_TINY = dict(width=96, depths=(2, 2, 6, 2), num_heads=(3, 6, 12, 24), image_size=224, window_size=7)
_SMALL = _TINY | dict(depths=(2, 2, 18, 2))
_BASE = _SMALL | dict(width=128, num_heads=(4, 8, 16, 32))


class SwinTransformer(Model):
    """Patch embedding, stages of windowed attention with patch merging between, pooling and head.

    As in timm, any image size is accepted: grids are padded with zeros to whole windows, and to
    even sides before patch merging; pixels after the last whole patch are dropped.

    For the arguments see `Model` and `default_config`.
    """

    VARIANTS: ClassVar = {
        "swin_tiny_patch4_window7_224": _TINY,
        "swin_small_patch4_window7_224": _SMALL,
        "swin_base_patch4_window7_224": _BASE,
        "swin_base_patch4_window12_384": _BASE | dict(image_size=384, window_size=12),
        "swin_large_patch4_window7_224": _BASE | dict(width=192, num_heads=(6, 12, 24, 48)),
    }

    @staticmethod
    def default_config() -> dict[str, Any]:
        """See `Model.default_config`."""
        return dict(
            image_size=224,
            num_classes=1000,
            patch_size=4,  # side of a patch in pixels
            width=96,  # D of the first stage; it doubles in each further stage
            depths=(2, 2, 6, 2),  # number of blocks of each stage
            num_heads=(3, 6, 12, 24),  # h of each stage
            window_size=7,  # side of a window in tokens; a smaller grid is one window, unshifted
            mlp_ratio=4.0,  # hidden width of the MLP over D
            drop_path=0.0,  # rate of the last block; it rises linearly from 0 in the first
            dropout=0.0,  # rate after attention projections and MLP layers
            base_init="timm",  # start values: timm's, or "pytorch": the defaults of its layers
            dtype="float32",  # of the computation, or "bfloat16"; parameters are float32
            attention_implementation="auto",  # or "cudnn", a fused kernel for even windows
            unroll=1,  # pairs of blocks per step of the scan; 0 unrolls it, which compiles longer
            # What the training step recomputes to save memory: "none", "dots" or "full" (see
            # model.run_stack), or the first of them that fits the device.
            remat="auto",
        )

    def __init__(
        self,
        *,
        image_size: int | tuple[int, int],
        patch_size: int = 4,
        channels: int,
        num_classes: int,
        width: int,
        depths: Sequence[int],
        num_heads: Sequence[int],
        window_size: int = 7,
        mlp_ratio: float = 4.0,
        drop_path: float = 0.0,
        dropout: float = 0.0,
        base_init: str = "timm",
        dtype: str = "float32",
        attention_implementation: str = "auto",
        unroll: int = 1,
        remat: str = "auto",
        attention_init: AttentionInit | None = None,
        rngs: nnx.Rngs,
    ):
        check_fields(locals())
        self.image_size = image_sides(image_size)
        _check_sizes(self.image_size, patch_size, width, depths, num_heads)
        self.patch_size = patch_size
        self.depths = tuple(depths)
        self.drop_path_rate = drop_path
        self.base_init = base_init
        self.unroll = unroll
        self.remat = remat

        options = dict(dtype=jnp.dtype(dtype), rngs=rngs)
        self.patch_embedding = layers.PatchEmbedding(patch_size, channels, width, **options)
        self.patch_norm = layers.layer_norm(width, epsilon=EPSILON, **options)
        grid = tuple(side // patch_size for side in self.image_size)
        for i, (depth, heads) in enumerate(zip(depths, num_heads, strict=True)):
            if i:
                grid, width = tuple(-(-side // 2) for side in grid), 2 * width
            stage = SwinStage(
                width=width,
                num_heads=heads,
                depth=depth,
                grid=grid,
                window_size=window_size,
                merge=i > 0,
                mlp_ratio=mlp_ratio,
                dropout=dropout,
                base_init=base_init,
                attention_implementation=attention_implementation,
                **options,
            )
            if attention_implementation == "cudnn" and math.prod(stage.window) % 2:
                raise InputError(
                    f"config.model.attention_implementation='cudnn': windows of stage {i + 1} have "
                    f"{stage.window[0]}x{stage.window[1]} tokens, but cuDNN needs an even number "
                    "to train a bias: use 'auto', or an even config.model.window_size and grids "
                    "divisible by it"
                )
            setattr(self, f"stage{i + 1}", stage)
        self.norm = layers.layer_norm(width, epsilon=EPSILON, **options)
        head_init = layers.BASE_INITS[base_init](width)
        self.head = nnx.Linear(width, num_classes, **head_init, rngs=rngs)
        if attention_init is not None:
            self.initialize_attention(attention_init, rngs.params())

    @property
    def stages(self) -> tuple["SwinStage", ...]:
        """The stages, first to last."""
        return tuple(getattr(self, f"stage{i + 1}") for i in range(len(self.depths)))

    def sites(self) -> dict[str, WindowSite]:
        """See `Model.sites`."""
        return {
            f"stage{i + 1}": WindowSite(
                grid=stage.window, base_init=self.base_init, **stage.blocks.sizes()
            )
            for i, stage in enumerate(self.stages)
        }

    def __call__(
        self, images: Float[Array, "B H W C"], *, rng: Rng = None, with_maps: bool = False
    ) -> tuple[Float[Array, "B classes"], dict[str, Any]]:
        """Returns logits and intermediates; see `Model.__call__`.

        The intermediates are 'patch_embedding' [B, rows, cols, D] after its norm; 'stages', one
        dict each, with 'merged' [B, r, c, E] (not in the first) and 'blocks': 'attention', 'mlp',
        'output' [L, B, r, c, E] and 'attention_maps' [L, B, W, h, n, n] of the W windows of the
        shifted and padded grid; 'pooled' [B, E] after the norm.
        """
        if images.shape[1:3] != self.image_size:
            raise InputError(
                f"images have {images.shape[1:3]} pixels, but the model was built for "
                f"config.data.image_size={self.image_size}, which determines windows and shifts"
            )
        rates = np.linspace(0, self.drop_path_rate, sum(self.depths), dtype=np.float32)
        rates = np.split(rates, np.cumsum(self.depths)[:-1])
        stages = self.stages
        rngs = [None] * len(stages) if rng is None else jax.random.split(rng, len(stages))
        height, width = (side - side % self.patch_size for side in self.image_size)
        x = embedded = self.patch_norm(self.patch_embedding(images[:, :height, :width]))
        outs = []
        for stage, stage_rates, stage_rng in zip(stages, rates, rngs, strict=True):
            x, out = stage(
                x,
                drop_path_rates=stage_rates,
                rng=stage_rng,
                unroll=self.unroll,
                remat=self.remat,
                with_maps=with_maps,
            )
            outs.append(out)
        pooled = self.norm(x).mean(axis=(1, 2))
        out = dict(patch_embedding=embedded, stages=tuple(outs), pooled=pooled)
        return self.head(pooled.astype(jnp.float32)), out


class SwinStage(nnx.Module):
    """Patch merging, in all stages but the first, then a stack of blocks, every second shifted.

    Along a side of the grid no longer than `window_size` there is one window and no shift. For
    `block_options` see `attention.Block`.
    """

    def __init__(
        self,
        *,
        width: int,
        depth: int,
        grid: Sides,
        window_size: int,
        merge: bool,
        base_init: str,
        dtype,
        rngs: nnx.Rngs,
        **block_options,
    ):
        self.depth = depth
        self.window = tuple(min(side, window_size) for side in grid)
        self.shift = tuple(window_size // 2 if side > window_size else 0 for side in grid)
        options = dict(base_init=base_init, dtype=dtype, rngs=rngs)
        self.merging = PatchMerging(width // 2, **options) if merge else None
        self.blocks = make_stack(
            SwinBlock, depth, width=width, window=self.window, **options, **block_options
        )

    def set_weights(self, weights: AttentionWeights) -> None:
        """Replaces the weights of the blocks by those that a scheme sets."""
        self.blocks.set_weights(weights)

    def __call__(
        self, x: Float[Array, "B rows cols D"], **run_options
    ) -> tuple[Float[Array, "B r c E"], dict[str, Any]]:
        """Returns the output and the intermediates; `run_options` are those of `run_stack`."""
        out = {}
        if self.merging is not None:
            x = out["merged"] = self.merging(x)
        shifts = (UNSHIFTED,) if self.shift == UNSHIFTED else (UNSHIFTED, self.shift)
        cycle = tuple({"shift": shift} for shift in shifts)
        x, out["blocks"] = run_stack(self.blocks, x, cycle=cycle, **run_options)
        return x, out


class PatchMerging(nnx.Module):
    """Concatenates the channels of 2×2 neighbors, then a norm and a linear layer to 2 D channels.

    A grid with an odd side is padded with zeros.
    """

    def __init__(self, width: int, *, base_init: str, dtype, rngs: nnx.Rngs):
        options, inputs = dict(dtype=dtype, rngs=rngs), 4 * width
        self.norm = layers.layer_norm(inputs, epsilon=EPSILON, **options)
        init = layers.BASE_INITS[base_init](inputs)
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

    def __init__(self, width: int, num_heads: int, *, window: Sides, **options):
        rows = (2 * window[0] - 1) * (2 * window[1] - 1)
        super().__init__(width, num_heads, position_bias_rows=rows, epsilon=EPSILON, **options)
        self.window = window

    def mix(self, x, *, shift, rng, with_maps):
        """Attends within the windows of the grid [B, rows, cols, D], cyclically shifted."""
        batch, *grid, _ = x.shape
        x = jnp.roll(x, (-shift[0], -shift[1]), axis=(1, 2))
        tokens = partition(x, self.window)
        bias = self._bias(tuple(grid), shift, batch)
        y, maps = self.attention(tokens, bias=bias, rng=rng, with_maps=with_maps)
        y = jnp.roll(unpartition(y, self.window, tuple(grid)), shift, axis=(1, 2))
        return y, {name: m.reshape(batch, -1, *m.shape[1:]) for name, m in maps.items()}

    def _bias(self, grid, shift, batch):
        """[1, h, n, n], or with the mask of a shift [B W, h, n, n]."""
        bias = spread_bias(self.relative_position_bias[...], self.window)[None]
        if shift == UNSHIFTED:
            return bias
        bias = bias + jnp.asarray(shift_mask(grid, self.window, shift))[:, None]
        return jnp.tile(bias, (batch, 1, 1, 1))


def _check_sizes(image_size, patch_size, width, depths, num_heads):
    if min(image_size) < patch_size:
        raise InputError(
            f"config.data.image_size={image_size} is smaller than "
            f"config.model.patch_size={patch_size}: choose a smaller patch"
        )
    if np.ndim(depths) == 0 or np.shape(depths) != np.shape(num_heads):
        raise InputError(
            f"config.model.depths={depths} and config.model.num_heads={num_heads} "
            "must have one number for each stage"
        )
    for stage, heads in enumerate(num_heads):
        if width * 2**stage % heads:
            raise InputError(
                f"config.model.num_heads={tuple(num_heads)}: the {width * 2**stage} channels of "
                f"stage {stage + 1} are not divisible by {heads} heads"
            )
