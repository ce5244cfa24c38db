"""Turns the flags of a comparison into its settings: the points of the grid, without the seed."""

import difflib
import itertools
import json
import operator
import re
from collections.abc import Iterable, Mapping, Sequence

from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from structinit_jax import attention_init, command_line
from structinit_jax import config as config_lib
from structinit_jax.errors import InputError

# Fields that a scheme needs, besides those of `config.set_base_init`.
REQUIRED = {"impulse_2025": {"model.positions": "learned"}}
# Fields that change the results by rounding at most. This is also true of the data folders, unless
# the content of the folder decides which data set it is.
HARMLESS = (
    *("checkpoint_every_steps", "keep_checkpoints", "fsdp"),
    *("model.attention_implementation", "model.remat", "model.unroll"),
)
# Bytes of a setting's name, which is also its folder's; file systems allow 255 or fewer.
MAX_NAME = 200


def expand(
    config: ConfigDict, schemes: Sequence[str], grid: Mapping[str, Sequence[str]]
) -> dict[str, ConfigDict]:
    """Returns the config of each setting by its name, such as 'impulse,model.num_heads=6'.

    Names list the fields in alphabetical order, with normalized values, so a setting has the same
    name however it is written on the command line.

    Fields that a scheme needs are set with it, and options that it does not take are left out. An
    option of `attention_init` is an axis only for the schemes that take it.

    Args:
      config: Config that all settings start from.
      schemes: Names for `config.attention_init.name`.
      grid: Values of each further axis as they are written on the command line, by field.

    Raises:
      InputError: A scheme, a field or a value does not exist, or appears twice, or a name is too
        long for a folder.
    """
    instead = {
        "seed": "--seeds=N",
        "attention_init.name": "--schemes=A,B",
        "attention_init": "--schemes=A,B and --grid.config.attention_init.OPTION=VALUES",
    }
    for field in grid:
        if field in instead:
            raise InputError(f"--grid.config.{field} cannot be an axis: use {instead[field]}")
    options = {scheme: attention_init.scheme_options(scheme) for scheme in schemes}
    _check_options(options, grid)
    settings = {}
    for scheme in schemes:
        start = with_scheme(config, scheme)
        own = {f"attention_init.{option}" for option in options[scheme]}
        axes = {}
        for field, texts in sorted(grid.items()):
            if field.startswith("attention_init.") and field not in own:
                print(f"note: {scheme} has no {field} and does not use it")
            else:
                axes[field] = _by_name(start, field, texts)
        for parts in itertools.product(*axes.values()):
            point = start.copy_and_resolve_references()
            for field, part in zip(axes, parts, strict=True):
                command_line.set_field(point, field, axes[field][part], flag="grid.config")
            settings[",".join([file_safe(scheme), *parts])] = point
    for name in settings:
        if (length := len(name.encode())) > MAX_NAME:
            flags = " and ".join(f"--grid.config.{field}" for field in grid) or "--schemes"
            raise InputError(
                f"{flags}: the setting's name {name} has {length} bytes, but a folder's name may "
                f"have at most {MAX_NAME}: use fewer axes at once, or shorter values"
            )
    return settings


def with_scheme(config: ConfigDict, scheme: str) -> ConfigDict:
    """Returns a config with another scheme, the options it takes, and the fields it needs."""
    config = config.copy_and_resolve_references()
    config.attention_init.name = scheme
    config_lib.drop_foreign_options(config)
    if config_lib.set_base_init(config):
        print(f"note: {scheme} uses config.model.base_init='pytorch'")
    for field, value in REQUIRED.get(scheme, {}).items():
        if field in _fields(config):  # the scheme refuses models without it when it is checked
            config.update_from_flattened_dict({field: value})
            print(f"note: {scheme} uses config.{field}={value!r}")
    return config


