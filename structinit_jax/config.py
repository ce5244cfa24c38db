"""The config of a run: every field with its default, and the checks that need no data.

The files in `configs/` start from `base_config` and set what their recipe changes. Fields of
`config.model` depend on the model family; each family spells them out in its own file.
"""

import difflib
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from structinit_jax import attention_init
from structinit_jax.augment import AugmentOptions
from structinit_jax.data.info import EVALUATION_SETS
from structinit_jax.errors import (
    InputError,
    is_below_one,
    is_count,
    is_positive,
    is_positive_or_zero,
    is_reference,
    require,
)
from structinit_jax.models.fields import check_fields as check_model_fields
from structinit_jax.models.registry import default_config
from structinit_jax.training.optimizer import SCHEDULES, find_loss, find_optimizer


def base_config(model: str = "vit") -> ConfigDict:
    """Returns a config with every field at its default.

    Args:
      model: Model family ('vit', 'swin', 'mixer', 'convmixer'), a variant under timm's name
        ('vit_tiny_patch16_224'), or a family of your own as 'module:Class'.
    """
    model_fields = default_config(model)
    image_size = model_fields.pop("image_size", 224)
    config = ConfigDict()

    # -- schedule ----------------------------------------------------------------------------------
    config.seed = 0  # of everything random: start weights, data order, augmentation
    config.num_epochs = 30.0
    config.num_steps = 0  # if positive, overrides num_epochs
    config.batch_size = 128  # global: summed over all devices of all hosts

    # -- loss and optimizer ------------------------------------------------------------------------
    config.loss = "softmax_cross_entropy"  # or your own, as 'module:function'
    config.label_smoothing = 0.1
    config.optimizer = "adamw"  # or your own, as 'module:function'
    config.schedule = "cosine"  # or 'timm_cosine', by epoch as in timm's train.py
    config.learning_rate = 1e-3  # peak of the schedule
    config.warmup_epochs = 2.0  # linear, from warmup_learning_rate to learning_rate
    config.warmup_learning_rate = 0.0
    config.final_learning_rate = 1e-6  # end of the cosine decay
    config.cooldown_epochs = 0.0  # the last of num_epochs, spent at final_learning_rate
    config.weight_decay = 0.05  # on matrices only: not on biases, norms, positions, class token
    config.layer_decay = 1.0  # learning rate multiplier from each block to the one before it
    config.adam_b2 = 0.999
    config.adam_epsilon = 1e-8
    config.clip_norm = 1.0  # global gradient norm; 0 disables clipping
    config.ema_decay = 0.0  # of averaged weights, which are evaluated as well; 0 disables them

    # -- devices -----------------------------------------------------------------------------------
    config.fsdp = 1  # devices that share one copy of weights and optimizer state, to save memory
    config.accumulate_steps = 1  # parts into which each batch is split, to save memory

    # -- logging, evaluation, checkpoints ----------------------------------------------------------
    config.on_nonfinite = "stop"  # or 'skip': what to do about a non-finite loss or gradient
    config.log_every_steps = 20
    config.eval_every_epochs = 5.0
    config.checkpoint_every_steps = 500
    config.keep_checkpoints = 2  # the newest ones; the best one is kept in addition

    # -- model and initialization ------------------------------------------------------------------
    config.model = model_fields
    # Name of the scheme, or your own as 'module:function', and its options.
    config.attention_init = dict(name="impulse", kernel_size=3)
    if config.model.name == "convmixer":
        del config.attention_init.kernel_size  # its layers have a kernel size of their own
    elif config.model.name == "mixer":  # the others do not help it: attention_init.token_mixing
        config.attention_init = dict(name="default")
    # Safetensors file of a timm model of the same size or larger, at any resolution. If given, all
    # weights but the head are selected from it (Xu et al. 2024), and attention_init is not used.
    config.start_from = ""

    # -- augmentation ------------------------------------------------------------------------------
    config.augment = dict(
        crop="none",  # 'none', 'pad' (pad, then crop to size), or 'resized' (random box, resized)
        crop_padding=4,  # pixels on each side, for crop='pad'
        crop_scale=(0.08, 1.0),  # range of the box's area, as a fraction, for crop='resized'
        crop_ratio=(3 / 4, 4 / 3),  # range of the box's width over height, for crop='resized'
        interpolation="random",  # 'bilinear', 'bicubic', or 'random': one of them at each use
        flip=0.0,  # probability of a horizontal flip
        rand_augment="",  # timm's notation, such as 'rand-m9-mstd0.5-inc1'; empty disables it
        color_jitter=(0.0, 0.0, 0.0),  # brightness, contrast, saturation and optionally hue;
        # without effect when rand_augment is set, as in timm
        erasing=0.0,  # probability of random erasing
        erasing_mode="pixel",  # what fills the box: 'pixel', 'rand' or 'const'
        erase_after_mixing=False,  # True is the order of timm's train script with its prefetcher
        mixup=0.0,  # alpha; 0 disables mixup
        cutmix=0.0,  # alpha; 0 disables cutmix
        mix_probability=1.0,  # probability that a group of images is mixed
        mix_switch=0.5,  # probability of cutmix when both are enabled
        mix_group=0,  # images that share one lambda; 0 is the whole batch, 1 one lambda per image
    )

    # -- data --------------------------------------------------------------------------------------
    config.data = dict(
        name="",  # TFDS name, 'folder', or your own data set, as 'module:function'
        data_dir="",  # empty: TFDS's default directory
        manual_dir="",  # directory of files that you downloaded by hand
        on_bad_image="stop",  # or 'skip': what to do about an image that cannot be decoded
        train_split="train",  # TFDS syntax: 'train[:90%]', 'train+validation'
        eval_split="test",  # a split of your own, such as 'train[90%:]', may choose the best step
        train_eval_split="",  # training images to evaluate too, without augmentation, if not empty
        eval_name="",  # an ImageNet test set that replaces eval_split, such as 'imagenet_v2'
        drop_remainder=False,  # whether each epoch leaves out its last partial batch
        repeats=1,  # consecutive copies of each training example (repeated augmentation)
        image_size=image_size,  # height and width of the model's input in pixels
        crop_fraction=1.0,  # of the shorter side, kept by the center crop of test images
        channels=3,
        mean=(0.485, 0.456, 0.406),  # per channel, of pixels scaled to [0, 1]
        std=(0.229, 0.224, 0.225),
    )
    return config


