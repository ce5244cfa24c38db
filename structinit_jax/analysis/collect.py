"""Runs models on images and averages their maps, measures and representations."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, UInt8
from ml_collections import ConfigDict

from structinit_jax import evaluate
from structinit_jax.analysis import measures
from structinit_jax.attention_init import ConvSite, Site, TokenMixingSite
from structinit_jax.augment import normalize
from structinit_jax.data.loader import decode_all, stream_indices
from structinit_jax.errors import InputError
from structinit_jax.training.mesh import make_mesh
from structinit_jax.training.state import (
    AbstractModel,
    TrainState,
    abstract_model,
    find_targets,
    initialize_model,
)

BATCH_SIZE = 8  # images at a time, whose maps are in memory together


class Layer(NamedTuple):
    """One layer of a model, averaged over images.

    Attributes:
      name: Number of the layer, from 1. In a model with stages it begins with that of the stage.
      grid: Rows and columns of the N tokens of a map; None without maps.
      token_size: Side of a token in pixels; None if unknown.
      maps: Attention maps of the heads; None without maps.
      filters: Filters of a depthwise convolution; None for other layers.
      measures: Values of the heads [h] by the name of the measure; see `analysis.measures`.
      uniform: Measures of uniform maps.
      stable_rank: Stable rank of the layer's output.
    """

    name: str
    grid: tuple[int, int] | None
    token_size: int | None
    maps: Float[np.ndarray, "h N N"] | None
    filters: Float[np.ndarray, "f f D"] | None
    measures: dict[str, Float[np.ndarray, " h"]]
    uniform: dict[str, float]
    stable_rank: float


class Snapshot(NamedTuple):
    """A model with certain weights, on certain images.

    Attributes:
      name: Initialization and step, for titles.
      quantity: What the maps show, 'attention' or, for token mixing, 'sensitivity'.
      layers: First to last.
      embedding_rank: Stable rank of the first layer's input.
      grams: `measures.centered_gram` over the n images of the first layer's input and of the
        layers' outputs.
    """

    name: str
    quantity: str
    layers: list[Layer]
    embedding_rank: float
    grams: Float[np.ndarray, "P n n"]


class StackSize(NamedTuple):
    """Number of layers of a stack, of heads in each, and the type of their site."""

    num_layers: int
    num_heads: int
    site_type: type


def stack_sizes(model: AbstractModel) -> list[StackSize]:
    """Returns the sizes of a model's stacks without allocating it."""
    sizes = []

    def trace(*weights):
        sites = nnx.merge(model.graphdef, *weights).sites().values()
        sizes.extend(StackSize(s.num_layers, getattr(s, "num_heads", 1), type(s)) for s in sites)

    jax.eval_shape(trace, model.params, model.model_state)
    return sizes


def layer_names(sizes: list[StackSize]) -> list[str]:
    """Returns the names of all layers; see `Layer`."""
    stages = [f"{i + 1}." if len(sizes) > 1 else "" for i in range(len(sizes))]
    pairs = zip(stages, sizes, strict=True)
    return [f"{stage}{i + 1}" for stage, size in pairs for i in range(size.num_layers)]


def read_images(config: ConfigDict, count: int) -> UInt8[np.ndarray, "n H H C"]:
    """Reads training images without augmentation, cropped as for evaluation.

    They are among the first that a run with the config's seed sees: `count`, or all if there are
    fewer, rounded down to whole batches.
    """
    data = config.data
    source = evaluate.open_data(config).split(data.train_split, on_bad_image=data.on_bad_image)
    whole = min(count, len(source)) // BATCH_SIZE * BATCH_SIZE
    if whole < 1:
        raise InputError(
            f"--num_images={count} of the {len(source)} in "
            f"config.data.train_split={data.train_split!r}: needs at least {BATCH_SIZE}"
        )
    wanted = np.zeros(len(source), bool)
    wanted[stream_indices(config.seed, 0, whole, len(source))] = True
    return decode_all(source.select(wanted), data.image_size, data.crop_fraction)[0]


