"""Runs models on images and averages their maps, measures and representations."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, UInt8
from ml_collections import ConfigDict

from structinit_jax.analysis import measures
from structinit_jax.attention_init import ConvSite, TokenMixingSite
from structinit_jax.attention_init.sites import AttentionStack
from structinit_jax.augment import normalize
from structinit_jax.config import make_attention_init
from structinit_jax.data.loader import decode_all
from structinit_jax.errors import InputError
from structinit_jax.training import build
from structinit_jax.training.sharding import make_mesh
from structinit_jax.training.state import (
    AbstractModel,
    TrainState,
    find_targets,
    initialize_model,
)

BATCH_SIZE = 8  # images at a time, whose maps are in memory together


class Layer(NamedTuple):
    """One layer of a model, averaged over images; windows count as images."""

    name: str  # number of the layer, from 1; '2.1' is the first one of stage 2
    grid: tuple[int, int]  # rows and columns of the N tokens of a map
    # Without class and register tokens; rows sum to 1. None in a ConvMixer.
    maps: Float[np.ndarray, "h N N"] | None
    # By the name in `analysis.measures`. 'stable_rank' and 'shift_distance' of the layer's output
    # have a single value, as has 'input_rank', the stable rank of a ConvMixer layer's input.
    measures: dict[str, Float[np.ndarray, " h"]]


class Snapshot(NamedTuple):
    """A model with certain weights, on certain images."""

    name: str  # initialization and step of a run; "selected weights" with `config.start_from`
    layers: list[Layer]  # first to last


def read_images(config: ConfigDict, count: int) -> UInt8[np.ndarray, "n H H C"]:
    """Reads training images without augmentation, cropped as for evaluation.

    The images are spread evenly over the split: `count` of them, or all if there are fewer, rounded
    down to a multiple of `BATCH_SIZE`.
    """
    data = config.data
    source = build.open_split(config, build.open_data(config), "train_split")
    whole = min(count, len(source)) // BATCH_SIZE * BATCH_SIZE
    if whole < 1:
        raise InputError(
            f"--num_images={count} of the {len(source)} in "
            f"config.data.train_split={data.train_split!r}: needs at least {BATCH_SIZE}"
        )
    return decode_all(source.evenly_spaced(whole), data.image_size, data.crop_fraction)[0]


def observe_start(config: ConfigDict, images: UInt8[np.ndarray, "n H H C"]) -> Snapshot:
    """Observes a model with its initial values."""
    mesh = make_mesh(devices=jax.local_devices()[:1])
    model = build.make_model(config, mesh)
    weights = _initial_weights(config, model)
    snapshot = make_observer(config, model)(0, weights, images)
    return snapshot._replace(name=snapshot.name.removesuffix(", step 0"))


def observe_run(
    config: ConfigDict,
    restored: tuple[AbstractModel, TrainState],
    images: UInt8[np.ndarray, "n H H C"],
) -> list[Snapshot]:
    """Observes a run before and after training.

    `restored` is the run's model on one device, and its state, from `evaluate.restore_model`.
    """
    model, state = restored
    initial = _initial_weights(config, model)
    trained = (state.params, state.model_state)
    observe = make_observer(config, model)
    return [observe(0, initial, images), observe(int(state.step), trained, images)]


def _initial_weights(config, model):
    scheme = make_attention_init(config)
    name = config.attention_init.name
    weights = initialize_model(model, scheme, config.seed, config.start_from, name)[:2]
    sites = nnx.merge(model.graphdef, *weights).sites()
    if not sites or any(isinstance(site, TokenMixingSite) for site in sites.values()):
        raise InputError(f"config.model.name={config.model.name!r} has no attention to analyze")
    return weights


def make_observer(
    config: ConfigDict, model: AbstractModel
) -> Callable[[int, Sequence[Any], UInt8[np.ndarray, "n H H C"]], Snapshot]:
    """Returns `(step, weights, images) -> snapshot`, which compiles once for all weights.

    The model is on one device. `weights` are parameters and model state after the training step
    `step`. The number of images n is a multiple of `BATCH_SIZE`.
    """
    name = "selected weights"
    targets = {}
    if not config.start_from:
        name = config.attention_init.name
        targets = find_targets(model, make_attention_init(config), config.seed)
    observe_batch = jax.jit(functools.partial(_observe_batch, config, model.graphdef, targets))

    def observe(step, weights, images):
        sites = nnx.merge(model.graphdef, *weights).sites()
        totals = []
        ranks = []
        for batch in images.reshape(-1, BATCH_SIZE, *images.shape[1:]):
            total, features = jax.device_get(observe_batch(weights, batch))
            totals.append(total)
            matrices = [each.reshape(len(each), -1, each.shape[-1]) for each in features]
            ranks.append([measures.stable_rank(matrix).mean() for matrix in matrices])
        stacks, shifts = jax.tree.map(lambda *values: np.mean(values, axis=0), *totals)
        of_layers = zip(features, np.mean(ranks, axis=0), shifts, strict=True)
        layers = []
        for stage, (site, averages) in enumerate(zip(sites.values(), stacks, strict=True), 1):
            maps = averages.pop("maps", None)
            if maps is not None:
                averages |= jax.device_get(measures.measure_mean_maps(maps, site.grid))
            for i in range(site.num_layers):
                values = {key: value[i] for key, value in averages.items() if i < len(value)}
                feature, rank, shift = next(of_layers)
                values["input_rank" if maps is None else "stable_rank"] = rank[None]
                if shift is not None:
                    values["shift_distance"] = shift[None]
                number = f"{stage}.{i + 1}" if len(sites) > 1 else str(i + 1)
                if maps is None:
                    layers.append(Layer(number, feature.shape[1:3], None, values))
                else:
                    layers.append(Layer(number, site.grid, maps[i], values))
        return Snapshot(f"{name}, step {step:,}", layers)

    return observe


def _observe_batch(config, graphdef, targets, weights, images):
    """Returns averages over a batch, by stack and by layer, and the features to take ranks of."""
    model = nnx.merge(graphdef, *weights)
    data = config.data
    sites = model.sites()
    with_attention = not any(isinstance(site, ConvSite) for site in sites.values())

    def run(images, with_maps=False):
        images = normalize(images, tuple(data.mean), tuple(data.std))
        out = model(images, with_maps=with_maps)[1]
        return out.get("stages", [out])

    stages = run(images, with_maps=with_attention)
    outputs = _output_grids(stages, sites)
    if with_attention:
        features = outputs
        stacks = [
            _average_maps(stage["blocks"], site, targets.get(name))
            for stage, (name, site) in zip(stages, sites.items(), strict=True)
        ]
    else:  # the inputs of a ConvMixer's layers
        features = [stages[0]["stem"].astype(jnp.float32), *outputs[:-1]]
        stacks = [{}]
    coarsest = 2 ** (len(stages) - 1)  # patches on a side of a token of the last stage
    size = coarsest * config.model.patch_size

    def shift_distances(axis):
        shifted = _output_grids(run(jnp.roll(images, size, axis)), sites)
        for output, moved in zip(outputs, shifted, strict=True):
            tokens = coarsest * output.shape[axis] // outputs[0].shape[axis]
            shift = (tokens, 0) if axis == 1 else (0, tokens)
            yield measures.shift_distance(output, moved, shift)

    both = zip(shift_distances(1), shift_distances(2), strict=True)
    shifts = [None if down is None else (down + right) / 2 for down, right in both]
    return (stacks, shifts), features


def _output_grids(stages, sites):
    """Returns the outputs of all layers, [B, R, C, D], without class and register tokens."""
    grids = []
    for stage, site in zip(stages, sites.values(), strict=True):
        for output in stage["blocks"]["output"].astype(jnp.float32):
            if output.ndim == 3:  # class and register tokens come first
                output = output[:, -site.num_tokens :].reshape(len(output), *site.grid, -1)
            grids.append(output)
    return grids


def _average_maps(blocks, site: AttentionStack, targets) -> dict[str, Array]:
    """Averages maps [L, h, N, N] and the measures that need the maps of each image.

    For the others, see `measures.measure_mean_maps`.
    """
    maps = blocks["attention_maps"][..., -site.num_tokens :, -site.num_tokens :]
    maps = maps.reshape(len(maps), -1, *maps.shape[-3:])  # windows count as images
    maps = jnp.moveaxis(maps, 1, 0)  # [B, L, h, N, N]
    maps = maps / maps.sum(axis=-1, keepdims=True)
    averages = dict(maps=maps.mean(axis=0), entropy=measures.mean_entropy(maps))
    if targets is not None:
        index, filters = targets
        with_target = maps[:, : len(index)]  # `impulse_mimetic` has none in the last layers
        averages |= measures.measure_against_targets(with_target, jnp.asarray(filters[index]))
    return averages
