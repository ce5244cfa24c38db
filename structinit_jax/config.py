"""The fields of a config, their defaults and the checks that need no data and no device."""

import dataclasses
from math import isfinite
from typing import Any

from ml_collections import ConfigDict

from structinit_jax import attention_init
from structinit_jax.augment import AugmentOptions
from structinit_jax.data.info import EVALUATION_SETS
from structinit_jax.errors import InputError
from structinit_jax.models.layers import CHOICES, check_choices
from structinit_jax.models.registry import default_options
from structinit_jax.training.optimizer import find_loss, find_optimizer

# Fields of `config.model` of which 0 has a meaning.
MAY_BE_ZERO = ("unroll", "num_registers", "layer_scale")

# `config.augment`: the fields of `AugmentOptions`, but for those that the config has elsewhere.
FROM_ELSEWHERE = ("num_classes", "mean", "std", "image_size", "label_smoothing")
AUGMENT = {
    field.name: field.default
    for field in dataclasses.fields(AugmentOptions)
    if field.name not in FROM_ELSEWHERE
}


def base_config(model: str = "vit") -> ConfigDict:
    """Every field there is. The files in `configs/` start from this and state what differs.

    Args:
      model: a family, which can then be sized by its fields, or a variant by timm's name, such as
        'vit_tiny_patch16_224'. The fields of `config.model` are the arguments of its class.
    """
    options = default_options(model)
    image_size = options.pop("image_size", 224)
    return ConfigDict(
        dict(
            seed=0,
            num_epochs=30.0,
            num_steps=0,  # if not 0, in place of num_epochs
            batch_size=128,  # global: over all devices of all hosts
            loss="softmax_cross_entropy",  # or "module:function", see training/optimizer.py
            optimizer="adamw",  # or "module:function", see training/optimizer.py
            learning_rate=1e-3,  # the peak, behind the warm-up
            warmup_epochs=2.0,
            warmup_learning_rate=0.0,  # where the linear warm-up starts
            final_learning_rate=1e-6,  # where the cosine ends
            cooldown_epochs=0.0,  # of num_epochs, spent at the final rate at the end
            weight_decay=0.05,  # on matrices only: not on biases, norms, positions, class token
            layer_decay=1.0,  # factor on the learning rate from each block to the one before
            adam_b2=0.999,
            adam_epsilon=1e-8,
            clip_norm=1.0,  # global gradient norm; 0 turns clipping off
            label_smoothing=0.1,
            ema_decay=0.0,  # of averaged weights, evaluated beside the others; 0 keeps none
            fsdp=1,  # devices that share one copy of weights and optimizer, to save memory
            accumulate_steps=1,  # parts of a batch, worked off one after another to save memory
            on_nonfinite="stop",  # or "skip": what to do at a loss or gradient that is not finite
            log_every_steps=20,
            eval_every_epochs=5.0,
            checkpoint_every_steps=500,
            keep_checkpoints=2,  # the newest ones; the best one is kept besides
            model=options,
            attention_init=dict(name="impulse", kernel_size=3),
            # In its place: a safetensors file of a timm model, as large or larger, from whose
            # weights all but the head is selected (Xu et al. 2024). Empty for none.
            start_from="",
            augment=AUGMENT,
            data=dict(
                name="",
                data_dir="",  # empty: TFDS's own default
                manual_dir="",  # where hand-downloaded files lie
                on_bad_image="stop",  # or 'skip': what to do about an image that cannot be decoded
                train_split="train",
                eval_split="test",
                eval_name="",  # a test set of ImageNet in place of eval_split, such as imagenet_v2
                repeats=1,  # of each example in a row (repeated augmentation)
                image_size=image_size,
                crop_fraction=1.0,  # of the shorter side that the central test crop keeps
                channels=3,
                mean=(0.485, 0.456, 0.406),  # of pixels scaled to 0…1, per channel
                std=(0.229, 0.224, 0.225),
            ),
        )
    )


