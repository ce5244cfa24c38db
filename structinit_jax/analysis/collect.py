"""Runs models on images and averages their maps, measures and representations."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, UInt8
from ml_collections import ConfigDict

from structinit_jax import config as config_lib
from structinit_jax.analysis import measures
from structinit_jax.attention_init import ConvSite
from structinit_jax.attention_init.sites import AttentionSizes
from structinit_jax.attention_init.targets import filter_maps
from structinit_jax.augment import normalize
from structinit_jax.data.images import CenterCrop
from structinit_jax.errors import require
from structinit_jax.training import build
from structinit_jax.training.sharding import make_mesh
from structinit_jax.training.state import AbstractModel, TrainState, make_initializer

BATCH_SIZE = 8  # images at a time; their maps are in memory together


class Layer(NamedTuple):
    """One layer of a model, averaged over images; windows count as images."""

    name: str  # layer number, from 1; '2.1' is the first layer of stage 2
    grid: tuple[int, int] | None  # rows and columns of the N tokens of a map; None in a ConvMixer
    # Without class and register tokens; rows sum to 1. None in a ConvMixer.
    maps: Float[np.ndarray, "h N N"] | None
    # By name, as in `analysis.measures`. 'stable_rank' (of the layer's output) and 'input_rank' (of
    # a ConvMixer layer's input) have a single value.
    measures: dict[str, Float[np.ndarray, " h"]]


class Snapshot(NamedTuple):
    """A model with given weights, observed on given images."""

    name: str  # initialization and step of a run; "selected weights" with `config.start_from`
    layers: list[Layer]  # first to last


@build.explain_errors()
def read_images(config: ConfigDict, count: int) -> UInt8[np.ndarray, "n H H C"]:
    """Reads training images without augmentation, cropped as for evaluation.

    The images are spread evenly over the split. Their number is `count`, or the size of the split
    if smaller, rounded down to a multiple of `BATCH_SIZE`; it must not be 0.
    """
    config_lib.validate(config)
    data = config.data
    source = build.open_split(config, build.open_data(config), "train_split")
    whole = min(count, len(source)) // BATCH_SIZE * BATCH_SIZE
    require("images in config.data.train_split", len(source), f"{BATCH_SIZE} or more", whole > 0)
    crop = CenterCrop(data.image_size, data.crop_fraction)
    return np.stack(source.evenly_spaced(whole).map(lambda image, label: crop(image)))


def observe_start(config: ConfigDict, images: UInt8[np.ndarray, "n H H C"]) -> Snapshot:
    """Observes a model with its initial weights."""
    mesh = make_mesh(devices=jax.local_devices()[:1])
    model = build.make_model(config, mesh)
    weights, targets = _initialize(config, model)
    return observe(config, model, targets, {_start_name(config): weights}, images)[0]


def observe_run(
    config: ConfigDict,
    model: AbstractModel,
    state: TrainState,
    images: UInt8[np.ndarray, "n H H C"],
) -> list[Snapshot]:
    """Observes a run before and after training.

    `model` and `state` are on one device, as `evaluation.restore_model` returns them.
    """
    initial, targets = _initialize(config, model)
    name = _start_name(config)
    weights = {f"{name}, step 0": initial, f"{name}, step {int(state.step):,}": state.weights}
    return observe(config, model, targets, weights, images)


def _start_name(config):
    return "selected weights" if config.start_from else config.attention_init.name


def _initialize(config, model):
    """Returns the weights that a run starts from, and the targets of the heads by stack."""
    weights, _, filters = make_initializer(config, model)()
    sites = nnx.merge(model.graphdef, *weights).sites()
    kinds = {AttentionSizes if isinstance(s, AttentionSizes) else type(s) for s in sites.values()}
    is_supported = kinds in ({AttentionSizes}, {ConvSite})
    needs = "a model whose sites are all attention, or 'convmixer'"
    require("config.model.name", config.model.name, needs, is_supported)
    targets = {
        name: (index, filter_maps(np.asarray(placed), sites[name].grid))
        for name, (index, placed) in filters.items()
    }
    return weights, targets


def observe(
    config: ConfigDict,
    model: AbstractModel,
    targets: Mapping[str, tuple[Array, np.ndarray]],
    weights_by_name: Mapping[str, Sequence[Any]],
    images: UInt8[np.ndarray, "n H H C"],
) -> list[Snapshot]:
    """Observes a model on one device with several sets of weights (parameters and model state).

    `targets` are the filters of `InitialModel`, as maps. The number of images n is a multiple of
    `BATCH_SIZE`.
    """
    observe_batch = jax.jit(functools.partial(_observe_batch, config, model.graphdef))
    snapshots = []
    for name, weights in weights_by_name.items():
        sites = nnx.merge(model.graphdef, *weights).sites().values()
        batches = []
        for batch in images.reshape(-1, BATCH_SIZE, *images.shape[1:]):
            stages = jax.device_get(observe_batch(targets, weights, batch))
            for stage in stages:
                rank = measures.stable_rank(stage.pop("tokens")).mean(axis=1, keepdims=True)
                stage["stable_rank" if "maps" in stage else "input_rank"] = rank
            batches.append(stages)
        stages = jax.tree.map(lambda *values: np.mean(values, axis=0), *batches)
        layers = []
        for number, (site, averages) in enumerate(zip(sites, stages, strict=True), 1):
            prefix = f"{number}." if len(sites) > 1 else ""
            layers += _layers(prefix, site, averages)
        snapshots.append(Snapshot(name, layers))
    return snapshots


def _layers(prefix, site, averages) -> list[Layer]:
    """Returns the layers of a stage, given their averages as arrays [L, ...]."""
    grid = None
    maps = [None] * site.num_layers
    if "maps" in averages:
        grid = site.grid
        maps = averages.pop("maps")
        averages |= jax.device_get(measures.measure_mean_maps(maps, grid))
    layers = []
    for i in range(site.num_layers):
        values = {name: value[i] for name, value in averages.items() if i < len(value)}
        layers.append(Layer(f"{prefix}{i + 1}", grid, maps[i], values))
    return layers


def _observe_batch(config, graphdef, targets, weights, images):
    """Returns averages over a batch for each stage: arrays [L, ...] by measure, and the maps.

    Each stage also has 'tokens' [L, B, N, D], from which ranks are computed.
    """
    model = nnx.merge(graphdef, *weights)
    data = config.data
    sites = model.sites()
    with_attention = not any(isinstance(site, ConvSite) for site in sites.values())
    images = normalize(images, data.mean, data.std)
    out = model(images, with_maps=with_attention)[1]
    observed = out.get("stages", [out])
    fits = len(observed) == len(sites) and all("blocks" in stage for stage in observed)
    needs = f"the intermediates that Model.__call__ describes, for {', '.join(sites)}"
    require("intermediates of the model", [*out], needs, fits and (with_attention or "stem" in out))
    if not with_attention:  # A ConvMixer's layers are measured at their inputs.
        inputs = jnp.concatenate([out["stem"][None], out["blocks"]["output"][:-1]])
        return [{"tokens": _tokens(inputs)}]
    stages = []
    for stage, (name, site) in zip(observed, sites.items(), strict=True):
        output = stage["blocks"]["output"]
        if output.ndim == 4:  # The shape is [L, B, N, D]; class and register tokens come first.
            output = output[:, :, -site.num_tokens :]
        averages = _average_maps(stage["blocks"], site, targets.get(name))
        stages.append(averages | {"tokens": _tokens(output)})
    return stages


def _tokens(features) -> Float[Array, "L B N D"]:
    """Returns features [L, B, N, D] or [L, B, rows, columns, D] as tokens in float32."""
    return features.reshape(*features.shape[:2], -1, features.shape[-1]).astype(jnp.float32)


def _average_maps(blocks, site: AttentionSizes, targets) -> dict[str, Array]:
    """Averages maps [L, h, N, N] and the measures that need the maps of each image.

    For the other measures, see `measures.measure_mean_maps`.
    """
    maps = blocks["attention_maps"][..., -site.num_tokens :, -site.num_tokens :]
    maps = maps.reshape(len(maps), -1, *maps.shape[-3:])  # Windows count as images.
    maps = jnp.moveaxis(maps, 1, 0)  # [B, L, h, N, N]
    maps = maps / maps.sum(axis=-1, keepdims=True)
    averages = dict(maps=maps.mean(axis=0), entropy=measures.mean_entropy(maps))
    if targets is not None:
        index, filters = targets
        with_target = maps[:, : len(index)]  # `impulse_mimetic` has no targets in the last layers.
        averages |= measures.measure_against_targets(with_target, filters[index])
    return averages
