"""From the flags of a comparison to its settings, the points of the grid without the seed."""

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence

from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from structinit_jax import attention_init, command_line
from structinit_jax import config as config_lib
from structinit_jax.errors import InputError

# Fields that a scheme needs, besides those of `config.set_base_init`.
REQUIRED = {"impulse_2025": {"model.positions": "learned"}}


def expand(
    config: ConfigDict, schemes: Sequence[str], grid: Mapping[str, Sequence[str]]
) -> dict[str, ConfigDict]:
    """Returns the config of each setting by its name, such as 'impulse,model.num_heads=6'.

    The fields that a scheme needs are set with it, and options that it does not take are left out.
    An option of `attention_init` is an axis of those schemes only that take it.

    Args:
      config: Config that all settings start from.
      schemes: Names for `config.attention_init.name`.
      grid: Values of each further axis as they are written on the command line, by field.

    Raises:
      InputError: A scheme, a field or a value does not exist, or appears twice.
    """
    for field in grid:
        other = {"seed": "--seeds=N", "attention_init.name": "--schemes=A,B"}.get(field)
        if other:
            raise InputError(f"--grid.config.{field} cannot be an axis: use {other}")
    settings = {}
    for scheme in schemes:
        start = config.copy_and_resolve_references()
        start.attention_init.name = scheme
        config_lib.drop_foreign_options(start)
        if config_lib.set_base_init(start):
            print(f"note: {scheme} is trained with config.model.base_init='pytorch'")
        for field, value in REQUIRED.get(scheme, {}).items():
            if field in _fields(start):  # the scheme refuses models without it when it is checked
                start.update_from_flattened_dict({field: value})
                print(f"note: {scheme} is trained with config.{field}={value!r}")
        options = {f"attention_init.{name}" for name in attention_init.scheme_options(scheme)}
        axes = {
            field: values
            for field, values in grid.items()
            if not field.startswith("attention_init.") or field in options
        }
        for values in itertools.product(*axes.values()):
            point = start.copy_and_resolve_references()
            for field, text in zip(axes, values, strict=True):
                command_line.override(point, field, text)
            parts = [f"{field}={text}" for field, text in zip(axes, values, strict=True)]
            name = ",".join(file_safe(part) for part in [scheme, *parts])
            if name in settings:
                raise InputError(f"the setting {name} appears twice: give each value once")
            settings[name] = point
    return settings


def parse_axes(flags: Iterable[str]) -> dict[str, list[str]]:
    """Parses the values of --grid, such as 'config.model.num_heads=3,6', to values by field.

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
        axes[path.removeprefix("config.")] = _split(text)
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

    It has the baseline's scheme and the same other fields. Options of `attention_init` need only
    agree where both settings have them; among several settings the closest one is taken.
    """
    parts = {name: _parse_name(name) for name in names}

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
    """Returns the words of a command that trains one setting, but for --workdir and the seed.

    Args:
      config: Config of the setting.
      location: The --config that it comes from.
    """
    new, old = (_fields(c) for c in (config, command_line.load_config(location)))
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
