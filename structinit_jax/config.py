"""The config of a run: every field with its default, and the checks that need no data.

The files in `configs/` start from `base_config` and set what their recipe changes. The model family
defines the fields of `config.model`, and `augment.AugmentFields` defines those of `config.augment`.
"""

import ast
import contextlib
import dataclasses
import inspect
import json
import runpy
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from absl import flags
from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from structinit_jax import attention_init, models
from structinit_jax.augment import AugmentFields
from structinit_jax.errors import (
    AtLeastTwo,
    Check,
    Fraction,
    InputError,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    check_fields,
    find,
    is_reference,
    prefixed,
    printable,
    require,
    suggest,
)
from structinit_jax.files import open_path, read_json

Share = Annotated[float, Check("above 0 and at most 1", lambda x: 0 < x <= 1)]
JSON = Check("a JSON value: to pass an array, name a function, 'module:function'", json.dumps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFields:
    """Fields of the config outside its sections."""

    # -- schedule ----------------------------------------------------------------------------------
    seed: NonNegativeInt = 0  # initial weights, data order, augmentation and all other randomness
    num_epochs: PositiveFloat = 30.0
    num_steps: NonNegativeInt = 0  # if positive, overrides num_epochs
    batch_size: PositiveInt = 128  # global: the total over all devices of all hosts

    # -- loss and optimizer ------------------------------------------------------------------------
    loss: str = "softmax_cross_entropy"  # or 'module:function'
    label_smoothing: Fraction = 0.1
    optimizer: str = "adamw"  # or 'module:function'
    schedule: Literal["cosine", "timm_cosine"] = "cosine"  # 'timm_cosine' is per epoch, as in timm
    learning_rate: PositiveFloat = 1e-3  # peak of the schedule
    warmup_epochs: NonNegativeFloat = 2.0  # linear, from warmup_learning_rate to learning_rate
    warmup_learning_rate: NonNegativeFloat = 0.0
    final_learning_rate: NonNegativeFloat = 1e-6  # end of the cosine decay
    # Final epochs, included in num_epochs, at final_learning_rate; timm adds them to its epochs.
    cooldown_epochs: NonNegativeFloat = 0.0
    # For 'adamw': applied to kernels, not to biases, norms, positions or tokens.
    weight_decay: NonNegativeFloat = 0.05
    adam_b2: Fraction = 0.999
    adam_epsilon: PositiveFloat = 1e-8
    clip_norm: NonNegativeFloat = 1.0  # global gradient norm; 0 disables clipping
    # If positive, evaluation and export use an exponential moving average of the weights. The 2025
    # paper's command for small data sets passes 0.9999 but not the flag that enables it in timm.
    ema_decay: Fraction = 0.0

    # -- devices -----------------------------------------------------------------------------------
    fsdp: PositiveInt = 1  # devices that share one copy of weights and optimizer state
    accumulate_steps: PositiveInt = 1  # parts into which each batch is split, to save memory

    # -- logging, evaluation, checkpoints ----------------------------------------------------------
    log_every_steps: PositiveInt = 20
    eval_every_epochs: PositiveFloat = 5.0
    checkpoint_every_steps: PositiveInt = 500
    # Number of newest checkpoints to keep (a crash can damage one); the best one is kept too.
    keep_checkpoints: AtLeastTwo = 2

    # Safetensors file of a timm model of the same size or larger; a ViT's positions are resampled.
    # If set, all weights except the head are selected from it (Xu et al. 2024), and the scheme in
    # attention_init is not used.
    start_from: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataFields:
    """Fields of `config.data`."""

    name: str = ""  # TFDS name, 'folder', or 'module:function'
    # Folder that holds TFDS's data sets, the images ('folder') or the files of 'fashion_mnist'. If
    # empty, $TFDS_DATA_DIR or ~/tensorflow_datasets (for 'fashion_mnist', fashion_mnist/ in it).
    data_dir: str = ""
    on_bad_image: Literal["stop", "skip"] = "stop"  # if an image cannot be decoded
    train_split: str = "train"  # TFDS syntax: 'train[:90%]', 'train+validation'
    eval_split: str = "test"  # or a validation split such as 'train[90%:]', to choose the best step
    drop_remainder: bool = False  # whether to drop the last partial batch of each epoch
    repeats: PositiveInt = 1  # copies of each training example (repeated augmentation)
    image_size: PositiveInt = 224  # height and width of the model's input in pixels
    crop_fraction: Share = 1.0  # of the shorter side, kept by the center crop of test images
    channels: PositiveInt = 3  # gray and color images are converted to 1 or 3
    mean: tuple[Probability, ...] = (0.485, 0.456, 0.406)  # per channel, of pixels scaled to [0, 1]
    std: tuple[Share, ...] = (0.229, 0.224, 0.225)


def base_config(model: str = "vit") -> ConfigDict:
    """Returns a config with every field at its default.

    Args:
      model: Model family ('vit', 'swin', 'mixer', 'convmixer'), a variant of `models.VARIANTS`,
        named as in timm ('vit_tiny_patch16_224'), or 'module:Class'.
    """
    with prefixed("config.model."):
        model_fields = models.default_config(model)
    config = ConfigDict(dataclasses.asdict(RunFields()))
    config.data = dataclasses.asdict(DataFields(image_size=model_fields.pop("image_size", 224)))
    config.augment = dataclasses.asdict(AugmentFields())
    config.model = model_fields
    # Name of the scheme, or 'module:function', and its options.
    config.attention_init = dict(name="impulse")
    if config.model.name == "mixer":  # Others do not help; see attention_init.token_mixing.
        config.attention_init.name = "default"
    return config


def validate(config: ConfigDict) -> None:
    """Raises `InputError` for errors that can be found without data, devices or initial weights.

    Scheme, loss and optimizer, which only training needs, are checked when it builds them.
    """
    sections = ("data", "augment", "model", "attention_init")
    for name in sections:
        section = config.get(name)
        needs = "a section: set its fields, such as config.attention_init.name = 'default'"
        require(f"config.{name}", section, needs, isinstance(section, ConfigDict))
    run = {field: value for field, value in config.items() if field not in sections}
    _check_section(RunFields, run, "config.")
    _check_section(DataFields, dict(config.data), "config.data.")
    _check_section(AugmentFields, dict(config.augment), "config.augment.")
    data = config.data
    model = config.model
    with prefixed("config.model."):
        models.check_fields(dict(model))
    for field in ("image_size", "channels"):
        needs = f"left out: the model gets config.data.{field}"
        require(f"config.model.{field}", model.get(field), needs, field not in model)
    num_classes = model.get("num_classes")
    require("config.model.num_classes", num_classes, "set", num_classes is not None)
    for name in ("model", "attention_init"):  # the sections whose fields are not all known
        for field, value in config[name].to_dict().items():
            JSON.require(f"config.{name}.{field}", value)
    for field in ("mean", "std"):
        needs = f"a tuple with one number per channel (config.data.channels={data.channels})"
        require(f"config.data.{field}", data[field], needs, len(data[field]) == data.channels)
    needs = "1 or 3 for config.augment.rand_augment, whose operations are for gray and color images"
    fits = not config.augment.rand_augment or data.channels in (1, 3)
    require("config.data.channels", data.channels, needs, fits)
    group = config.augment.mix_group
    needs = f"0 (the whole batch) or a divisor of config.batch_size={config.batch_size}"
    require("config.augment.mix_group", group, needs, not group or config.batch_size % group == 0)
    if config.attention_init.get("name") == "impulse_2025" and not config.start_from:
        positions = model.get("positions", "learned")
        needs = "'learned' for config.attention_init.name='impulse_2025'"
        require("config.model.positions", positions, needs, positions == "learned")
    final = config.final_learning_rate
    needs = f"at most config.learning_rate={config.learning_rate}"
    require("config.final_learning_rate", final, needs, final <= config.learning_rate)
    if config.schedule == "timm_cosine" and config.warmup_epochs:
        warmup = config.warmup_learning_rate
        needs = "above 0: with config.schedule='timm_cosine', it is the rate of the first epoch"
        require("config.warmup_learning_rate", warmup, needs, warmup > 0)
    if not config.num_steps:
        cooldown = config.cooldown_epochs
        needs = f"below config.num_epochs={config.num_epochs}, which includes the cooldown"
        require("config.cooldown_epochs", cooldown, needs, cooldown < config.num_epochs)


def _check_section(owner: type, values: dict[str, Any], prefix: str) -> None:
    check_fields(owner, values, prefix)
    for field in dataclasses.fields(owner):
        if field.name not in values:
            raise InputError(
                f"{prefix}{field.name} is missing: set fields with update(), which keeps others"
            )


# -- the scheme ------------------------------------------------------------------------------------


def find_scheme(name: str) -> Callable[..., attention_init.AttentionInit]:
    """Returns the scheme that a name or 'module:function' refers to."""
    return find(name, attention_init.SCHEMES, "config.attention_init.name")


def scheme_options(name: str) -> dict[str, Any]:
    """Returns the options of a scheme, which `config.attention_init` can set, with their defaults.

    The default of a required option is `inspect.Parameter.empty`.
    """
    parameters = inspect.signature(find_scheme(name)).parameters
    return {option: parameter.default for option, parameter in parameters.items()}


def to_fields(config: ConfigDict) -> dict[str, Any]:
    """Returns all fields of a config, as a run records them: as JSON has them, with lists.

    Options of the scheme that are not set have their defaults, which a later version may change.
    """
    fields = json.loads(config.to_json())
    options = {}
    with contextlib.suppress(InputError):  # A run that resumes does not need its custom scheme.
        defaults = scheme_options(fields["attention_init"].get("name"))
        options = {name: value for name, value in defaults.items() if JSON.accepts(value)}
    fields["attention_init"] = json.loads(json.dumps(options)) | fields["attention_init"]
    return fields


def make_attention_init(config: ConfigDict) -> attention_init.AttentionInit:
    """Returns the `(rng, site) -> weights` function that `config.attention_init` describes."""
    options = dict(config.attention_init)
    scheme = find_scheme(options.pop("name", ""))
    try:
        with prefixed("config.attention_init: "):
            return scheme(**options)
    except TypeError as error:
        raise InputError(
            f"config.attention_init: {error}: a scheme takes its options and returns a function "
            "(rng, site) -> weights"
        ) from error


def set_scheme(config: ConfigDict, name: str) -> None:
    """Sets `config.attention_init.name`.

    Removes the old scheme's options that the new one does not take, and prints a note for each.
    """
    section = config.attention_init
    options = scheme_options(name)
    if name == section.get("name"):
        return
    with config.unlocked():
        section.name = name
        for option in sorted(set(section) - {"name", *options}):
            print(f"note: attention_init: {name!r} does not use {option}")
            del section[option]


# -- fields from text ------------------------------------------------------------------------------

Overrides = Sequence[tuple[str, str]]  # fields, such as 'model.depth', and the text of their values


def set_fields(config: ConfigDict, overrides: Overrides) -> None:
    """Sets fields in any order, as the command line does."""
    # The scheme's name is set first, because its options depend on it.
    for field, text in sorted(overrides, key=lambda override: override[0] != "attention_init.name"):
        set_field(config, field, text)


def set_field(config: ConfigDict, field: str, text: str) -> None:
    """Sets a field, such as 'model.depth', as `--config.FIELD=VALUE` does.

    Unlike `ml_collections.config_flags`, this can set options of the scheme that are not yet in
    `attention_init`. For the name of the scheme, see `set_scheme`.
    """
    if field == "attention_init.name":
        return set_scheme(config, text)
    fields = flatten_dict(config.to_dict(), sep=".")
    if field.startswith("attention_init."):
        options = scheme_options(config.attention_init.name).items()
        fields = {f"attention_init.{option}": default for option, default in options} | fields
    if field not in fields:
        raise InputError(f"config.{field} does not exist: {suggest(field, fields)}")
    section, _, name = field.rpartition(".")
    owner = config[section] if section else config
    old = fields[field]
    try:
        value = _parse(text, old)
        # ConfigDict would convert True to 1.0, and does not know the types of unset options.
        is_number = isinstance(old, int | float) and not isinstance(old, bool)
        if is_number and isinstance(value, bool | str):
            raise TypeError
        with config.unlocked():
            owner[name] = value
    except (TypeError, ValueError) as error:
        kind = f"{type(old).__name__}, such as {old}"
        raise InputError(f"config.{field}={text} must be of type {kind}") from error


def _parse(text: str, old: Any) -> Any:
    """Converts text to the type of the old value of a field."""
    if isinstance(old, str):
        return text
    if isinstance(old, bool):
        return flags.BooleanParser().parse(text)
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return (value,) if isinstance(old, tuple) and not isinstance(value, tuple | list) else value


# -- config files and the config of a workdir ------------------------------------------------------


def load_config(location: str | Path) -> ConfigDict:
    """Runs a config file, such as 'configs/vit_2025_small.py:food101', and returns its config.

    The words after the colon, separated by commas, are passed to its `get_config` in order. Raises
    `InputError` if there is no such file or row.
    """
    stem, suffix, row = str(location).partition(".py:")
    path = str(Path(stem + suffix.removesuffix(":")).expanduser())
    needs = (
        f"an existing Python file, relative to {Path.cwd()} or absolute; for the config of a run, "
        "pass --workdir"
    )
    require("config", path, needs, path.endswith(".py") and Path(path).is_file())
    with _explain(path):
        get_config = runpy.run_path(path).get("get_config")
    needs = "a function that returns base_config() with changes"
    require(f"config={path}: get_config", get_config, needs, inspect.isfunction(get_config))
    signature = inspect.signature(get_config)
    words = row.split(",") if row else []
    try:
        bound = signature.bind(*words).arguments
    except TypeError as error:
        columns = ", ".join(signature.parameters)
        takes = f"a row is {columns}" if columns else "the file takes no row after the colon"
        raise InputError(f"config={location}: {error}: {takes}") from error
    annotated = {name: bound[name] for name in bound if name in get_config.__annotations__}
    check_fields(get_config, annotated, f"config={location}: ")
    with _explain(path):
        config = get_config(*words)
    needs = "a ConfigDict: base_config() with changes"
    require(f"config={path}: get_config()", config, needs, isinstance(config, ConfigDict))
    return config


@contextlib.contextmanager
def _explain(path: str) -> Iterator[None]:
    """Turns an error of a config file into an `InputError` that names the line."""
    try:
        yield
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f":{frame.lineno}" for frame in frames if frame.filename == path]
        place = "".join([path, *lines[-1:]])
        raise InputError(f"config={place}: {type(error).__name__}: {error}") from error