def validate(config: ConfigDict) -> None:
    """Checks everything that can be checked without data and without a device.

    Raises:
      InputError: naming the field, what it got, what it needs and the fix.
    """
    _validate_sections(config)
    for field, value in config.items():
        _require(not isinstance(value, float) or isfinite(value), field, value, "a finite number")
    _require(0 <= config.seed < 2**32, "seed", config.seed, "from 0 to 2³² - 1")
    for field in (
        "batch_size",
        "fsdp",
        "accumulate_steps",
        "log_every_steps",
        "checkpoint_every_steps",
        "keep_checkpoints",
    ):
        _require(config[field] >= 1, field, config[field], "a positive whole number")
    _require(
        config.num_steps > 0 or (config.num_steps == 0 and config.num_epochs > 0),
        "num_steps" if config.num_steps else "num_epochs",
        config.num_steps or config.num_epochs,
        "positive, or there is nothing to train",
    )
    _require(config.eval_every_epochs > 0, "eval_every_epochs", config.eval_every_epochs, "> 0")
    for field in ("learning_rate", "adam_epsilon"):
        _require(config[field] > 0, field, config[field], "> 0")
    _require(0 <= config.adam_b2 < 1, "adam_b2", config.adam_b2, "in [0, 1)")
    for field in (
        "warmup_epochs",
        "cooldown_epochs",
        "warmup_learning_rate",
        "final_learning_rate",
        "weight_decay",
        "clip_norm",
    ):
        _require(config[field] >= 0, field, config[field], "zero or more")
    _require(
        0 <= config.label_smoothing < 1, "label_smoothing", config.label_smoothing, "in [0, 1)"
    )
    _require(0 < config.layer_decay <= 1, "layer_decay", config.layer_decay, "in (0, 1]")
    _require(0 <= config.ema_decay < 1, "ema_decay", config.ema_decay, "in [0, 1)")
    policy = config.on_nonfinite
    _require(policy in ("stop", "skip"), "on_nonfinite", policy, "'stop' or 'skip'")
    _validate_model(config.model)
    _validate_data(config.data)
    if name := config.data.eval_name:
        known = name.split("/")[0] in EVALUATION_SETS
        _require(known, "data.eval_name", name, f"one of {', '.join(EVALUATION_SETS)}")
        need = f"1000, the classes of imagenet2012, for data.eval_name={name!r}"
        _require(
            config.model.num_classes == 1000, "model.num_classes", config.model.num_classes, need
        )
    find_loss(config.loss)
    find_optimizer(config.optimizer)
    augment_options(config)
    make_attention_init(config)


def _validate_sections(config: ConfigDict) -> None:
    """A section that was set as a whole, or is of another model, has other fields than it needs."""
    name = config.model.get("name", "")
    base = base_config(name)
    for section in ("model", "augment", "data"):
        missing = sorted(set(base[section]) - set(config[section]))
        foreign = sorted(set(config[section]) - set(base[section]))
        if missing or foreign:
            what = [f"lacks {', '.join(missing)}"] if missing else []
            what += [f"has no field {', '.join(map(repr, foreign))}"] if foreign else []
            start = f" of base_config({name!r})" if section == "model" else ""
            raise InputError(
                f"config.{section} {' and '.join(what)}: keep the section{start} and set single "
                f"fields of it, such as --config.{section}.{next(iter(base[section]))}=…"
            )


def _validate_model(model: ConfigDict) -> None:
    for field, value in model.items():
        if field in MAY_BE_ZERO or isinstance(value, bool):
            _require(value >= 0, f"model.{field}", value, "zero or more")
        elif isinstance(value, int):
            _require(value >= 1, f"model.{field}", value, "a positive whole number")
        elif field.endswith("ratio"):
            _require(value > 0, f"model.{field}", value, "> 0")
        elif field in ("drop_path", "dropout"):
            _require(0 <= value < 1, f"model.{field}", value, "a rate in [0, 1)")
        elif field in CHOICES:
            check_choices(**{field: value})


def _validate_data(data: ConfigDict) -> None:
    _require(bool(data.name), "data.name", data.name, "the name of a TFDS data set")
    for field in ("image_size", "repeats"):
        _require(data[field] >= 1, f"data.{field}", data[field], "a positive whole number")
    _require(data.channels in (1, 3), "data.channels", data.channels, "1 (grey) or 3 (colour)")
    _require(0 < data.crop_fraction <= 1, "data.crop_fraction", data.crop_fraction, "in (0, 1]")
    for field in ("mean", "std"):
        _require(
            len(data[field]) == data.channels,
            f"data.{field}",
            tuple(data[field]),
            f"one number for each of data.channels={data.channels}",
        )
        _require(
            all(isinstance(x, int | float) and isfinite(x) for x in data[field]),
            f"data.{field}",
            tuple(data[field]),
            "finite numbers",
        )
    _require(min(data.std) > 0, "data.std", tuple(data.std), "positive numbers")


def _require(holds: bool, field: str, value: Any, need: str) -> None:
    if not holds:
        raise InputError(f"config.{field}={value!r} does not fit: it needs to be {need}")


def augment_options(config: ConfigDict) -> AugmentOptions:
    """What happens to the training images, from `config.augment` and where else it says so.

    Raises:
      InputError: naming a field that is unusable.
    """
    # A config that comes back from JSON has lists for tuples.
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in config.augment.items()}
    return AugmentOptions(
        num_classes=config.model.num_classes,
        mean=tuple(config.data.mean),
        std=tuple(config.data.std),
        image_size=config.data.image_size,
        label_smoothing=config.label_smoothing,
        **options,
    )


def make_attention_init(config: ConfigDict) -> attention_init.AttentionInit:
    """The scheme that `config.attention_init` names."""
    return attention_init.by_name(**{"name": "", **config.attention_init})


def drop_foreign_options(config: ConfigDict) -> list[str]:
    """Removes options of `config.attention_init` that belong to other schemes only.

    So `--config.attention_init.name=default` is enough to compare with a config whose `kernel_size`
    the other scheme does not take. Returns the removed fields, for the caller to tell the user;
    options that no scheme knows stay, to be refused.
    """
    section = config.attention_init
    own = attention_init.scheme_options(section.get("name", ""))
    known = {o for name in attention_init.SCHEMES for o in attention_init.scheme_options(name)}
    foreign = [field for field in section if field in known and field not in own]
    with config.unlocked():
        for field in foreign:
            del section[field]
    return foreign