def parse_row(row: str, columns: Mapping[str, Sequence[str]]) -> list[str]:
    """Parses the table row after the colon of `--config=file.py:row`.

    Args:
      row: One choice for each column, separated by commas. Columns left out at the end take their
        first choice.
      columns: Choices of each column, by the column's name.
    """
    words = row.split(",") if row else []
    form = f"the row is written as {','.join(columns)}"
    if len(words) > len(columns):
        raise InputError(f"{row!r} has {len(words)} words, expected {len(columns)}: {form}")
    for word, (column, choices) in zip(words, columns.items(), strict=False):
        if word not in choices:
            raise InputError(f"{column} {word!r} is not one of {', '.join(choices)}; {form}")
    return words + [choices[0] for choices in list(columns.values())[len(words) :]]


# -- validation ------------------------------------------------------------------------------------


def _is_name(x):
    return isinstance(x, str) and x != ""


# What a value must be, the test for it (a TypeError means no), and the fields that must meet it,
# separated by spaces. Those of `config.model` are in `models.fields`.
NEEDS = [
    ("a whole number in [0, 2**32)", lambda x: is_count(x, 0) and x < 2**32, "seed"),
    (
        "a positive whole number",
        is_count,
        "batch_size fsdp accumulate_steps log_every_steps checkpoint_every_steps "
        "data.repeats data.image_size",
    ),
    (
        "a whole number, 2 or more, since a crash can damage the newest checkpoint",
        lambda x: is_count(x, 2),
        "keep_checkpoints",
    ),
    ("a whole number, 0 or more", lambda x: is_count(x, 0), "num_steps"),
    (
        "a finite number above 0",
        is_positive,
        "num_epochs learning_rate adam_epsilon eval_every_epochs",
    ),
    (
        "a finite number, 0 or more",
        is_positive_or_zero,
        "warmup_epochs warmup_learning_rate final_learning_rate cooldown_epochs weight_decay "
        "clip_norm",
    ),
    ("a number in [0, 1)", is_below_one, "label_smoothing adam_b2 ema_decay"),
    ("a number in (0, 1]", lambda x: 0 < x <= 1, "layer_decay data.crop_fraction"),
    (f"one of {', '.join(map(repr, SCHEDULES))}", SCHEDULES.__contains__, "schedule"),
    ("a name", _is_name, "loss optimizer"),
    ("a data set, such as 'cifar10', 'folder' or 'my_module:my_dataset'", _is_name, "data.name"),
    ("'stop' or 'skip'", ("stop", "skip").__contains__, "on_nonfinite data.on_bad_image"),
    (
        f"empty or one of {', '.join(EVALUATION_SETS)}",
        lambda x: x == "" or x.split("/")[0] in EVALUATION_SETS,
        "data.eval_name",
    ),
    ("true or false", lambda x: isinstance(x, bool), "data.drop_remainder"),
    ("1 (grayscale) or 3 (RGB)", (1, 3).__contains__, "data.channels"),
    ("finite numbers", lambda x: all(map(math.isfinite, x)), "data.mean"),
    ("finite numbers above 0", lambda x: all(map(is_positive, x)), "data.std"),
]


