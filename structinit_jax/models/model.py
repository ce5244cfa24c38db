"""The base class of the model families, and stacks of identical blocks.

Modules hold parameters and no random state, so they are plain pytrees; a call takes a random key.
A stack of blocks is a single block module whose variables have a leading layer axis.
"""

from __future__ import annotations  # so that signatures show the names of checked types

import inspect
import operator
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from structinit_jax.attention_init import AttentionInit, AttentionWeights, Site, Weights
from structinit_jax.attention_init.sites import check_shape, draw_stacks
from structinit_jax.errors import Check, PositiveInt, require
from structinit_jax.models.layers import RESIDUAL, Rng, StackedBlock, set_weight

_KEEP_LINEAR = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
_KEEP_NAMED = jax.checkpoint_policies.save_only_these_names(RESIDUAL)
_COSTLY = ("conv_general_dilated", "dot_product_attention_fwd_wrapper")


def _keep_costly(primitive, *args, **params):
    """Keeps the arrays that are small or costly to compute; the rest is faster to recompute.

    It keeps the outputs of linear layers, convolutions and cuDNN's attention, and arrays marked by
    `layers.keep`, but no products inside attention, which are as large as its maps.
    """
    kept = _KEEP_LINEAR(primitive, *args, **params) or _KEEP_NAMED(primitive, *args, **params)
    return kept or primitive.name in _COSTLY


REMAT_POLICIES = {  # The first is the fastest, the last needs the least memory.
    "none": _keep_costly,
    "dots": _KEEP_LINEAR,
    "full": jax.checkpoint_policies.nothing_saveable,
}

ImageSize = PositiveInt | Sequence[PositiveInt]
Dtype = Annotated[
    DTypeLike,
    Check("'float32' or 'bfloat16'", lambda x: jnp.dtype(x).name in ("float32", "bfloat16")),
]
Remat = Literal["none", "dots", "full"]


