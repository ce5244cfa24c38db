"""What the model families share: layers, blocks, the stack and the base class `Model`.

Layers follow timm: exact (erf) GELU, LayerNorm with epsilon 1e-6. Modules hold parameters and no
random state: a call takes a random key `rng`, and `rng=None` means evaluation. A module is thus a
plain pytree, and a stack of equal blocks is one block whose variables have a leading layer axis.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray

from structinit_jax.attention_init import (
    AttentionInit,
    AttentionWeights,
    Site,
    SolveReport,
    Weights,
)
from structinit_jax.errors import InputError

Rng = PRNGKeyArray | None

# timm's `trunc_normal_(std=0.02)`, which cuts at ±2 (not ±2 std), that is, practically never.
truncated_normal = nnx.initializers.truncated_normal(0.02, lower=-100.0, upper=100.0)


def uniform(bound: float) -> nnx.Initializer:
    """Returns PyTorch's default initializer of weights and biases; `bound` is fan_in^-1/2."""

    def init(rng, shape, dtype=jnp.float32, out_sharding=None):
        return jax.random.uniform(rng, shape, dtype, -bound, bound)

    return init


def dropout(x: Array, rate: float, rng: Rng) -> Array:
    """Zeroes elements with probability `rate` and rescales the others; identity without `rng`."""
    return x if rate == 0 else _drop(x, rate, rng, x.shape)


def drop_path(x: Float[Array, "B *rest"], rate: Float[Array, ""], rng: Rng) -> Array:
    """Drops the residual branch of whole examples (stochastic depth, Huang et al. 2016)."""
    return _drop(x, rate, rng, (len(x),) + (1,) * (x.ndim - 1))


def _drop(x, rate, rng, mask_shape):
    if rng is None:
        return x
    keep = jax.random.bernoulli(rng, 1 - rate, mask_shape)
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)


def layer_norm(width: int, *, dtype, rngs: nnx.Rngs, epsilon: float = 1e-6) -> nnx.LayerNorm:
    """Returns a LayerNorm without Flax's fast variance, which loses precision in float32."""
    return nnx.LayerNorm(width, epsilon=epsilon, dtype=dtype, use_fast_variance=False, rngs=rngs)