def validate(config: ConfigDict) -> None:
    """Raises `InputError` for every error that can be found without data or devices."""
    check_fields(config)
    values = flatten_dict(config.to_dict(), sep=".")
    for text, holds, fields in NEEDS:
        for field in fields.split():
            require(f"config.{field}", values[field], text, holds)
    if not is_reference(config.model.name):  # your own family has its own fields
        check_model_fields(dict(config.model))
    channels, eval_name = config.data.channels, config.data.eval_name
    text = f"a tuple of {channels}, one number for each of config.data.channels={channels}"
    for field in ("data.mean", "data.std"):
        require(f"config.{field}", values[field], text, lambda x: len(x) == channels)
    if not config.num_steps:
        text = f"below config.num_epochs={config.num_epochs}, the last of which they are"
        cooldown_epochs = config.cooldown_epochs
        require("config.cooldown_epochs", cooldown_epochs, text, lambda x: x < config.num_epochs)
    if eval_name:
        text = f"1000, the classes of imagenet2012, for config.data.eval_name={eval_name!r}"
        num_classes = config.model.num_classes
        require("config.model.num_classes", num_classes, text, lambda x: x == 1000)
    find_loss(config.loss)
    find_optimizer(config.optimizer)
    augment_options(config)
    make_attention_init(config)
    if _needs_pytorch_init(config):
        raise InputError(
            "config.attention_init.name='kaiming_uniform' is PyTorch's initialization of the whole "
            f"model, but config.model.base_init={config.model.base_init!r}: set it to 'pytorch'"
        )


def check_fields(config: ConfigDict) -> None:
    """Raises `InputError` unless the config has the fields of `base_config` and no others.

    A section that was set as a whole, or that belongs to another model, may lack some.
    """
    name = config.get("model", {}).get("name", "vit")
    base = base_config(name)
    for section in ("", "model", "augment", "data"):
        fields, wanted = (c[section] if section else c for c in (config, base))
        missing, unknown = set(wanted) - set(fields), set(fields) - set(wanted)
        problems = {"lacks": missing, "has unknown fields": unknown}
        text = " and ".join(f"{k} {', '.join(sorted(v))}" for k, v in problems.items() if v)
        if text:
            path = f"config.{section}".rstrip(".")
            near = [difflib.get_close_matches(field, wanted, n=1) for field in sorted(unknown)]
            near = [repr(name) for names in near for name in names]
            hint = f"did you mean {', '.join(near)}? Otherwise " if near else ""
            raise InputError(
                f"{path} {text}: {hint}start from structinit_jax.config.base_config({name!r}) and "
                f"set single fields, such as {path}.{next(iter(wanted))}"
            )


# -- what sections stand for -----------------------------------------------------------------------


def augment_options(config: ConfigDict) -> AugmentOptions:
    """Returns the augmentation of training images, from `config.augment` and related fields."""
    # Tuples are lists in a config that was read from JSON.
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in config.augment.items()}
    return AugmentOptions(
        num_classes=config.model.num_classes,
        mean=tuple(config.data.mean),
        std=tuple(config.data.std),
        image_size=config.data.image_size,
        label_smoothing=config.label_smoothing,
        **options,
    )


def order_options(config: ConfigDict) -> dict[str, Any]:
    """Returns the arguments of `Loader.train_batches` that decide which examples a step sees."""
    return dict(
        batch_size=config.batch_size,
        seed=config.seed,
        repeats=config.data.repeats,
        drop_remainder=config.data.drop_remainder,
    )


def make_attention_init(config: ConfigDict) -> attention_init.AttentionInit:
    """Returns the scheme that `config.attention_init` names."""
    scheme = _prefix_errors(attention_init.by_name, **{"name": "", **config.attention_init})
    with_prefix = functools.partial(_prefix_errors, scheme)
    with_prefix.__name__ = config.attention_init.name  # for error messages
    return with_prefix


def drop_foreign_options(config: ConfigDict) -> list[str]:
    """Removes options of `config.attention_init` that only other schemes take, and returns them.

    A new `config.attention_init.name` thus suffices to switch from a scheme with a `kernel_size`
    to one without. Options that no scheme takes stay, and are refused later.
    """
    section = config.attention_init
    own = _prefix_errors(attention_init.scheme_options, section.get("name", ""))
    known = {o for name in attention_init.SCHEMES for o in attention_init.scheme_options(name)}
    foreign = [option for option in section if option in known and option not in own]
    with config.unlocked():
        for option in foreign:
            del section[option]
    return foreign


def set_base_init(config: ConfigDict) -> bool:
    """Sets `config.model.base_init` to what 'kaiming_uniform' needs; returns whether it changed."""
    needed = _needs_pytorch_init(config)
    if needed:
        config.model.base_init = "pytorch"
    return needed


def _needs_pytorch_init(config):
    base_init = config.model.get("base_init", "pytorch")  # your own family may have none
    return config.attention_init.get("name") == "kaiming_uniform" and base_init != "pytorch"


def _prefix_errors(function, *args, **kwargs):
    """Calls a function of `attention_init` and adds the config section to its error messages."""
    try:
        return function(*args, **kwargs)
    except InputError as error:
        if str(error).startswith("config."):
            raise
        raise InputError(f"config.attention_init: {error}") from error