def _check_options(options, grid):
    """Refuses axes over options of `attention_init` that none of the schemes takes."""
    known = sorted(set().union(*options.values()))
    for field in grid:
        section, _, option = field.partition(".")
        if section == "attention_init" and option and option not in known:
            near = difflib.get_close_matches(option, known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise InputError(
                f"--grid.config.{field}: none of --schemes={','.join(options)} has the option "
                f"{option!r}; {hint}they have {', '.join(known) or 'no options'}"
            )


def _by_name(config, field, texts):
    """Returns the texts of an axis by their parts of a setting's name."""
    parts, values = {}, {}
    for text in texts:
        point = config.copy_and_resolve_references()
        command_line.set_field(point, field, text, flag="grid.config")
        value = _canonical(operator.attrgetter(field)(point))
        part = file_safe(f"{field}={value}")
        if part in parts:
            what = "are the same value: give each once"
            if value != values[part]:
                what = f"would both be named {part}: compare one of them in another --workdir"
            raise InputError(
                f"--grid.config.{field}={','.join(texts)}: {parts[part]} and {text} {what}"
            )
        parts[part], values[part] = text, value
    return parts


def _canonical(value):
    """Normalizes the text of a value: 1e-3 and 0.001, or true and True, give the same text."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    if isinstance(value, ConfigDict):
        value = value.to_dict()
    return value if isinstance(value, str) else str(value).replace(" ", "")


def parse_axes(flags: Iterable[str]) -> dict[str, list[str]]:
    """Parses values of --grid, such as 'config.model.num_heads=3,6', into values by field.

    Commas within brackets do not separate values.
    """
    axes = {}
    for flag in flags:
        path, equals, text = flag.partition("=")
        if not (path.startswith("config.") and equals and text):
            raise InputError(
                f"--grid.{flag} must name a field and its values: "
                "--grid.config.model.num_heads=3,6,12"
            )
        field = path.removeprefix("config.")
        if field in axes:
            raise InputError(
                f"--grid.{path} is given twice: give all values at once, as in "
                f"--grid.{path}={','.join(axes[field])},{text}"
            )
        axes[field] = _split(text)
    return axes


def _split(text):
    """Splits text at the commas that no brackets enclose."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def find_baselines(names: Iterable[str], scheme: str) -> dict[str, str | None]:
    """Returns the setting with which each setting is compared, by name, or None.

    That is the one with the baseline's scheme and otherwise the same fields. Options of
    `attention_init` need to agree only if both settings have them; the closest setting is taken.
    If all settings have the same scheme, it is the first setting.
    """
    parts = {name: _parse_name(name) for name in names}
    if len({scheme for scheme, _, _ in parts.values()}) == 1:
        return dict.fromkeys(parts, next(iter(parts)))

    def find(name):
        _, fields, options = parts[name]
        differences = {
            other: len(options.items() ^ others.items())
            for other, (its_scheme, its_fields, others) in parts.items()
            if (its_scheme, its_fields) == (file_safe(scheme), fields)
            and all(options[key] == others[key] for key in options.keys() & others.keys())
        }
        return min(differences, key=differences.__getitem__, default=None)

    return {name: find(name) for name in parts}


def _parse_name(name):
    """Returns the scheme of a setting, its fields and its options of `attention_init`."""
    scheme, *words = name.split(",")
    values = dict(word.partition("=")[::2] for word in words)
    options = {key: values.pop(key) for key in [*values] if key.startswith("attention_init.")}
    return file_safe(scheme), values, options


def command(config: ConfigDict, location: str) -> list[str]:
    """Returns the words of a command that trains one setting, except --workdir and the seed.

    Args:
      config: Config of the setting.
      location: The --config that it comes from.
    """
    new, old = (_fields(c) for c in (config, config_lib.load_config(location)))
    changed = [
        f"--config.{field}={value}".replace("'", '"')  # readable within the quotes of a shell
        for field, value in new.items()
        if old.get(field) != value and field != "seed"
    ]
    return ["python", "-m", "structinit_jax.main", f"--config={location}", *changed]


def file_safe(text: str) -> str:
    """Replaces all characters that could have a meaning in a path or a shell."""
    return re.sub(r"[^\w.=+-]", "_", text)


def to_json(config: ConfigDict) -> dict:
    """Returns the config of a setting as a JSON object without the seed."""
    fields = json.loads(config.to_json())
    del fields["seed"]
    return fields


def _fields(config):
    """Values by field; `attention_init` is one, since its options depend on the scheme."""
    values = config.to_dict()
    scheme = values.pop("attention_init")
    return flatten_dict(values, sep=".") | {"attention_init": scheme}