class PatchEmbedding(nnx.Module):
    """Maps each p × p patch to a token, like a convolution of size and stride p.

    A matrix product rather than `nnx.Conv`: its gradient is deterministic on GPUs, whereas cuDNN's
    need not be. Start values are those of PyTorch's Conv2d, as in timm.
    """

    def __init__(self, patch_size: int, channels: int, width: int, *, dtype, rngs: nnx.Rngs):
        init = uniform((patch_size * patch_size * channels) ** -0.5)
        self.kernel = nnx.Param(init(rngs.params(), (patch_size, patch_size, channels, width)))
        self.bias = nnx.Param(init(rngs.params(), (width,)))
        self.dtype = dtype

    def __call__(self, images: Float[Array, "B H W C"]) -> Float[Array, "B rows cols D"]:
        """Returns one token per patch."""
        p = self.kernel.shape[0]
        batch, height, width, channels = images.shape
        patches = images.reshape(batch, height // p, p, width // p, p, channels)
        kernel, bias = self.kernel[...].astype(self.dtype), self.bias[...].astype(self.dtype)
        tokens = jnp.einsum("brpcqi,pqid->brcd", patches.astype(self.dtype), kernel)
        return tokens + bias[None, None, None, :]


class Attention(nnx.Module):
    """Multi-head self-attention, with the parameters of Flax's `MultiHeadAttention`.

    Unlike Flax's, it runs fused kernels, adds a bias to the logits and returns the maps.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        dropout: float = 0.0,
        qk_norm: bool = False,
        implementation: str = "auto",
        dtype,
        rngs: nnx.Rngs,
    ):
        heads = (num_heads, width // num_heads)
        options = dict(dtype=dtype, kernel_init=truncated_normal, rngs=rngs)
        self.query = nnx.LinearGeneral(width, heads, **options)
        self.key = nnx.LinearGeneral(width, heads, **options)
        self.value = nnx.LinearGeneral(width, heads, **options)
        self.out = nnx.LinearGeneral(heads, width, axis=(-2, -1), **options)
        self.dropout = dropout
        self.implementation = None if implementation == "auto" else implementation
        self.query_norm = layer_norm(heads[1], dtype=dtype, rngs=rngs) if qk_norm else None
        self.key_norm = layer_norm(heads[1], dtype=dtype, rngs=rngs) if qk_norm else None

    def __call__(
        self,
        x: Float[Array, "B N D"],
        *,
        bias: Float[Array, "#B h N N"] | None = None,
        rng: Rng = None,
        with_maps: bool = False,
    ) -> tuple[Float[Array, "B N D"], dict[str, Float[Array, "B h N N"]]]:
        """Returns the output and, if requested, 'attention_maps'; `bias` is added to the logits."""
        query, key, value = self.query(x), self.key(x), self.value(x)
        if self.query_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if bias is not None and self.implementation == "cudnn":
            bias = bias.astype(query.dtype)  # cuDNN requires it; elsewhere logits are float32
        y = jax.nn.dot_product_attention(
            query, key, value, bias=bias, implementation=self.implementation
        )
        maps = {"attention_maps": _attention_maps(query, key, bias)} if with_maps else {}
        return dropout(self.out(y), self.dropout, rng), maps


def _attention_maps(query, key, bias):
    """Computes the maps separately, in float32, since fused kernels do not return them."""
    query = query.astype(jnp.float32) * query.shape[-1] ** -0.5
    logits = jnp.einsum("bnhd,bmhd->bhnm", query, key.astype(jnp.float32))
    return jax.nn.softmax(logits if bias is None else logits + bias, axis=-1)


class Mlp(nnx.Module):
    """Two linear layers with an exact GELU between them."""

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        dropout: float = 0.0,
        kernel_init: nnx.Initializer = truncated_normal,
        bias_init: nnx.Initializer = nnx.initializers.zeros,
        dtype,
        rngs: nnx.Rngs,
    ):
        options = dict(dtype=dtype, kernel_init=kernel_init, bias_init=bias_init, rngs=rngs)
        self.fc1 = nnx.Linear(width, hidden, **options)
        self.fc2 = nnx.Linear(hidden, width, **options)
        self.dropout = dropout

    def __call__(self, x: Float[Array, "*B D"], *, rng: Rng = None) -> Float[Array, "*B D"]:
        """Applies both layers, each followed by dropout."""
        rngs = (None, None) if rng is None else jax.random.split(rng)
        hidden = dropout(jax.nn.gelu(self.fc1(x), approximate=False), self.dropout, rngs[0])
        return dropout(self.fc2(hidden), self.dropout, rngs[1])


class PreNormBlock(nnx.Module):
    """A residual block: x + mix(norm1(x)), then x + mlp(norm2(x)).

    A subclass creates `norm1`, `norm2` and `mlp` and defines `mix`.

    Attributes:
      mix_name: Name of the output of `mix` among the block's intermediates.
      scale1: Trained factor [D] on the output of `mix` (Touvron et al. 2021), or None.
      scale2: Trained factor [D] on the output of `mlp`, or None.
    """

    mix_name: ClassVar[str]
    scale1: nnx.Param | None = None
    scale2: nnx.Param | None = None

    def mix(
        self, x: Float[Array, "B *grid D"], *, rng: Rng, with_maps: bool
    ) -> tuple[Float[Array, "B *grid D"], dict[str, Array]]:
        """Mixes tokens; returns the result and further intermediates such as maps."""
        raise NotImplementedError

    def __call__(
        self,
        x: Float[Array, "B *grid D"],
        *,
        drop_path_rate: Float[Array, ""],
        rng: Rng = None,
        with_maps: bool = False,
        **mix_options,
    ) -> tuple[Float[Array, "B *grid D"], dict[str, Array]]:
        """Returns the block's output and its intermediates by name."""
        rngs = (None,) * 4 if rng is None else jax.random.split(rng, 4)
        mixed, maps = self.mix(self.norm1(x), rng=rngs[0], with_maps=with_maps, **mix_options)
        mixed = _scale_channels(mixed, self.scale1)
        x = x + drop_path(mixed, drop_path_rate, rngs[1])
        hidden = _scale_channels(self.mlp(self.norm2(x), rng=rngs[2]), self.scale2)
        x = x + drop_path(hidden, drop_path_rate, rngs[3])
        return x, {self.mix_name: mixed, "mlp": hidden, "output": x} | maps


def _scale_channels(x, scale):
    if scale is None:
        return x
    return x * scale[...].astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))


