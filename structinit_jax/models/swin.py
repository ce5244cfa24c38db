"""Swin Transformer (Liu et al. 2021, arXiv:2103.14030) with timm's conventions, in Flax NNX."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from structinit_jax.attention_init import AttentionInit, SolveReport, WindowSite
from structinit_jax.errors import InputError
from structinit_jax.models import layers
from structinit_jax.models.layers import Key
from structinit_jax.models.swin_stage import EPSILON, SwinStage

_TINY = dict(width=96, depths=(2, 2, 6, 2), num_heads=(3, 6, 12, 24), image_size=224, window_size=7)
_SMALL = _TINY | dict(depths=(2, 2, 18, 2))
_BASE = _SMALL | dict(width=128, num_heads=(4, 8, 16, 32))
VARIANTS = {
    "swin_tiny_patch4_window7_224": _TINY,
    "swin_small_patch4_window7_224": _SMALL,
    "swin_base_patch4_window7_224": _BASE,
    "swin_base_patch4_window12_384": _BASE | dict(image_size=384, window_size=12),
    "swin_large_patch4_window7_224": _BASE | dict(width=192, num_heads=(6, 12, 24, 48)),
}


class SwinTransformer(nnx.Module):
    """Patch embedding, stages of windowed attention with patch merging between, pooling and head.

    Any image size goes: grids are padded with zeros to whole windows and to even sides before patch
    merging. Pixels behind the last whole patch are left out. Both are timm's way.

    Args:
      image_size: (height, width) of the input in pixels, or the side of a square one.
      patch_size: side of a patch in pixels.
      channels: input channels.
      num_classes: logits.
      width: D of the first stage; each stage has twice that of the one before.
      depths: the number of blocks of each stage.
      num_heads: h of each stage.
      window_size: side of a window in tokens. A stage whose grid is no larger has a single window
        of the grid's size, and no shift.
      mlp_ratio: hidden width of the MLP over D.
      drop_path: rate of the last block; it rises linearly from 0 at the first.
      dropout: rate behind projections and MLP layers.
      dtype: type of the computation ('float32' or 'bfloat16'); parameters are float32.
      attention_implementation: 'auto' lets JAX choose; 'xla', or 'cudnn', which needs an even
        number of tokens in every window.
      unroll: pairs of blocks to a step of the loop over a stage; 0 unrolls it, for more compile
        time.
      remat: what a pair of blocks keeps for the gradient: 'none' keeps everything, 'dots', 'full'
        (see `layers.run_layers`).
      attention_init: scheme for the attention weights; None keeps `attention_init.default`.
      rngs: its `params` stream draws the start values.
    """

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
        dtype: str = "float32",
        attention_implementation: str = "auto",
        unroll: int = 1,
        remat: str = "none",
        attention_init: AttentionInit | None = None,
        rngs: nnx.Rngs,
    ):
        self.image_size = layers.image_sides(image_size)
        _check_sizes(self.image_size, patch_size, width, depths, num_heads, window_size)
        layers.check_choices(
            dtype=dtype, attention_implementation=attention_implementation, remat=remat
        )
        self.depths = tuple(depths)
        self.drop_path_rate = drop_path
        self.dropout_rate = dropout
        self.dtype = jnp.dtype(dtype)

        options = dict(dtype=self.dtype, rngs=rngs)
        self.patch_embedding = layers.PatchEmbedding(patch_size, channels, width, **options)
        self.patch_norm = layers.layer_norm(width, epsilon=EPSILON, **options)
        grid = tuple(side // patch_size for side in self.image_size)
        for i, (depth, heads) in enumerate(zip(depths, num_heads, strict=True)):
            if i:
                grid, width = tuple(-(-side // 2) for side in grid), 2 * width
            config = layers.BlockConfig(
                width=width,
                num_heads=heads,
                mlp_ratio=mlp_ratio,
                dropout=dropout,
                attention_implementation=attention_implementation,
                dtype=self.dtype,
            )
            stage = SwinStage(
                config,
                depth=depth,
                grid=grid,
                window_size=window_size,
                merge=i > 0,
                remat=remat,
                unroll=unroll,
                rngs=rngs,
            )
            if attention_implementation == "cudnn":
                _check_even(i, stage.window)
            setattr(self, f"stage{i + 1}", stage)
        self.norm = layers.layer_norm(width, epsilon=EPSILON, **options)
        # The head is float32 whatever the blocks are: logits are what the loss exponentiates.
        self.head = nnx.Linear(width, num_classes, kernel_init=layers.truncated_normal(), rngs=rngs)
        if attention_init is not None:
            self.initialize_attention(attention_init, rngs.params())

    @property
    def stages(self) -> tuple[SwinStage, ...]:
        """The stages, first to last."""
        return tuple(getattr(self, f"stage{i + 1}") for i in range(len(self.depths)))

    @property
    def attention_sites(self) -> tuple[WindowSite, ...]:
        """What an attention scheme may know of each stage: its shifted and unshifted blocks."""
        sites = []
        for stage in self.stages:
            depth, width, num_heads, head_dim = stage.blocks.attention.query.kernel.shape
            sites.append(
                WindowSite(
                    grid=stage.window,
                    width=width,
                    num_heads=num_heads,
                    head_dim=head_dim,
                    num_layers=depth,
                    qk_scale=head_dim**-0.5,
                )
            )
        return tuple(sites)

    def initialize_attention(
        self, attention_init: AttentionInit, key: jax.Array
    ) -> SolveReport | None:
        """Puts a scheme's weights in place, stage by stage, and returns the mean of its reports."""
        reports = []
        sites = self.attention_sites
        keys = jax.random.split(key, len(sites))
        for stage, site, stage_key in zip(self.stages, sites, keys, strict=True):
            weights = attention_init(stage_key, site)
            if weights.positions is not None:
                raise InputError(
                    "attention_init: the scheme sets a position encoding, which Swin does not have"
                )
            for name in ("query", "key", "value", "out"):
                start = getattr(weights, name)
                if start is not None:
                    getattr(stage.blocks.attention, name).kernel[...] = start
            if weights.bias is not None:
                stage.blocks.relative_position_bias[...] = weights.bias
            if weights.report is not None:
                reports.append(weights.report)
        if not reports:
            return None
        return jax.tree.map(lambda *values: sum(values) / len(values), *reports)

    def __call__(
        self, images: Float[Array, "B H W C"], *, key: Key = None, with_maps: bool = False
    ) -> tuple[Float[Array, "B classes"], dict]:
        """Computes logits.

        Args:
          images: normalized images.
          key: draws dropout and drop path in training; None in evaluation.
          with_maps: whether to return attention maps too.

        Returns:
          float32 logits [B, classes] and the intermediates by name: 'patch_embedding'
          [B, rows, cols, D] behind its norm, 'stages', a tuple of one dict each: 'merged'
          [B, r, c, E] in all but the first, and 'blocks' (each with a leading layer axis L:
          'attention', 'mlp', 'output' [L, B, r, c, E], 'attention_maps' [L, B, W, h, n, n] of the
          W windows, cut from the shifted and padded grid); and 'pooled' [B, E] behind the norm.
        """
        if images.shape[1:3] != self.image_size:
            raise InputError(
                f"images are {images.shape[1:3]} pixels, but the model was made for "
                f"data.image_size={self.image_size}: windows and shifts depend on it"
            )
        rates = np.linspace(0, self.drop_path_rate, sum(self.depths), dtype=np.float32)
        rates = np.split(rates, np.cumsum(self.depths)[:-1])
        count = len(self.depths)
        keys = (None,) * count if key is None else jax.random.split(key, count)
        patch = self.patch_embedding.kernel.shape[0]
        height, width = (side - side % patch for side in self.image_size)
        x = embedded = self.patch_norm(self.patch_embedding(images[:, :height, :width]))
        stages = []
        for stage, stage_rates, stage_key in zip(self.stages, rates, keys, strict=True):
            x, out = stage(
                x, drop_path_rates=jnp.asarray(stage_rates), key=stage_key, with_maps=with_maps
            )
            stages.append(out)
        pooled = self.norm(x).mean(axis=(1, 2))
        logits = self.head(pooled.astype(jnp.float32))
        return logits, {"patch_embedding": embedded, "stages": tuple(stages), "pooled": pooled}


