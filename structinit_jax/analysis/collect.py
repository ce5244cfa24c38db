"""Runs models on images and averages their maps, measures and representations."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, UInt8
from ml_collections import ConfigDict

from structinit_jax.analysis import measures
from structinit_jax.attention_init import ConvSite, Site, TokenMixingSite
from structinit_jax.augment import normalize
from structinit_jax.config import make_attention_init
from structinit_jax.data.loader import decode_all, stream_indices
from structinit_jax.errors import InputError
from structinit_jax.run import Run
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
      maps: Attention maps of the heads; None without maps.
      filters: Filters of a depthwise convolution; None for other layers.
      measures: Values of the heads [h] by the name of the measure, see `analysis.measures`; of the
        layer's output, 'stable_rank' and 'shift_distance' [1].
      uniform: Measures of uniform maps.
    """

    name: str
    grid: tuple[int, int] | None
    maps: Float[np.ndarray, "h N N"] | None
    filters: Float[np.ndarray, "f f D"] | None
    measures: dict[str, Float[np.ndarray, " h"]]
    uniform: dict[str, float]


class Snapshot(NamedTuple):
    """A model with certain weights, on certain images.

    Attributes:
      name: Initialization and step, for titles.
      quantity: What the maps show, 'attention' or, for token mixing, 'sensitivity'.
      layers: First to last.
    """

    name: str
    quantity: str
    layers: list[Layer]


def read_images(config: ConfigDict, count: int) -> UInt8[np.ndarray, "n H H C"]:
    """Reads training images without augmentation, cropped as for evaluation.

    They are among the first that a run with the config's seed sees: `count`, or all if there are
    fewer, rounded down to whole batches.
    """
    data, source = config.data, Run(config).train_source
    whole = min(count, len(source)) // BATCH_SIZE * BATCH_SIZE
    if whole < 1:
        raise InputError(
            f"--num_images={count} of the {len(source)} in "
            f"config.data.train_split={data.train_split!r}: needs at least {BATCH_SIZE}"
        )
    wanted = np.sort(stream_indices(config.seed, 0, whole, len(source)))
    return decode_all(source.select(wanted), data.image_size, data.crop_fraction)[0]


def observe_start(config: ConfigDict, images: UInt8[np.ndarray, "n H H C"]) -> Snapshot:
    """Observes a model with its start values."""
    observer = Observer(config, abstract_model(config.model, config.data, one_device()))
    return observer(observer.start_values(), images, step=0)