# Fields that may name code to import, as module:function.
CODE_FIELDS = ("model.name", "data.name", "attention_init.name", "loss", "optimizer")


def own_code(config: ConfigDict) -> list[str]:
    """Returns the fields of a config that name Python code to import."""
    values = flatten_dict(config.to_dict(), sep=".")
    return [field for field in CODE_FIELDS if is_reference(values.get(field, ""))]


def load_run_config(workdir: str | Path, trust: bool = False) -> ConfigDict:
    """Reads the config of a run from the `config.json` of its output directory.

    Raises `InputError` if there is no config of this package, or if the config names Python code to
    import, as 'module:name', and `trust` is False.
    """
    path = open_path(workdir) / "config.json"
    with _explain_run(workdir):
        # ConfigDict refuses keys with dots, which flatten_dict would confuse with nested fields.
        fields = ConfigDict(_with_tuples(read_json(path)))
        values = flatten_dict(fields.to_dict(), sep=".")
        code = own_code(fields)
    if code and not trust:
        names = ", ".join(f"{field}={values[field]!r}" for field in code)
        raise InputError(
            f"{workdir} names Python code to import: {names}. If you trust whoever wrote this "
            "directory, pass --trust_workdir (in Python, trust=True)"
        )
    with _explain_run(workdir):
        config = base_config(fields.model.name)
        # Options depend on the scheme, so the default scheme's are not kept.
        config.attention_init = fields.attention_init.to_dict()
        if is_reference(config.model.name):  # Its arguments can be of any type, and required.
            config.model = config.model.to_dict() | fields.model.to_dict()
        known = flatten_dict(config.to_dict(), sep=".")
        config.update_from_flattened_dict({k: v for k, v in values.items() if k in known})
        config.attention_init = _without_defaults(config.attention_init.to_dict())
    if gone := [f"{printable(k)}={value!r}" for k, value in values.items() if k not in known]:
        print(f"note: {path} has fields unknown to this version: {', '.join(gone)}")
    return config


@contextlib.contextmanager
def _explain_run(workdir: str | Path) -> Iterator[None]:
    """Turns an error about the `config.json` of a workdir into an `InputError`."""
    try:
        yield
    except (ValueError, AttributeError, TypeError) as error:
        raise InputError(
            f"workdir={workdir}: config.json cannot be used ({error}): pass the output directory "
            "of a run (in a comparison, SETTING/seed_K), or --config with a config file"
        ) from error


def _without_defaults(section: dict[str, Any]) -> dict[str, Any]:
    """Returns the section `attention_init` without the options that have their defaults.

    `to_fields` adds them again; another scheme, set later, has its own defaults. A custom scheme is
    not imported, and keeps all options.
    """
    name = section.get("name")
    defaults = scheme_options(name) if name in attention_init.SCHEMES else {}
    return {k: value for k, value in section.items() if k not in defaults or value != defaults[k]}


def _with_tuples(value: Any) -> Any:
    """Returns a value that was read from JSON, with tuples for lists."""
    if isinstance(value, dict):
        return {key: _with_tuples(item) for key, item in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value