class Model(nnx.Module):
    """Base class of the model families.

    A family defines a constructor, `sites` and `__call__`. In `VARIANTS`, it can name sets of
    changes to the defaults. The constructor takes the family's own arguments and these:

    Args:
      image_size: Side of the images in pixels, or (height, width).
      channels: Number of channels of the images.
      num_classes: Number of classes.
      patch_size: Side of a patch in pixels.
      width: Number of channels D of a token.
      drop_path: Stochastic depth rate of the last block, rising linearly from 0 in the first; in
        MLP-Mixer, of every block.
      base_init: Initial weights: 'timm' for those of timm's model, or 'pytorch' for the defaults of
        PyTorch's layers, which timm keeps in ConvMixer.
      dtype: Type of the computation, float32 or bfloat16. Parameters are float32.
      remat: How much the training step recomputes to save memory: 'none' only what is cheap, such
        as norms and GELU, 'dots' attention too, 'full' everything in a block.
      attention_init: Scheme for the initial weights of the stacks. None keeps the family's own.
      rngs: Random streams. Initial weights are drawn from the stream `params`.

    Raises:
      InputError: An argument is invalid, the sizes are inconsistent, or the scheme does not fit.
    """

    VARIANTS: ClassVar[Mapping[str, dict[str, Any]]] = {}

    def __init_subclass__(cls, **options):
        """Sets what `help` shows: the signature, and the shared arguments after the family's own.

        NNX's metaclass would show (*args, **kwargs) as the signature.
        """
        super().__init_subclass__(**options)
        _, *parameters = inspect.signature(cls.__init__).parameters.values()
        cls.__signature__ = inspect.Signature(parameters)
        own = inspect.cleandoc(cls.__doc__ or "")
        if "\nArgs:\n" in own:
            shared = inspect.cleandoc(Model.__doc__).partition("\nArgs:\n")[2]
            cls.__doc__ = f"{own}\n{shared}"

    @classmethod
    def default_config(cls) -> dict[str, Any]:
        """Returns the fields of `config.model`: the constructor's arguments that have a default.

        If it takes further keyword arguments, those of its base class are included.
        `attention_init` is not included because it has its own section in the config.
        """
        fields: dict[str, Any] = {}
        for owner in cls.__mro__:
            parameters = inspect.signature(owner.__init__).parameters.values()
            fields = {p.name: p.default for p in parameters if p.default is not p.empty} | fields
            if all(p.kind is not p.VAR_KEYWORD for p in parameters):
                break
        fields.pop("attention_init", None)
        return fields

    def sites(self) -> dict[str, Site]:
        """Returns a site for each stack that a scheme initializes.

        The key is the path of the stack, such as 'blocks' or 'stage1/blocks'. The stack has a
        `set_weights` method that takes what a scheme returns for the site. A scheme can also set
        the model's trained `positions` [T, D], class token first, which all stacks share, and for a
        single stack the bias of its `patch_embedding`.
        """
        return {}

    def __call__(
        self, images: Float[Array, "B H W C"], *, rng: Rng = None, with_maps: bool = False
    ) -> tuple[Float[Array, "B classes"], dict[str, Any]]:
        """Computes the logits of normalized images, and intermediates by name.

        Call it under `jit`: outside, every call compiles the stacks again.

        Logits are float32 for every dtype, because the loss exponentiates them. `rng` is the random
        key for drop path in training, None in evaluation; `model.train()` has no effect.
        `with_maps` adds attention maps, whose memory grows with the square of the number of tokens.
        Analysis of a stack requires 'output' and 'attention_maps', with a layer axis, in the
        intermediate 'blocks'; if there are several stacks, 'stages' has a dict with 'blocks' for
        each, in the order of `sites`.
        """
        raise NotImplementedError

    def stacks(self) -> dict[str, StackedBlock]:
        """Returns the stacks of blocks (`make_stack`) by path, such as 'stage1/blocks'.

        All arrays below these paths, and no others, have a leading layer axis.
        """
        return {
            "/".join(map(str, path)): node
            for path, node in nnx.iter_graph(self)
            if isinstance(node, StackedBlock) and node.is_stack
        }

    def decays(self, path: Sequence[str | int]) -> bool:
        """Returns whether weight decay applies to a parameter, given its path in the model.

        By default, it applies to parameters named 'kernel', as weights are in Flax's layers, and
        not to biases, norms, positions and tokens. An array's rank does not tell these apart: the
        biases of a stack of attention layers have three axes.
        """
        return path[-1] == "kernel"

    def initialize_attention(self, scheme: AttentionInit, rng: PRNGKeyArray) -> dict[str, Weights]:
        """Replaces the initial weights of every stack with those of a scheme.

        Some schemes also scale learned positions. A later scheme does not undo this, so use a new
        model for each scheme. Returns what the scheme returned for each stack, by name. Raises
        `InputError` if the scheme does not fit the model.
        """
        sites = self.sites()
        drawn = dict(zip(sites, draw_stacks(scheme, list(sites.values()), rng), strict=True))
        self._set_embedding(sites, drawn)
        for path, weights in drawn.items():
            operator.attrgetter(path.replace("/", "."))(self).set_weights(weights)
        return drawn

    def _set_embedding(self, sites: Mapping[str, Site], drawn: Mapping[str, Weights]) -> None:
        """Sets the positions and the bias of the patch embedding, which all stacks share."""

        def setters(*fields):
            """Returns the stacks whose weights have one of the fields."""
            return [
                path
                for path, weights in drawn.items()
                if any(getattr(weights, field, None) is not None for field in fields)
            ]

        if paths := setters("patch_bias"):
            needs = "a single stack, because the scheme draws a bias of patch_embedding for each"
            require("sites", paths, needs, len(paths) == 1)
            set_weight(self.patch_embedding.bias, "patch_bias", drawn[paths[0]].patch_bias)
        if paths := setters("positions", "position_scale"):
            needs = "stacks of one grid and width, because they set the one array `positions`"
            same = len({(sites[path].grid, sites[path].width) for path in paths}) == 1
            require("sites", paths, needs, same)
            self._set_positions(sites[paths[0]], drawn[paths[0]])

    def _set_positions(self, site: Site, weights: AttentionWeights) -> None:
        table = getattr(self, "positions", None)
        shape = getattr(table, "shape", ())
        needs = f"an nnx.Param of {site.num_tokens} or more rows [{site.width}], image tokens last"
        fits = shape[1:] == (site.width,) and shape[0] >= site.num_tokens
        require(f"{type(self).__name__}.positions", table, needs, fits)
        if weights.positions is not None:
            check_shape("positions", weights.positions, (site.num_tokens, site.width))
            # The position of a class token comes first and is kept.
            image_tokens = table[...].at[-site.num_tokens :]
            table[...] = image_tokens.set(jnp.asarray(weights.positions, table.dtype))
        if weights.position_scale is not None:
            table[...] = weights.position_scale * table[...]


class InitStream(nnx.RngStream):
    """An `nnx.RngStream` for the creation of a model, which counts its keys in Python.

    Flax 0.12.8 counts them in an array. When JAX traces the creation of a model, every key then
    looks up an attribute that tracers lack, for which JAX formats the traced program: most of the
    trace. With Flax 0.12.12, `nnx.Rngs` is as fast.
    """

    num_keys: int = 0

    def __call__(self) -> PRNGKeyArray:
        """Returns the next key."""
        rng = jax.random.fold_in(self.key[...], self.num_keys)
        self.num_keys += 1
        return rng

    # Streams that modules keep, such as those of `nnx.Dropout`, must count from step to step.

    def fork(self, *, split: int | tuple[int, ...] | None = None) -> nnx.RngStream:
        """Returns a stream of the next key, or of as many keys as `split` says."""
        return nnx.RngStream(self(), tag=self.tag) if split is None else self.split(split)

    def split(self, k: int | tuple[int, ...]) -> nnx.RngStream:
        """Returns a stream of k keys."""
        return nnx.RngStream(jax.random.split(self(), k), tag=self.tag)