def observe_run(
    config: ConfigDict,
    restored: tuple[AbstractModel, TrainState],
    images: UInt8[np.ndarray, "n H H C"],
) -> list[Snapshot]:
    """Observes a run before and after training.

    Args:
      config: Config of the run.
      restored: The run's model on one device and its state, from `evaluate.restore_model`.
      images: Images to average over.
    """
    model, state = restored
    observer = Observer(config, model)
    before = observer(observer.start_values(), images, step=0)
    return [before, observer((state.params, state.model_state), images, step=int(state.step))]


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
        self._config, self._model = config, model
        self._scheme = make_attention_init(config)
        self._patch_size = config.model.get("patch_size")
        self._targets = {}
        if not config.start_from:
            self._targets = find_targets(model, self._scheme, config.seed)
        self._observe_batch = jax.jit(self._observe)

    def start_values(self) -> tuple[Any, Any]:
        """Returns the parameters and the model state that training starts with."""
        config = self._config
        fields = config.seed, config.start_from, config.attention_init.name
        return initialize_model(self._model, self._scheme, *fields)[:2]

    def __call__(
        self, weights: tuple[Any, Any], images: UInt8[np.ndarray, "n H H C"], step: int
    ) -> Snapshot:
        """Returns averages over images.

        Args:
          weights: Parameters and model state.
          images: Images; n is a multiple of `BATCH_SIZE`.
          step: Training step of the weights.

        Raises:
          InputError: The model has no layers to observe.
        """
        model = nnx.merge(self._model.graphdef, *weights)
        if not (sites := model.sites()):
            raise InputError(f"config.model.name={self._config.model.name!r} has no sites()")
        totals, ranks = [], []
        for batch in images.reshape(-1, BATCH_SIZE, *images.shape[1:]):
            total, outputs = jax.device_get(self._observe_batch(weights, batch))
            totals.append(total)
            matrices = [output.reshape(len(output), -1, output.shape[-1]) for output in outputs]
            ranks.append([measures.stable_rank(matrix).mean() for matrix in matrices])
        stacks, shifts = jax.tree.map(lambda *values: np.mean(values, axis=0), *totals)
        ranks = np.mean(ranks, axis=0)

        layers = []
        for index, (stack, site) in enumerate(sites.items()):
            maps, heads, uniform = _summarize(stacks[index], site, self._targets.get(stack))
            is_conv = isinstance(site, ConvSite)
            filters = np.asarray(getattr(model, stack).spatial.kernel[...]) if is_conv else None
            for i in range(site.num_layers):
                values = {key: value[i] for key, value in heads.items()}
                values["stable_rank"] = ranks[len(layers), None]
                if (shift := shifts[len(layers)]) is not None:
                    values["shift_distance"] = shift[None]
                layer = Layer(
                    name=f"{index + 1}.{i + 1}" if len(sites) > 1 else str(i + 1),
                    grid=None if is_conv else site.grid,
                    maps=None if is_conv else maps[i],
                    filters=filters[i] if is_conv else None,
                    measures=values,
                    uniform=uniform,
                )
                layers.append(layer)
        mixes = any(isinstance(site, TokenMixingSite) for site in sites.values())
        name = f"{self._config.attention_init.name}, step {step:,}"
        return Snapshot(name, "sensitivity" if mixes else "attention", layers)

    def _observe(self, weights, images):
        """Returns averages over a batch, and the outputs of all layers."""
        model = nnx.merge(self._model.graphdef, *weights)
        sites = model.sites()
        has_maps = not any(isinstance(site, ConvSite) for site in sites.values())
        out = self._run(model, images, with_maps=has_maps)
        stacks = [
            _average_maps(stage["blocks"], site, self._targets.get(name))
            for stage, (name, site) in zip(out.get("stages", [out]), sites.items(), strict=True)
        ]
        outputs = self._outputs(out, images)
        return (stacks, self._shift_distances(model, images, outputs)), outputs

    def _run(self, model, images, with_maps=False):
        data = self._config.data
        images = normalize(images, tuple(data.mean), tuple(data.std))
        return model(images, with_maps=with_maps)[1]

    def _outputs(self, out, images):
        """Returns the outputs of all layers, [B, R, C, D] (without a grid R = 1)."""
        size, grids = self._patch_size, []
        for stage, stack in enumerate(out.get("stages", [out])):
            for output in stack["blocks"]["output"]:
                tokens = output.reshape(len(output), -1, output.shape[-1]).astype(jnp.float32)
                rows, columns = 1, tokens.shape[1]
                if size:
                    rows, columns = (side // (size * 2**stage) for side in images.shape[1:3])
                # Without class and register tokens, which come first.
                grids.append(tokens[:, -rows * columns :].reshape(len(output), rows, columns, -1))
        return grids

    def _shift_distances(self, model, images, outputs):
        """Returns `measures.shift_distance` of each layer, None if the patch size is not known.

        Images are shifted by one token of the last stage, to the right and down.
        """
        if not self._patch_size:
            return [None] * len(outputs)
        size, found = images.shape[1] // outputs[-1].shape[1], []
        for axis in (1, 2):
            shifted = self._outputs(self._run(model, jnp.roll(images, size, axis)), images)
            found.append([])
            for output, moved in zip(outputs, shifted, strict=True):
                tokens = size * output.shape[axis] // images.shape[axis]
                shift = (tokens, 0) if axis == 1 else (0, tokens)
                found[-1].append(measures.shift_distance(output, moved, shift))
        return [
            None if down is None else (down + right) / 2 for down, right in zip(*found, strict=True)
        ]


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
    input tokens; it has one head. Output tokens that depend on no input get a zero row, such as a
    token at the border whose impulse is off the grid.
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


def _summarize(averages, site: Site, targets):
    """Returns the maps of a stack [L, h, N, N], all measures [L, h], and those of uniform maps."""
    if isinstance(site, ConvSite):
        return None, {}, {}
    heads = dict(averages)
    maps = heads.pop("maps")
    heads = measures.measure_mean_maps(maps, site.grid) | heads
    flat = jnp.full((1, site.num_tokens, site.num_tokens), 1 / site.num_tokens)
    uniform = measures.measure_mean_maps(flat, site.grid)
    uniform["entropy"] = measures.mean_entropy(flat)
    if targets is not None:
        every = jnp.asarray(targets[1])
        against = measures.measure_against_targets(jnp.broadcast_to(flat, every.shape)[None], every)
        uniform["target_mass"] = against["target_mass"].mean()
    return maps, jax.device_get(heads), {name: float(x.squeeze()) for name, x in uniform.items()}
