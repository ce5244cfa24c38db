"""Builds the parts of a run from its config: data, mesh, schedule, model and optimizer.

Only the batches allocate device memory. The functions raise `InputError` if fields of the config
are inconsistent with each other, the data or the devices.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
import optax
from etils import epath
from jax.sharding import Mesh
from ml_collections import ConfigDict

from structinit_jax import augment
from structinit_jax.data import datasets
from structinit_jax.data.folder import split_folders
from structinit_jax.data.images import BadImageError, CenterCrop, RandomCrop
from structinit_jax.data.loader import Batch, Loader, bytes_on_device
from structinit_jax.data.source import Dataset, ImageSource, check_classes, count_common
from structinit_jax.errors import InputError, find, prefixed, require
from structinit_jax.files import is_url
from structinit_jax.models import create_model
from structinit_jax.models.model import make_rngs
from structinit_jax.training import optimizer as optimizer_lib
from structinit_jax.training import sharding
from structinit_jax.training.optimizer import Schedule
from structinit_jax.training.state import AbstractModel, TrainState, abstract_model

SEED = jax.ShapeDtypeStruct((), np.uint32)  # the last argument of the training step


# -- data ------------------------------------------------------------------------------------------


def require_outside_images(config: ConfigDict, workdir: epath.PathLike) -> None:
    """Raises `InputError` if an image folder would take a workdir for one of its classes."""
    if config.data.name == "folder" and not is_url(workdir):
        root = Path(config.data.data_dir).expanduser().resolve()
        parents = Path(workdir).expanduser().resolve().parents
        inside = [str(folder) for folder in split_folders(root).values() if folder in parents]
        needs = f"outside of {', '.join(inside)}, whose subfolders are classes"
        require("workdir", str(workdir), needs, not inside)


def open_data(config: ConfigDict) -> Dataset:
    """Opens the data set of a config, which must have as many classes as the model."""
    data = config.data
    with prefixed("config.data: "):
        dataset = datasets.open_dataset(data.name, data.data_dir, data.channels)
    with prefixed("config.model."):
        check_classes(dataset.info, config.model.num_classes)
    return dataset


def open_split(config: ConfigDict, dataset: Dataset, field: str) -> ImageSource:
    """Opens the split named by a field of `config.data`: 'train_split' or 'eval_split'."""
    data = config.data
    with prefixed(f"config.data.{field}: "):
        source = dataset.split(data[field], data.on_bad_image)
    source[0]  # A split without labels fails here rather than after hours.
    return source


def open_splits(config: ConfigDict, dataset: Dataset) -> tuple[ImageSource, ImageSource]:
    """Opens the splits for training and evaluation, and prints a note if they overlap."""
    train_source = open_split(config, dataset, "train_split")
    eval_source = open_split(config, dataset, "eval_split")
    data = config.data
    if common := count_common(data.train_split, data.eval_split, dataset.info):
        print(
            f"note: training sees {common:,} examples of the evaluation split:"
            f" config.data.train_split={data.train_split!r}, eval_split={data.eval_split!r}"
        )
    return train_source, eval_source


def train_batches(
    config: ConfigDict, loader: Loader, start_step: int, num_steps: int
) -> Iterator[Batch]:
    """Returns the training batches of steps `start_step` to `num_steps - 1`, counted from 0."""
    return loader.train_batches(
        batch_size=config.batch_size,
        seed=config.seed,
        start_step=start_step,
        num_steps=num_steps,
        repeats=config.data.repeats,
        drop_remainder=config.data.drop_remainder,
    )


def make_crop(config: ConfigDict) -> CenterCrop | RandomCrop:
    """Returns the crop for training images."""
    image_size = config.data.image_size
    if config.augment.crop == "resized":
        return RandomCrop(image_size, config.seed, config.augment.crop_scale)
    return CenterCrop(image_size)


def make_augment(config: ConfigDict, mesh: Mesh) -> augment.Augment:
    """Returns the augmentation of training batches that are sharded over a mesh."""
    return augment.make_augment(
        config.augment,
        num_classes=config.model.num_classes,
        mean=config.data.mean,
        std=config.data.std,
        label_smoothing=config.label_smoothing,
        mesh=mesh,
    )


def data_bytes(config: ConfigDict, num_examples: int, num_eval_examples: int) -> int:
    """Returns the bytes that the images of both splits occupy on each device."""
    data = config.data
    eval_crop = CenterCrop(data.image_size, data.crop_fraction)
    eval_bytes = bytes_on_device(num_eval_examples, eval_crop, data.channels)
    return eval_bytes + bytes_on_device(num_examples, make_crop(config), data.channels)


# -- mesh, schedule, model and optimizer -----------------------------------------------------------


def make_mesh(config: ConfigDict, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Arranges the devices in a mesh; by default, all devices of all processes."""
    wanted = jax.config.jax_platforms or "cpu"
    # JAX passes over 'cuda' without an error where there is no /dev/nvidia*, as without a driver.
    found = wanted.startswith("cpu") or jax.default_backend() != "cpu"
    needs = "the platform of devices that JAX finds; check the driver, for example with nvidia-smi"
    require("JAX_PLATFORMS", wanted, needs, found)
    with prefixed("config."):
        mesh = sharding.make_mesh(config.fsdp, devices)
    batch_size = config.batch_size
    divisor = mesh.size * config.accumulate_steps
    needs = f"a multiple of {divisor}, {mesh.size} devices times config.accumulate_steps"
    require("config.batch_size", batch_size, needs, batch_size % divisor == 0)
    return mesh