def observe_start(config: ConfigDict, images: np.ndarray) -> Snapshot:
    """Observes a model with its start values."""
    model = abstract_model(config, one_device())
    return Observer(config, model)(initialize_model(config, model), images, step=0)


def observe_run(
    config: ConfigDict, restored: tuple[AbstractModel, TrainState], images: np.ndarray
) -> list[Snapshot]:
    """Observes a run before and after training.

    Args:
      config: Config of the run.
      restored: The run's model on one device and its state, from `evaluate.restore_model`.
      images: Images, uint8 [n, H, W, C].
    """
    model, state = restored
    observer = Observer(config, model)
    before = observer(initialize_model(config, model), images, step=0)
    after = observer((state.params, state.model_state), images, step=int(state.step))
    return [before, compare_filters(before, after)]


def compare_filters(before: Snapshot, after: Snapshot) -> Snapshot:
    """Returns `after` with the measure 'filter_cosine' of each channel, if layers have filters."""
    layers = []
    for old, new in zip(before.layers, after.layers, strict=True):
        if new.filters is not None:
            cosine = measures.filter_cosine(old.filters, new.filters)
            new = new._replace(measures=new.measures | {"filter_cosine": cosine})
        layers.append(new)
    return after._replace(layers=layers)


def one_device() -> jax.sharding.Mesh:
    """Returns the mesh of a single device, on which models are observed."""
    return make_mesh(devices=jax.local_devices()[:1])


class Observer:
    """Observes a model with any weights.

    Args:
      config: Config of the model.
      model: The model, on one device.
    """

    def __init__(self, config: ConfigDict, model: AbstractModel):
        self._config = config
        self._graphdef = model.graphdef
        self._names = layer_names(stack_sizes(model))
        self._targets = find_targets(config, model)
        self._observe_batch = jax.jit(self._observe)

    def __call__(
        self, weights: tuple[Any, Any], images: UInt8[np.ndarray, "n H W C"], step: int
    ) -> Snapshot:
        """Returns averages over images.

        Args:
          weights: Parameters and model state.
          images: Images; n is a multiple of `BATCH_SIZE`.
          step: Training step of the weights.
        """
        total, outputs, ranks = None, [], []
        batches = images.reshape(-1, BATCH_SIZE, *images.shape[1:])
        for batch in batches:
            averages, points = self._observe_batch(weights, batch)
            total = averages if total is None else jax.tree.map(jnp.add, total, averages)
            points = jax.device_get(points)
            ranks.append([measures.stable_rank(point).mean() for point in points])
            outputs.append([point.reshape(BATCH_SIZE, -1) for point in points])
        ranks = np.mean(ranks, axis=0)
        stacks = jax.device_get(jax.tree.map(lambda x: x / len(batches), total))
        gram = jax.jit(measures.centered_gram)
        grams = np.stack([gram(np.concatenate(point)) for point in zip(*outputs, strict=True)])

        model = nnx.merge(self._graphdef, *weights)
        patch_size, layers = self._config.model.get("patch_size"), []
        sites = model.sites()
        for index, (name, site) in enumerate(sites.items()):
            heads, uniform = _summarize(stacks[index], site, self._targets.get(name))
            is_conv = isinstance(site, ConvSite)
            filters = np.asarray(getattr(model, name).spatial.kernel[...]) if is_conv else None
            for i in range(site.num_layers):
                layer = Layer(
                    name=self._names[len(layers)],
                    grid=None if is_conv else site.grid,
                    token_size=patch_size and patch_size * 2**index,
                    maps=None if is_conv else stacks[index]["maps"][i],
                    filters=filters[i] if is_conv else None,
                    measures={key: values[i] for key, values in heads.items()},
                    uniform=uniform,
                    stable_rank=float(ranks[len(layers) + 1]),
                )
                layers.append(layer)
        name = f"{self._config.attention_init.name}, step {step:,}"
        mixes = any(isinstance(site, TokenMixingSite) for site in sites.values())
        quantity = "sensitivity" if mixes else "attention"
        return Snapshot(name, quantity, layers, float(ranks[0]), grams)

    def _observe(self, weights, images):
        """Returns averages over a batch, the first layer's input and all outputs [B, N, D]."""
        data, model = self._config.data, nnx.merge(self._graphdef, *weights)
        sites = model.sites()
        has_maps = not any(isinstance(site, ConvSite) for site in sites.values())
        images = normalize(images, tuple(data.mean), tuple(data.std))
        out = model(images, with_maps=has_maps)[1]
        first = next(out[name] for name in ("embedded", "stem", "patch_embedding") if name in out)
        points, stacks = [first], []
        for (name, site), stack in zip(sites.items(), out.get("stages", [out]), strict=True):
            points.extend(stack["blocks"]["output"])
            stacks.append(_average_maps(stack["blocks"], site, self._targets.get(name)))
        prefix = getattr(model, "num_prefix", 0)
        return stacks, [_flatten_grid(point)[:, prefix:] for point in points]