def make_rngs(rng: PRNGKeyArray) -> nnx.Rngs:
    """Returns `nnx.Rngs(rng)`, but faster to trace with Flax 0.12.8."""
    rngs = nnx.Rngs(rng)
    rngs.default = InitStream(rng, tag="default")
    return rngs


def make_stack(block: type[StackedBlock], depth: int, *, rngs: nnx.Rngs, **options) -> StackedBlock:
    """Returns `depth` blocks, each made by `block(**options, rngs=...)`, as one module."""
    layer_rngs = jax.random.split(rngs.params(), depth)
    blocks = jax.vmap(lambda rng: block(**options, rngs=make_rngs(rng)))(layer_rngs)
    blocks.is_stack = True
    return blocks


def run_stack(
    blocks: StackedBlock,
    x: Float[Array, "B *grid D"],
    *,
    remat: Remat,
    drop_path_rates: Sequence[float],
    rng: Rng,
    cycle: Sequence[Mapping[str, Any]] = ({},),
    **options,
) -> tuple[Float[Array, "B *grid D"], dict[str, Array]]:
    """Runs a stack of blocks with `lax.scan` or, on CUDA devices, one by one.

    A scan compiles deep models as fast as shallow ones, but its copies into and out of stacked
    arrays make a ViT's training step take 17 to 35 % longer on an H100. A stack with a `gather` is
    scanned on CUDA devices too, which bounds memory.

    A block is called as `block(x, drop_path_rate=..., rng=..., **options) -> (x, intermediates)`,
    with a rate of None if all are zero. In training, it can update variables, except `nnx.Param`s.
    `cycle` holds static arguments of successive blocks and repeats along the stack; a step of the
    scan runs one cycle. The returned intermediates have a leading layer axis.

    `remat` selects what a step keeps for the gradient instead of recomputing it: 'none' keeps
    what is costly to compute, 'dots' the outputs of linear layers, and 'full' only the step's
    input. All give the same gradients up to rounding.
    """
    depth = len(drop_path_rates)
    period = len(cycle)
    whole = depth - depth % period  # Number of blocks in complete cycles.
    rates = jnp.asarray(drop_path_rates, jnp.float32) if any(drop_path_rates) else None
    rngs = None if rng is None else jax.random.split(rng, depth)
    layers = (blocks, rates, rngs)

    def run_cycle(x, layers, cycle=cycle):
        outs = []
        for i, static in enumerate(cycle):
            block, rate, block_rng = jax.tree.map(operator.itemgetter(i), layers)
            if blocks.gather is not None:
                block = blocks.gather(block)
            x, out = block(x, drop_path_rate=rate, rng=block_rng, **static, **options)
            # The scan passes a copy of each block, so what it may have updated is returned.
            outs.append((out, nnx.state(block, nnx.Not(nnx.Param))))
        return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outs)

    policy = REMAT_POLICIES[remat]

    def scan(x, steps):
        # XLA can merge what the backward pass recomputes with the forward pass only outside loops,
        # such as in a scan of one step, which it unrolls.
        step = jax.checkpoint(run_cycle, policy=policy, prevent_cse=whole == period)
        return jax.lax.scan(step, x, steps)

    def unroll(x, steps):
        step = jax.checkpoint(run_cycle, policy=policy, prevent_cse=remat != "none")
        # The gradient of learned positions is a sum over the batch. For it, XLA would give the
        # tokens of all blocks a layout that products and attention must transpose. `jax.export`,
        # which evaluation may use, refuses the constraint.
        if rng is not None:
            # XLA does not partition the constraint: it would gather the batch on every device.
            x = _row_major(x) if blocks.on_shards is None else blocks.on_shards(_row_major)(x)
        return jax.lax.scan(step, x, steps, unroll=True)

    steps = jax.tree.map(
        lambda leaf: leaf[:whole].reshape(whole // period, period, *leaf.shape[1:]), layers
    )
    if blocks.gather is None:
        x, outs = jax.lax.platform_dependent(x, steps, cuda=unroll, default=scan)
    else:
        x, outs = scan(x, steps)
    outs = jax.tree.map(lambda leaf: leaf.reshape(whole, *leaf.shape[2:]), outs)
    if whole < depth:  # The last cycle is incomplete.
        rest = jax.tree.map(lambda leaf: leaf[whole:], layers)
        x, last = run_cycle(x, rest, cycle[: depth - whole])
        outs = jax.tree.map(lambda *parts: jnp.concatenate(parts), outs, last)
    out, variables = outs
    if rng is not None:
        nnx.update(blocks, variables)
    return x, out


def _row_major(x):
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))
