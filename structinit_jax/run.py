"""Builds the data, model and training step of a run from its config."""

import functools
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from structinit_jax import config as config_lib
from structinit_jax.augment import Augment, make_augment
from structinit_jax.data.crops import RandomCrop
from structinit_jax.data.datasets import open_dataset
from structinit_jax.data.loader import Batch, bytes_on_device, make_loader
from structinit_jax.data.source import ImageSource, check_classes, count_common
from structinit_jax.errors import InputError, find
from structinit_jax.training import mesh as mesh_lib
from structinit_jax.training.optimizer import LOSSES, make_optimizer, make_schedule
from structinit_jax.training.setup import Setup
from structinit_jax.training.state import (
    abstract_model,
    check_attention_init,
    init_state,
    initialize_model,
)
from structinit_jax.training.step import make_train_step


class Run:
    """The data, model and training step that a config describes.

    The constructor opens the data set; the splits and `setup` are made on first use. All of these
    raise `InputError` if the config or the data cannot be used. Only `train_batches` and
    `setup.initialize` allocate device memory.
    """

    def __init__(self, config: ConfigDict):
        config_lib.validate(config)
        self.config = config
        data = config.data
        self.dataset = open_dataset(data.name, data.data_dir or None, data.channels)
        check_classes(self.dataset.info, config.model.num_classes)

    @functools.cached_property
    def train_source(self) -> ImageSource:
        """The training split."""
        return self._split("train_split")

    @functools.cached_property
    def eval_source(self) -> ImageSource:
        """The evaluation split."""
        return self._split("eval_split")

    def _split(self, field):
        data = self.config.data
        source = self.dataset.split(data[field], f"data.{field}", data.on_bad_image)
        source[0]  # fails now, rather than after hours, if the split has no labels
        return source

    @functools.cached_property
    def setup(self) -> Setup:
        """Mesh, schedule, model, optimizer and training step."""
        data = self.config.data
        if common := count_common(data.train_split, data.eval_split, self.dataset.info):
            print(
                f"note: training sees {common:,} examples of the evaluation split:"
                f" config.data.train_split={data.train_split!r}, eval_split={data.eval_split!r}"
            )
        return set_up(self.config, len(self.train_source), len(self.eval_source))

    def train_batches(
        self, start_step: int = 0, num_steps: int | None = None, mesh: Mesh | None = None
    ) -> Iterator[Batch]:
        """Yields the batches of steps `start_step` to `num_steps - 1`, counted from 0.

        By default these are all steps of the run, and batches are sharded over the mesh of `setup`.
        With another mesh, images are decoded when they are needed.
        """
        config = self.config
        augment = self.config.augment
        random_crop = None
        if augment.crop == "resized":
            random_crop = RandomCrop(config.seed, augment.crop_scale)
        loader = make_loader(
            self.train_source,
            mesh or self.setup.model.mesh,
            image_size=config.data.image_size,
            random_crop=random_crop,
            in_memory=mesh is None,
        )
        return loader.train_batches(
            start_step=start_step,
            num_steps=num_steps or self.setup.schedule.num_steps,
            batch_size=config.batch_size,
            seed=config.seed,
            repeats=config.data.repeats,
            drop_remainder=config.data.drop_remainder,
        )


def set_up(
    config: ConfigDict,
    num_examples: int,
    num_eval_examples: int = 0,
    devices: Sequence[jax.Device] | None = None,
) -> Setup:
    """Returns mesh, schedule, model, optimizer and training step, without allocating arrays.

    `num_examples` and `num_eval_examples` are the sizes of the training and evaluation splits. The
    devices of the mesh are by default all devices of all processes. Raises `InputError` if fields
    of the config do not fit each other, the sizes of the splits or the devices.
    """
    data = config.data
    mesh = mesh_lib.make_mesh(config.fsdp, devices)
    divisor = mesh.size * config.accumulate_steps
    if config.batch_size % divisor:
        raise InputError(
            f"config.batch_size={config.batch_size} must be a multiple of {divisor}: the batch is "
            f"split over {mesh.size} devices and config.accumulate_steps={config.accumulate_steps}"
        )
    schedule = make_schedule(num_examples, dict(config), drop_remainder=data.drop_remainder)
    model = abstract_model(config.model, data, mesh)
    rate = schedule.learning_rate
    optimizer = make_optimizer(config.optimizer, rate, dict(config), model.stacks)
    scheme = config_lib.make_attention_init(config)
    check_attention_init(scheme, model)
    make_state = functools.partial(init_state, optimizer=optimizer, ema_decay=config.ema_decay)
    state = jax.eval_shape(make_state, model.params, model.model_state)
    state = mesh_lib.shard(mesh, state, model.stacks)
    state_shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    make_state = jax.jit(make_state, out_shardings=state_shardings, donate_argnums=(0, 1))

    def initialize():
        fields = config.seed, config.start_from, config.attention_init.name
        *weights, metrics = initialize_model(model, scheme, *fields)
        return make_state(*weights), metrics

    batch_sharding = mesh_lib.batch_sharding(mesh)
    shape = (config.batch_size, data.image_size, data.image_size, data.channels)
    batch = {
        "image": jax.ShapeDtypeStruct(shape, np.uint8, sharding=batch_sharding),
        "label": jax.ShapeDtypeStruct(shape[:1], np.int32, sharding=batch_sharding),
    }
    train_step = make_train_step(
        model.graphdef,
        optimizer,
        schedule.learning_rate,
        augmentation(config, mesh),
        mesh,
        loss=find(config.loss, LOSSES, "config.loss"),
        accumulate_steps=config.accumulate_steps,
        ema_decay=config.ema_decay,
        mixes=config.augment.mixup > 0 or config.augment.cutmix > 0,
    )
    train_step = jax.jit(
        train_step,
        in_shardings=(state_shardings, batch_sharding, mesh_lib.replicated(mesh)),
        out_shardings=(state_shardings, mesh_lib.replicated(mesh)),
        donate_argnums=0,
    )
    data_bytes = bytes_on_device(num_eval_examples, data.image_size, data.channels)
    if config.augment.crop != "resized":  # images with such crops are decoded for every batch
        data_bytes += bytes_on_device(num_examples, data.image_size, data.channels)
    return Setup(schedule, model, initialize, train_step, state, batch, data_bytes)


def augmentation(config: ConfigDict, mesh: Mesh) -> Augment:
    """Returns the augmentation of training batches that are sharded over a mesh."""
    return make_augment(
        config.augment,
        num_classes=config.model.num_classes,
        mean=config.data.mean,
        std=config.data.std,
        label_smoothing=config.label_smoothing,
        mesh=mesh,
    )