def _flatten_grid(x: Float[Array, "B *grid D"]) -> Float[Array, "B N D"]:
    return x.reshape(len(x), -1, x.shape[-1]).astype(jnp.float32)


def _average_maps(blocks, site: Site, targets) -> dict[str, Array]:
    """Averages maps [L, h, N, N] and measures that are not linear in them over images."""
    if isinstance(site, ConvSite):
        return {}
    maps = comparable_maps(blocks, site)
    averages = dict(maps=maps.mean(axis=0), entropy=measures.mean_entropy(maps))
    if targets is not None:
        index, filters = targets
        averages |= measures.measure_against_targets(maps, jnp.asarray(filters[index]))
    return averages


def comparable_maps(blocks: dict[str, Array], site: Site) -> Float[Array, "B L h N N"]:
    """Returns maps over the tokens of a site's grid, whose rows sum to 1.

    Class and register tokens are left out. Windows count as images. For token mixing, a map is the
    share of each input token in the absolute derivatives of an output token with respect to all
    input tokens; it has one head. The row of an output token that depends on none is 0, such as
    that of a token at the border whose impulse is off the grid.
    """
    if isinstance(site, TokenMixingSite):
        maps = jnp.abs(blocks["token_maps"])[:, :, None]
    else:
        maps = blocks["attention_maps"]
    maps = maps[..., -site.num_tokens :, -site.num_tokens :]
    maps = maps.reshape(len(maps), -1, *maps.shape[-3:])
    maps = jnp.moveaxis(maps, 1, 0)
    total = maps.sum(axis=-1, keepdims=True)
    return maps / jnp.where(total > 0, total, 1)


def _summarize(averages, site: Site, targets) -> tuple[dict, dict]:
    """Returns all measures of a stack [L, h], and those of uniform maps."""
    if isinstance(site, ConvSite):
        return {}, {}
    averages = dict(averages)
    heads = measures.measure_mean_maps(averages.pop("maps"), site.grid) | averages
    flat = jnp.full((1, site.num_tokens, site.num_tokens), 1 / site.num_tokens)
    uniform = measures.measure_mean_maps(flat, site.grid)
    uniform = {k: v for k, v in uniform.items() if k not in ("neighbor_row", "neighbor_column")}
    uniform["entropy"] = measures.mean_entropy(flat)
    if targets is not None:
        every = jnp.asarray(targets[1])
        against = measures.measure_against_targets(jnp.broadcast_to(flat, every.shape)[None], every)
        uniform["target_mass"] = against["target_mass"].mean()
    return jax.device_get(heads), {name: float(value.squeeze()) for name, value in uniform.items()}
