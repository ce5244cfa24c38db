"""The config of a run: every field with its default, and the checks that need no data.

The files in `configs/` start from `base_config` and set what their recipe changes. The model family
defines the fields of `config.model`, and `augment.AugmentConfig` those of `config.augment`.
"""

import dataclasses
import inspect
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from structinit_jax import attention_init, errors, models
from structinit_jax.augment import AugmentConfig
from structinit_jax.errors import (
    Check,
    Fraction,
    InputError,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    is_count,
    is_reference,
    printable,
    require,
)
from structinit_jax.training.workdir import open_path, read_json

Seed = Annotated[int, Check("a whole number in [0, 2**32)", lambda x: is_count(x, 0) and x < 2**32)]
Share = Annotated[float, Check("a number from 0.1 to 1", lambda x: 0.1 <= x <= 1)]
Mean = Annotated[float, Check("in [0, 1] (of pixels divided by 255)", lambda x: 0 <= x <= 1)]
Deviation = Annotated[
    float, Check("from 0.001 to 1 (of pixels divided by 255)", lambda x: 0.001 <= x <= 1)
]
Name = Annotated[str, Check("a name", lambda x: isinstance(x, str) and x != "")]
# A crash can damage the newest checkpoint.
AtLeastTwo = Annotated[int, Check("a whole number, 2 or more", lambda x: is_count(x, 2))]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFields:
    """Fields of the config outside its sections."""

    # -- schedule ----------------------------------------------------------------------------------
    seed: Seed = 0  # of initial weights, data order, augmentation and everything else random
    num_epochs: PositiveFloat = 30.0
    num_steps: NonNegativeInt = 0  # if positive, overrides num_epochs
    batch_size: PositiveInt = 128  # global: summed over all devices of all hosts

    # -- loss and optimizer ------------------------------------------------------------------------
    loss: Name = "softmax_cross_entropy"  # or your own, as 'module:function'
    label_smoothing: Fraction = 0.1
    optimizer: Name = "adamw"  # or your own, as 'module:function'
    schedule: Literal["cosine", "timm_cosine"] = "cosine"  # 'timm_cosine' goes by epoch, as in timm
    learning_rate: PositiveFloat = 1e-3  # peak of the schedule
    warmup_epochs: NonNegativeFloat = 2.0  # linear, from warmup_learning_rate to learning_rate
    warmup_learning_rate: NonNegativeFloat = 0.0
    final_learning_rate: NonNegativeFloat = 1e-6  # end of the cosine decay
    # Part of num_epochs, at its end, with final_learning_rate (timm adds them to its epochs).
    cooldown_epochs: NonNegativeFloat = 0.0
    weight_decay: NonNegativeFloat = 0.05  # on matrices only: no biases, norms, positions, tokens
    adam_b2: Fraction = 0.999
    adam_epsilon: PositiveFloat = 1e-8
    clip_norm: NonNegativeFloat = 1.0  # global gradient norm; 0 disables clipping
    # If positive, evaluation and export use an exponential moving average of the weights. The 2025
    # paper's command for small data sets passes timm 0.9999, but not the switch that it needs.
    ema_decay: Fraction = 0.0

    # -- devices -----------------------------------------------------------------------------------
    fsdp: PositiveInt = 1  # devices that share one copy of weights and optimizer state
    accumulate_steps: PositiveInt = 1  # parts into which each batch is split, to save memory

    # -- logging, evaluation, checkpoints ----------------------------------------------------------
    log_every_steps: PositiveInt = 20
    eval_every_epochs: PositiveFloat = 5.0
    checkpoint_every_steps: PositiveInt = 500
    keep_checkpoints: AtLeastTwo = 2  # the newest ones; the best one is kept in addition

    # Safetensors file of a timm model of the same size or larger, at any resolution. If set, all
    # weights but the head are selected from it (Xu et al. 2024), and attention_init is not used.
    start_from: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataFields:
    """Fields of `config.data`."""

    name: Name = ""  # TFDS name, 'folder', or your own data set, as 'module:function'
    # Folder of TFDS's data sets, of the images ('folder') or of the files of 'fashion_mnist'. If
    # empty, $TFDS_DATA_DIR or ~/tensorflow_datasets, and its fashion_mnist/ for those files.
    data_dir: str = ""
    on_bad_image: Literal["stop", "skip"] = "stop"  # at an image that cannot be decoded
    train_split: str = "train"  # TFDS syntax: 'train[:90%]', 'train+validation'
    eval_split: str = "test"  # or a validation split such as 'train[90%:]', to choose the best step
    drop_remainder: bool = False  # whether to drop the last partial batch of each epoch
    repeats: PositiveInt = 1  # copies of each training example (repeated augmentation)
    image_size: PositiveInt = 224  # height and width of the model's input in pixels
    crop_fraction: Share = 1.0  # of the shorter side, kept by the center crop of test images
    channels: Literal[1, 3] = 3
    mean: tuple[Mean, ...] = (0.485, 0.456, 0.406)  # per channel, of pixels scaled to [0, 1]
    std: tuple[Deviation, ...] = (0.229, 0.224, 0.225)