class Block(PreNormBlock):
    """A pre-norm transformer block.

    Args:
      width: D.
      num_heads: h.
      mlp_ratio: Hidden width of the MLP over D.
      dropout: Rate after the attention projection and both MLP layers.
      layer_scale: Start value of `scale1` and `scale2`; 0 omits them.
      qk_norm: Whether to apply a LayerNorm to the queries and keys of each head.
      attention_implementation: 'auto' lets JAX choose; 'xla' or 'cudnn'.
      position_bias_rows: Rows of the table `relative_position_bias` [rows, h] for subclasses whose
        `mix` adds it to the logits; 0 omits it.
      epsilon: LayerNorm epsilon.
      dtype: Type of the computation; parameters are float32.
      rngs: Its `params` stream draws the start values.
    """

    mix_name = "attention"

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        mlp_ratio: float = 4.0,
        dropout: float = 0.0,
        layer_scale: float = 0.0,
        qk_norm: bool = False,
        attention_implementation: str = "auto",
        position_bias_rows: int = 0,
        epsilon: float = 1e-6,
        dtype,
        rngs: nnx.Rngs,
    ):
        options = dict(dtype=dtype, rngs=rngs)
        self.norm1 = layer_norm(width, epsilon=epsilon, **options)
        self.attention = Attention(
            width,
            num_heads,
            dropout=dropout,
            qk_norm=qk_norm,
            implementation=attention_implementation,
            **options,
        )
        if position_bias_rows:
            table = truncated_normal(rngs.params(), (position_bias_rows, num_heads))
            self.relative_position_bias = nnx.Param(table)
        self.norm2 = layer_norm(width, epsilon=epsilon, **options)
        self.mlp = Mlp(width, int(width * mlp_ratio), dropout=dropout, **options)
        self.layer_scale = layer_scale
        if layer_scale:
            self.scale1 = nnx.Param(jnp.full((width,), layer_scale))
            self.scale2 = nnx.Param(jnp.full((width,), layer_scale))

    def mix(self, x, *, rng, with_maps):
        """Attends to all tokens [B, N, D]."""
        return self.attention(x, rng=rng, with_maps=with_maps)

    def sizes(self) -> dict[str, Any]:
        """Returns the sizes of a stack of these blocks, named as in `AttentionSite`."""
        depth, width, num_heads, head_dim = self.attention.query.kernel.shape
        return dict(
            width=width,
            num_heads=num_heads,
            head_dim=head_dim,
            num_layers=depth,
            qk_scale=head_dim**-0.5,
        )

    def set_weights(self, weights: AttentionWeights) -> None:
        """Replaces the weights of a stack of these blocks by those that a scheme sets."""
        if self.attention.query_norm is not None and weights.filter_index is not None:
            raise InputError(
                "config.model.qk_norm=True does not fit this attention_init, which solves for "
                "attention maps: the norm would rescale its queries and keys. Set qk_norm=False, "
                "or config.attention_init.name='mimetic' or 'default'"
            )
        for name in ("query", "key", "value", "out"):
            kernel = getattr(weights, name)
            if kernel is not None:
                getattr(self.attention, name).kernel[...] = kernel
        if weights.bias is not None:
            self.relative_position_bias[...] = weights.bias


REMAT_POLICIES = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


def make_stack(make_block, depth: int, rngs: nnx.Rngs):
    """Returns `depth` blocks, each made by `make_block(rngs=...)`, as one with a layer axis."""
    layer_rngs = jax.random.split(rngs.params(), depth)
    return jax.vmap(lambda rng: make_block(rngs=nnx.Rngs(rng)))(layer_rngs)