def make_schedule(config: ConfigDict, num_examples: int) -> Schedule:
    """Converts the epochs of a config to steps, for a training split of `num_examples`.

    Prints a note if a batch is larger than the split, or if most of the run is warm-up.
    """
    batch_size = config.batch_size
    if config.data.drop_remainder:
        needs = f"at most {num_examples} (one epoch) with config.data.drop_remainder=True"
        require("config.batch_size", batch_size, needs, batch_size <= num_examples)
        num_examples -= num_examples % batch_size
    elif batch_size > num_examples:
        print(
            f"note: a step takes {batch_size / num_examples:.1f} epochs: the training split has "
            f"only {num_examples:,} examples; lower config.batch_size={batch_size}"
        )
    steps_per_epoch = num_examples / batch_size
    num_steps = config.num_steps or max(1, round(config.num_epochs * steps_per_epoch))
    warmup_steps = round(config.warmup_epochs * steps_per_epoch)
    if warmup_steps > num_steps / 2:
        print(
            f"note: {min(warmup_steps, num_steps):,} of the {num_steps:,} steps are warm-up: lower "
            f"config.warmup_epochs={config.warmup_epochs}"
        )
    # At most one evaluation per step.
    interval = max(1.0, config.eval_every_epochs * steps_per_epoch)
    evaluations = range(1, int(num_steps / interval) + 1)
    eval_steps = frozenset(round(interval * number) for number in evaluations) | {num_steps}
    rates = dict(
        num_steps=num_steps,
        learning_rate=config.learning_rate,
        warmup_epochs=config.warmup_epochs,
        warmup_learning_rate=config.warmup_learning_rate,
        final_learning_rate=config.final_learning_rate,
        cooldown_epochs=config.cooldown_epochs,
    )
    if config.schedule == "cosine":
        learning_rate = optimizer_lib.cosine(steps_per_epoch=steps_per_epoch, **rates)
    else:
        num_epochs = num_steps / steps_per_epoch if config.num_steps else config.num_epochs
        sizes = dict(num_examples=num_examples, batch_size=batch_size)
        learning_rate = optimizer_lib.timm_cosine(num_epochs=num_epochs, **sizes, **rates)
    return Schedule(num_steps, steps_per_epoch, eval_steps, learning_rate)


def make_model(config: ConfigDict, mesh: Mesh) -> AbstractModel:
    """Returns the model without its arrays."""
    options = config.model.to_dict() | {"image_size": config.data.image_size}

    def create(rng):
        return create_model(options, channels=config.data.channels, rngs=make_rngs(rng))

    with prefixed("config.model and config.data: "):
        return abstract_model(create, mesh)