def base_config(model: str = "vit") -> ConfigDict:
    """Returns a config with every field at its default.

    Args:
      model: Model family ('vit', 'swin', 'mixer', 'convmixer'), a variant under timm's name
        ('vit_tiny_patch16_224'), or a family of your own as 'module:Class'.
    """
    with errors.prefixed("config.model."):
        model_fields = models.default_config(model)
    config = ConfigDict(_defaults(RunFields))
    config.data = _defaults(DataFields) | {"image_size": model_fields.pop("image_size", 224)}
    config.augment = _defaults(AugmentConfig)
    config.model = model_fields
    # Name of the scheme, or your own as 'module:function', and its options.
    config.attention_init = dict(name="impulse")
    if config.model.name == "mixer":  # no other scheme helps it, see attention_init.token_mixing
        config.attention_init.name = "default"
    return config


def _defaults(fields: type) -> dict[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(fields)}


# -- config files and the config of a workdir ------------------------------------------------------


def load_config(location: str | Path) -> ConfigDict:
    """Runs a config file, such as 'configs/vit_2025_small.py:food101', and returns its config.

    The words after the colon, separated by commas, are passed to its `get_config` in order. Raises
    `InputError` if there is no such file or row.
    """
    stem, suffix, row = str(location).partition(".py:")
    path = stem + suffix.removesuffix(":")
    if not Path(path).is_file():
        raise InputError(
            f"--config={path}: there is no such file in {Path.cwd()}; the recipes are in a checkout"
        )
    get_config = runpy.run_path(path)["get_config"]
    words = row.split(",") if row else []
    columns = inspect.signature(get_config).parameters
    if len(words) > len(columns):
        raise InputError(f"--config={location} has more words than the file takes: {len(columns)}")
    choices = dict(zip(columns, words, strict=False))
    annotated = {name: choices[name] for name in choices if name in get_config.__annotations__}
    errors.check_fields(get_config, annotated, f"--config={location}: ")
    config = get_config(**choices)
    set_scheme(config, config.attention_init.name)
    return config


# Fields that may name code to import, as module:function.
CODE_FIELDS = ("model.name", "data.name", "attention_init.name", "loss", "optimizer")


def load_run_config(workdir: str | Path, trust: bool = False) -> ConfigDict:
    """Reads the config of a run from the `config.json` of its output directory.

    Raises `InputError` if there is no config of this package, or if it names Python code to import,
    as 'module:name', without `trust`.
    """
    path = open_path(workdir) / "config.json"
    try:
        fields = _with_tuples(read_json(path))
        # ConfigDict refuses keys with dots, which flatten_dict would confuse with nested fields.
        model = ConfigDict(fields).model.name
        scheme = ConfigDict(fields).attention_init
        values = flatten_dict(fields, sep=".")
        names = {field: values[field] for field in CODE_FIELDS if field in values}
        for field, value in names.items():
            require(field, value, "a string", lambda x: isinstance(x, str))
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise InputError(
            f"--workdir={workdir}: config.json cannot be used ({error}): pass the output directory "
            "of a run, or --config with its config file"
        ) from error
    if values.get("model.remat") == "auto":  # of earlier versions
        values["model.remat"] = "none"
    code = [f"{field}={value!r}" for field, value in names.items() if is_reference(value)]
    if code and not trust:
        raise InputError(
            f"{workdir} names Python code to import: {', '.join(code)}. If you trust whoever wrote "
            "this directory, pass --trust_workdir (in Python trust=True)"
        )
    config = base_config(model)
    try:
        # The options depend on the scheme, so those of the default are not kept.
        config.attention_init = scheme
        known = flatten_dict(config.to_dict(), sep=".")
        config.update_from_flattened_dict({k: v for k, v in values.items() if k in known})
    except (TypeError, ValueError) as error:  # of a value of another type
        raise InputError(f"--workdir={workdir}: config.json cannot be used: {error}") from error
    if gone := [f"{printable(k)}={value!r}" for k, value in values.items() if k not in known]:
        print(f"note: {path} has fields that this version does not: {', '.join(gone)}")
    return config