def run_stack(
    blocks: nnx.Module,
    x: Float[Array, "B *grid D"],
    *,
    drop_path_rates: Float[Array, " L"],
    rng: Rng,
    unroll: int,
    remat: str,
    cycle: Sequence[Mapping[str, Any]] = ({},),
    **options,
) -> tuple[Float[Array, "B *grid D"], dict[str, Array]]:
    """Runs a stack of blocks under `lax.scan`, so that deep models compile as fast as shallow ones.

    Blocks may update their `nnx.BatchStat` variables in training.

    Args:
      blocks: The stack, from `make_stack`; a block is called as
        `block(x, drop_path_rate=..., rng=..., **options) -> (x, intermediates)`.
      x: Input of the first block.
      drop_path_rates: One for each block.
      rng: Split among the blocks; None in evaluation.
      unroll: Steps of the scan to unroll; 0 unrolls all, for faster code that compiles longer.
      remat: What a step keeps for the gradient: 'none' keeps everything, 'dots' the outputs of its
        linear layers, 'full' only its input. The rest is recomputed, which saves memory.
      cycle: Further static arguments of successive blocks, repeated along the stack. One cycle is
        one step of the scan.
      **options: Further arguments of all blocks.

    Returns:
      The output of the last block, and the intermediates with a leading layer axis.
    """
    depth, period = len(drop_path_rates), len(cycle)

    def run_block(x, layer, static):
        block, rate, rng = layer
        x, out = block(x, drop_path_rate=rate, rng=rng, **static, **options)
        # The scan passes a copy of each block, so updated statistics are returned.
        return x, (out, nnx.state(block, nnx.BatchStat))

    def step(x, layers):
        outs = []
        for i, static in enumerate(cycle):
            x, out = run_block(x, _layer(layers, i), static)
            outs.append(out)
        return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outs)

    if REMAT_POLICIES[remat] is not None:
        step = jax.checkpoint(step, policy=REMAT_POLICIES[remat], prevent_cse=False)
    rngs = None if rng is None else jax.random.split(rng, depth)
    layers, whole = (blocks, drop_path_rates, rngs), depth - depth % period
    steps = jax.tree.map(
        lambda leaf: leaf[:whole].reshape(whole // period, period, *leaf.shape[1:]), layers
    )
    x, outs = jax.lax.scan(step, x, steps, unroll=unroll or True)
    outs = jax.tree.map(lambda leaf: leaf.reshape(whole, *leaf.shape[2:]), outs)
    for i in range(whole, depth):  # an incomplete last cycle
        x, last = run_block(x, _layer(layers, i), cycle[i - whole])
        outs = jax.tree.map(lambda a, b: jnp.concatenate([a, b[None]]), outs, last)
    out, statistics = outs
    if rng is not None:
        nnx.update(blocks, statistics)
    return x, out


def _layer(layers, index):
    return jax.tree.map(lambda leaf: leaf[index], layers)


class Model(nnx.Module):
    """Base class of the model families.

    A family defines `default_config`, `sites` and
    `__call__(images, *, rng=None, with_maps=False) -> (logits, intermediates)`.

    Args:
      image_size: Side of the input in pixels, or (height, width).
      channels: Input channels.
      attention_init: Scheme for the start values of the stacks; None keeps the family's own.
      rngs: Its `params` stream draws the start values.
      **fields: Any field of `default_config`.

    Attributes:
      VARIANTS: Named sizes of the family, as changes to `default_config`.

    Raises:
      InputError: The sizes do not fit each other.
    """

    VARIANTS: ClassVar[Mapping[str, dict[str, Any]]] = {}

    @staticmethod
    def default_config() -> dict[str, Any]:
        """Returns the fields of `config.model` with their defaults, and their `image_size`."""
        raise NotImplementedError

    def sites(self) -> dict[str, Site]:
        """Describes each stack to initialization schemes, by the name of the model's attribute.

        The attribute has a method `set_weights` for what a scheme returns.
        """
        raise NotImplementedError

    def initialize_attention(self, scheme: AttentionInit, rng: PRNGKeyArray) -> SolveReport | None:
        """Replaces the start values of every stack by those of a scheme.

        Args:
          scheme: `(rng, site) -> weights`, such as `attention_init.impulse()`.
          rng: Passed to the scheme; split among the stacks if there are several.

        Returns:
          The report of the scheme's solve, averaged over the stacks; None if it does not solve.

        Raises:
          InputError: The scheme does not fit the model.
        """
        sites = self.sites()
        rngs = [rng] if len(sites) == 1 else jax.random.split(rng, len(sites))
        reports = []
        for (name, site), stack_rng in zip(sites.items(), rngs, strict=True):
            weights = scheme(stack_rng, site)
            getattr(self, name).set_weights(weights)
            self._set_positions(site, weights)
            if getattr(weights, "report", None) is not None:
                reports.append(weights.report)
        if not reports:
            return None
        return jax.tree.map(lambda *values: sum(values) / len(values), *reports)

    def _set_positions(self, site: Site, weights: Weights) -> None:
        positions = getattr(weights, "positions", None)
        if positions is None:
            return
        if not site.positions_trainable:
            raise InputError(
                "the scheme sets the position encoding, but this model has no trainable one: use a "
                "ViT with config.model.positions='learned'"
            )
        # Those of class and register tokens come first and are kept.
        self.positions[...] = self.positions[...].at[-len(positions) :].set(positions)


ACTIVATIONS = {"gelu": functools.partial(jax.nn.gelu, approximate=False), "relu": jax.nn.relu}
CHOICES = {
    "activation": tuple(ACTIVATIONS),
    "spatial_filters": ("trained", "fixed"),
    "positions": ("sincos", "learned"),
    "pool": ("mean", "class_token"),
    "dtype": ("float32", "bfloat16"),
    "attention_implementation": ("auto", "xla", "cudnn"),
    "remat": tuple(REMAT_POLICIES),
}


def check_choices(**fields: str) -> None:
    """Raises `InputError` unless each field of `config.model` is one of its `CHOICES`."""
    for field, value in fields.items():
        if value not in CHOICES[field]:
            choices = ", ".join(CHOICES[field])
            raise InputError(f"config.model.{field}={value!r}: choose one of {choices}")


def image_sides(image_size: int | Sequence[int]) -> tuple[int, int]:
    """Returns (height, width); a single number is both."""
    return (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)


def token_grid(image_size: int | Sequence[int], patch_size: int) -> tuple[int, int]:
    """Returns (rows, cols) of the patches; raises `InputError` if they do not fill the image."""
    height, width = image_sides(image_size)
    if height % patch_size or width % patch_size:
        raise InputError(
            f"config.data.image_size={image_size} is not divisible by "
            f"config.model.patch_size={patch_size}: change one of them"
        )
    return height // patch_size, width // patch_size
