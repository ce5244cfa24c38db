"""A stage of Swin: patch merging, then blocks of attention within windows, every second shifted."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from structinit_jax.attention_init.windows import relative_index
from structinit_jax.models import layers, windows
from structinit_jax.models.layers import Key

EPSILON = 1e-5  # of LayerNorm, in all of Swin
UNSHIFTED = (0, 0)


class PatchMerging(nnx.Module):
    """Concatenates the channels of 2×2 neighbours, then norm and a linear layer to twice the width.

    A grid of odd sides is padded with zeros.
    """

    def __init__(self, width: int, *, dtype, rngs: nnx.Rngs):
        self.norm = layers.layer_norm(4 * width, epsilon=EPSILON, dtype=dtype, rngs=rngs)
        self.reduction = nnx.Linear(
            4 * width,
            2 * width,
            use_bias=False,
            dtype=dtype,
            kernel_init=layers.truncated_normal(),
            rngs=rngs,
        )

    def __call__(self, x: Float[Array, "B rows cols D"]) -> Float[Array, "B r c E"]:
        """Halves the grid and doubles the channels."""
        batch, rows, cols, width = x.shape
        x = jnp.pad(x, ((0, 0), (0, rows % 2), (0, cols % 2), (0, 0)))
        x = x.reshape(batch, -(-rows // 2), 2, -(-cols // 2), 2, width)
        # Channels in timm's order: column within the pair, row within the pair, channel.
        x = jnp.einsum("brycxd->brcxyd", x).reshape(batch, x.shape[1], x.shape[3], 4 * width)
        return self.reduction(self.norm(x))


class SwinBlock(nnx.Module):
    """A pre-norm block whose attention stays within windows and knows relative positions."""

    def __init__(self, config: layers.BlockConfig, window: windows.Sides, *, rngs: nnx.Rngs):
        options = dict(dtype=config.dtype, rngs=rngs)
        self.window = window
        self.norm1 = layers.layer_norm(config.width, epsilon=EPSILON, **options)
        self.attention = layers.Attention(
            config.width,
            config.num_heads,
            dropout=config.dropout,
            implementation=config.attention_implementation,
            **options,
        )
        table = ((2 * window[0] - 1) * (2 * window[1] - 1), config.num_heads)
        self.relative_position_bias = nnx.Param(layers.truncated_normal()(rngs.params(), table))
        self.norm2 = layers.layer_norm(config.width, epsilon=EPSILON, **options)
        hidden = int(config.width * config.mlp_ratio)
        self.mlp = layers.Mlp(config.width, hidden, dropout=config.dropout, **options)

    def __call__(
        self,
        x: Float[Array, "B rows cols D"],
        *,
        shift: windows.Sides,
        drop_path_rate: Float[Array, ""],
        key: Key = None,
        with_maps: bool = False,
    ) -> tuple[Float[Array, "B rows cols D"], dict[str, Array]]:
        """Returns the block's output and its intermediates by name."""
        keys = (None,) * 4 if key is None else jax.random.split(key, 4)
        attended, maps = self._attend(self.norm1(x), shift, keys[0], with_maps)
        x = x + layers.drop_path(attended, drop_path_rate, keys[1])
        mixed = self.mlp(self.norm2(x), key=keys[2])
        x = x + layers.drop_path(mixed, drop_path_rate, keys[3])
        out = {"attention": attended, "mlp": mixed, "output": x}
        return x, out | ({"attention_maps": maps} if with_maps else {})

    def _attend(self, x, shift, key, with_maps):
        batch, *grid, _ = x.shape
        x = jnp.roll(x, (-shift[0], -shift[1]), axis=(1, 2))
        tokens = windows.partition(x, self.window)
        bias = self._bias(tuple(grid), shift, batch)
        y, maps = self.attention(tokens, bias=bias, key=key, with_maps=with_maps)
        y = jnp.roll(windows.unpartition(y, self.window, tuple(grid)), shift, axis=(1, 2))
        return y, maps.reshape(batch, -1, *maps.shape[1:]) if with_maps else None

    def _bias(self, grid, shift, batch):
        """[1, h, n, n], or [B W, h, n, n] with the shift's mask."""
        table = self.relative_position_bias[...]
        bias = jnp.moveaxis(table[relative_index(self.window)], -1, 0)[None]
        if shift == UNSHIFTED:
            return bias
        bias = bias + jnp.asarray(windows.shift_mask(grid, self.window, shift))[:, None]
        return jnp.broadcast_to(bias[None], (batch, *bias.shape)).reshape(-1, *bias.shape[1:])


class SwinStage(nnx.Module):
    """Patch merging, in all stages but the first, and a stack of blocks.

    The stack is one `SwinBlock` whose parameters have a leading layer axis. An unshifted block and
    the shifted one behind it are one step of `lax.scan`, so that a deep stage compiles once. Where
    one window covers the grid nothing is shifted, and each step is one block.
    """

    def __init__(
        self,
        config: layers.BlockConfig,
        *,
        depth: int,
        grid: windows.Sides,
        window_size: int,
        merge: bool,
        remat: str,
        unroll: int,
        rngs: nnx.Rngs,
    ):
        self.depth = depth
        self.window, self.shift = windows.window_and_shift(grid, window_size)
        self.remat = remat
        self.unroll = unroll
        self.merging = (
            PatchMerging(config.width // 2, dtype=config.dtype, rngs=rngs) if merge else None
        )
        self.blocks = layers.stack_layers(
            lambda rngs: SwinBlock(config, self.window, rngs=rngs), depth, rngs
        )

    def __call__(
        self,
        x: Float[Array, "B rows cols D"],
        *,
        drop_path_rates: Float[Array, " L"],
        key: Key = None,
        with_maps: bool = False,
    ) -> tuple[Float[Array, "B r c E"], dict]:
        """Returns the stage's output and its intermediates: 'merged' and 'blocks'."""
        out = {}
        if self.merging is not None:
            x = out["merged"] = self.merging(x)
        shifts = (UNSHIFTED,) if self.shift == UNSHIFTED else (UNSHIFTED, self.shift)
        keys = None if key is None else jax.random.split(key, self.depth)

        def run(layer, x, shift):
            block, rate, key = layer
            return block(x, shift=shift, drop_path_rate=rate, key=key, with_maps=with_maps)

        def body(x, step):
            outs = []
            for i, shift in enumerate(shifts):
                x, out = run(_take(step, i), x, shift)
                outs.append(out)
            return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outs)

        stack, period = (self.blocks, drop_path_rates, keys), len(shifts)
        whole = self.depth - self.depth % period
        steps = jax.tree.map(
            lambda leaf: leaf[:whole].reshape(whole // period, period, *leaf.shape[1:]), stack
        )
        x, outs = layers.run_layers(body, x, steps, unroll=self.unroll, remat=self.remat)
        outs = jax.tree.map(lambda leaf: leaf.reshape(whole, *leaf.shape[2:]), outs)
        if whole < self.depth:  # an odd depth ends with an unshifted block
            x, last = run(_take(stack, -1), x, UNSHIFTED)
            outs = jax.tree.map(lambda a, b: jnp.concatenate([a, b[None]]), outs, last)
        return x, out | {"blocks": outs}


def _take(layers_, index):
    return jax.tree.map(lambda leaf: leaf[index], layers_)