def _with_tuples(value):
    """Returns the value with lists, which JSON makes of tuples, turned back into tuples."""
    if isinstance(value, dict):
        return {name: _with_tuples(part) for name, part in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


# -- validation ------------------------------------------------------------------------------------

# A larger value is a mistake. Many of them would take minutes, or all memory, to fail.
LARGEST = {
    "num_epochs": 100_000,
    "num_steps": 10_000_000,
    "batch_size": 100_000_000,
    "learning_rate": 100,
    "warmup_learning_rate": 100,
    "final_learning_rate": 100,
    "weight_decay": 100,
    "adam_epsilon": 1,
    "data.image_size": 10_000,
    "data.repeats": 100,
    "augment.mixup": 100,
    "augment.cutmix": 100,
    "model.width": 100_000,
    "model.depth": 10_000,
    "model.depths": 10_000,
    "model.mlp_ratio": 1_000,
    "model.token_mlp_ratio": 1_000,
}


def validate(config: ConfigDict) -> None:
    """Raises `InputError` for errors that can be found without data, devices or initial weights.

    Scheme, loss and optimizer, which only training needs, are checked by `run.set_up`.
    """
    data = config.data
    model = config.model
    run = {k: value for k, value in config.items() if not isinstance(value, ConfigDict)}
    errors.check_fields(RunFields, run)
    errors.check_fields(DataFields, dict(data), "config.data.")
    errors.check_fields(AugmentConfig, dict(config.augment), "config.augment.")
    with errors.prefixed("config.model."):
        models.check_fields(dict(model))
    values = flatten_dict(config.to_dict(), sep=".")
    for field, most in LARGEST.items():
        value = values.get(field, 0)  # the families of models have different fields
        if np.max(value) > most:
            raise InputError(f"config.{field}={value!r} must be at most {most:,}")
    for field in ("mean", "std"):
        needs = f"a tuple of config.data.channels={data.channels} numbers"
        require(f"config.data.{field}", data[field], needs, lambda x: len(x) == data.channels)
    if not config.num_steps:
        needs = f"below config.num_epochs={config.num_epochs}, which includes them"
        cooldown = config.cooldown_epochs
        require("config.cooldown_epochs", cooldown, needs, lambda x: x < config.num_epochs)
    for field, value in _scheme_needs(config).items():
        needs = f"{value!r} for config.attention_init.name={config.attention_init.name!r}"
        require(f"config.model.{field}", model[field], needs, lambda x, value=value: x == value)


# -- the scheme ------------------------------------------------------------------------------------


# Names that `config.attention_init` had, and what to write instead. A run that started with them
# can be evaluated and exported, which needs no scheme.
FORMER_SCHEMES = {"kaiming_uniform": "name='default' with config.model.base_init='pytorch'"}
FORMER_OPTIONS = {
    "mimetic_layers": "name='impulse_mimetic', or name='impulse' for impulses in all layers",
    "norm": "target_mass",
    **dict.fromkeys(
        ("keep_positions", "patch_scale", "mlp_scale"), "name='impulse' without this option"
    ),
}


def find_scheme(name: str) -> Callable[..., attention_init.AttentionInit]:
    """Returns the scheme of a name, or of a user's own 'module:function'."""
    if name in FORMER_SCHEMES:
        raise InputError(
            f"config.attention_init.name={name!r} was removed: in a new run, use "
            f"{FORMER_SCHEMES[name]}"
        )
    return errors.find(name, attention_init.SCHEMES, "config.attention_init.name")


def scheme_options(name: str) -> tuple[str, ...]:
    """Returns the names of a scheme's options, which `config.attention_init` may set."""
    return tuple(inspect.signature(find_scheme(name)).parameters)


def refuse_former_option(option: str) -> None:
    """Raises `InputError`, with what replaces it, for an option that schemes no longer have."""
    if option in FORMER_OPTIONS:
        instead = FORMER_OPTIONS[option]
        raise InputError(f"config.attention_init.{option} was removed: in a new run, use {instead}")


def make_attention_init(config: ConfigDict) -> attention_init.AttentionInit:
    """Returns the `(rng, site) -> weights` that `config.attention_init` describes."""
    options = dict(config.attention_init)
    name = options.pop("name", "")
    scheme = find_scheme(name)
    if name in attention_init.SCHEMES:
        for option in options:
            refuse_former_option(option)
        errors.check_fields(scheme, options, "config.attention_init.")
    try:
        return scheme(**options)
    except (InputError, TypeError) as error:
        raise InputError(f"config.attention_init: {error}") from error


# Fields of `config.model` that a scheme needs.
SCHEME_NEEDS = {
    "impulse_2025": {"positions": "learned"},
}


def set_scheme(config: ConfigDict, name: str) -> None:
    """Sets `config.attention_init.name` and the fields that depend on it.

    Removes options that only other schemes take, sets the model fields that the scheme needs, and
    prints a note of each change. Options that no scheme takes stay, and are refused later.
    """
    section = config.attention_init
    own = scheme_options(name)
    schemes = {section.name, *attention_init.SCHEMES} - FORMER_SCHEMES.keys()
    others = {option for scheme in schemes for option in scheme_options(scheme)} - {*own}
    if name != section.name:
        others |= FORMER_OPTIONS.keys() - {*own}
    with config.unlocked():
        section.name = name
        if foreign := sorted(others.intersection(section)):
            print(f"note: attention_init: {name!r} does not use {', '.join(foreign)}")
        for option in foreign:
            del section[option]
        for field, value in _scheme_needs(config).items():
            if config.model[field] != value:
                config.model[field] = value
                print(f"note: {name} needs config.model.{field}={value!r}: it is set")


def _scheme_needs(config):
    needs = SCHEME_NEEDS.get(config.attention_init.get("name"), {})
    return {k: v for k, v in needs.items() if k in config.model}  # your own family may lack some