def _check_sizes(image_size, patch_size, width, depths, num_heads, window_size):
    if min(image_size) < patch_size:
        raise InputError(
            f"data.image_size={image_size} is smaller than model.patch_size={patch_size}: "
            "choose a smaller patch"
        )
    if len(depths) != len(num_heads):
        raise InputError(
            f"model.depths={tuple(depths)} has {len(depths)} stages, but "
            f"model.num_heads={tuple(num_heads)} has {len(num_heads)}: give one number for each"
        )
    for field, values in (("depths", depths), ("num_heads", num_heads)):
        if not values or min(values) < 1:
            raise InputError(
                f"model.{field}={tuple(values)}: it needs a positive whole number for each stage"
            )
    if window_size < 1:
        raise InputError(f"model.window_size={window_size}: it must be positive")
    for stage, heads in enumerate(num_heads):
        if width * 2**stage % heads:
            raise InputError(
                f"model.num_heads={tuple(num_heads)}: {heads} heads do not divide the "
                f"{width * 2**stage} channels of stage {stage + 1}: each takes an equal share"
            )


def _check_even(index, window):
    if window[0] * window[1] % 2:
        raise InputError(
            f"model.attention_implementation='cudnn': a window of stage {index + 1} has "
            f"{window[0]}x{window[1]} tokens, but with a bias cuDNN trains on even numbers only: "
            "use 'xla', or an even model.window_size with grids that it divides"
        )