def make_optimizer(
    config: ConfigDict, learning_rate: optax.Schedule, model: AbstractModel
) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer that `config.optimizer` names.

    A custom optimizer, 'module:function', is called with `learning_rate` and with the fields of the
    config that its parameters name, because optax's functions take different parameters. It sees
    the model's stacks as lists of layers.
    """
    if config.optimizer == "adamw":
        return optimizer_lib.adamw(
            learning_rate,
            weight_decay=config.weight_decay,
            adam_b2=config.adam_b2,
            adam_epsilon=config.adam_epsilon,
            clip_norm=config.clip_norm,
            decayed=model.decayed,
        )
    make = find(config.optimizer, {"adamw": optimizer_lib.adamw}, "config.optimizer")
    parameters = inspect.signature(make).parameters
    needs = "a function with the parameter learning_rate"
    require("config.optimizer", config.optimizer, needs, "learning_rate" in parameters)
    options = {name: value for name, value in config.items() if name in parameters}
    optimizer = make(**options | {"learning_rate": learning_rate})
    needs = "a function that returns an optax transformation"
    fits = hasattr(optimizer, "init") and hasattr(optimizer, "update")
    require("config.optimizer", config.optimizer, needs, fits)
    return optimizer_lib.by_layer(optimizer, model.stacks)


# -- step ------------------------------------------------------------------------------------------


def abstract_batch(config: ConfigDict, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes, types and shardings of a global batch."""
    data = config.data
    shape = (config.batch_size, data.image_size, data.image_size, data.channels)
    batch_sharding = sharding.batch_sharding(mesh)
    return {
        "image": jax.ShapeDtypeStruct(shape, np.uint8, sharding=batch_sharding),
        "label": jax.ShapeDtypeStruct(shape[:1], np.int32, sharding=batch_sharding),
    }


def jit_step(step: Callable, mesh: Mesh, state: TrainState) -> jax.stages.Wrapped:
    """Jits the training step for a state that is sharded like an abstract one, and donated."""
    state_shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    replicated = sharding.replicated(mesh)
    return jax.jit(
        step,
        in_shardings=(state_shardings, sharding.batch_sharding(mesh), replicated),
        out_shardings=(state_shardings, replicated),
        donate_argnums=0,
    )


# -- memory ----------------------------------------------------------------------------------------

SAVE_MEMORY = (
    "To save memory: --config.model.remat=dots (or full, which is slower), "
    "--config.accumulate_steps=2 (or more), --config.model.dtype=bfloat16, --config.fsdp=N on N "
    "devices"
)


def memory_limit() -> int | None:
    """Returns the bytes that programs can use on each device; None if unknown, as on CPUs."""
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in jax.local_devices()]
    return None if None in limits else min(limits)


def check_memory(step: jax.stages.Compiled, data_bytes: int, limit: int | None) -> str:
    """Returns the memory that a compiled step needs, such as '7,112 MiB of 14,515 MiB'.

    `limit` is the number of bytes that programs can use on one device, or None if unknown; the
    images take `data_bytes` of them.
    """
    needed = bytes_needed(step)
    if limit is None:
        return mib(needed)
    available = limit - data_bytes
    if needed > available:
        raise InputError(
            f"the training step needs {mib(needed)}, but with {mib(data_bytes)} of images, each "
            f"device has only {mib(available)} left. {SAVE_MEMORY}"
        )
    return f"{mib(needed)} of {mib(available)}"


def bytes_needed(step: jax.stages.Compiled) -> int:
    """Returns the bytes that a program and its arguments occupy on one device while it runs."""
    memory = step.memory_analysis()
    # Outputs that reuse the memory of donated arguments need no extra memory.
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + outputs + memory.temp_size_in_bytes


@contextlib.contextmanager
def explain_errors() -> Iterator[None]:
    """Adds the fields to change to errors for bad images and for lack of device memory."""
    try:
        yield
    except BadImageError as error:
        raise InputError(
            f"{error}. Replace the image, or leave such images out with "
            "--config.data.on_bad_image=skip, which a run can only use from its start"
        ) from error
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        first_line = str(error).splitlines()[0]
        raise InputError(f"a device ran out of memory ({first_line}). {SAVE_MEMORY}") from error


def mib(size: int) -> str:
    """Formats a number of bytes, for example '7,112 MiB'."""
    return f"{size / 2**20:,.0f} MiB"
