"""Turns the flags of a comparison into its settings: the points of the grid, without the seed."""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter

from ml_collections import ConfigDict

from structinit_jax import command_line
from structinit_jax import config as config_lib
from structinit_jax.errors import InputError


def expand(
    config: ConfigDict, schemes: Sequence[str], axes: Mapping[str, Sequence[str]]
) -> dict[str, ConfigDict]:
    """Returns the config of each setting by its name, such as 'impulse,model.num_heads=6'.

    Fields that a scheme needs are set with it, and options that it does not take are left out. An
    option of `attention_init` is an axis only for the schemes that take it.

    Args:
      config: Config that all settings start from.
      schemes: Values of `config.attention_init.name`.
      axes: Values of further fields as they are written on the command line, by field.

    Raises:
      InputError: A scheme, a field or a value does not exist, or appears twice.
    """
    options = {scheme: config_lib.scheme_options(scheme) for scheme in schemes}
    for field in axes:
        section, _, option = field.partition(".")
        if field in ("seed", "attention_init.name"):
            raise InputError(f"--grid={field} cannot be an axis: use --seeds=N and --schemes=A,B")
        if section == "attention_init" and not any(option in own for own in options.values()):
            raise InputError(f"--grid={field}: no scheme of --schemes has the option {option!r}")
    settings = {}
    for scheme in schemes:
        own = {
            field: values
            for field, values in sorted(axes.items())
            if not field.startswith("attention_init.") or field.split(".")[1] in options[scheme]
        }
        start = with_scheme(config, scheme)
        for texts in itertools.product(*own.values()):
            point = start.copy_and_resolve_references()
            for field, text in zip(own, texts, strict=True):
                command_line.set_field(point, field, text)
            # From parsed values, so that 1e-3 and 0.001 give the same name.
            parts = [scheme, *(f"{field}={attrgetter(field)(point)}" for field in own)]
            name = ",".join(re.sub(r"[^\w.=+-]", "_", part.replace(" ", "")) for part in parts)
            if name in settings:
                raise InputError(f"--schemes and --grid give {name} twice: give each value once")
            settings[name] = point.lock()
    return settings


def with_scheme(config: ConfigDict, scheme: str) -> ConfigDict:
    """Returns a config with another scheme, the options it takes, and the fields it needs."""
    config = config.copy_and_resolve_references()
    config_lib.set_scheme(config, scheme)
    return config


def parse_axes(flags: Iterable[str]) -> dict[str, list[str]]:
    """Parses values of --grid, such as 'model.num_heads=3,6', into values by field.

    Commas within brackets do not separate values.
    """
    axes = {}
    for flag in flags:
        field, equals, text = flag.removeprefix("config.").partition("=")
        if not (equals and text):
            raise InputError(f"--grid={flag} must be a field and its values: model.num_heads=3,6")
        if field in axes:
            raise InputError(f"--grid={field} is given twice: give all its values at once")
        axes[field] = re.split(r",(?![^(\[{]*[)\]}])", text)
    return axes


def find_baselines(names: Iterable[str]) -> dict[str, str | None]:
    """Returns the setting with which each setting is compared, by name, or None.

    That is the first one that has the scheme of the first setting and the same fields, apart from
    options of `attention_init`. If all settings have the same scheme, it is the first setting.
    """
    schemes, fields = {}, {}
    for name in names:
        schemes[name], *words = name.split(",")
        fields[name] = tuple(word for word in words if not word.startswith("attention_init."))
    first = next(iter(schemes))
    candidates = [name for name in schemes if schemes[name] == schemes[first]]
    if len(candidates) == len(schemes):
        return dict.fromkeys(schemes, first)
    baselines = {fields[name]: name for name in reversed(candidates)}
    return {name: baselines.get(fields[name]) for name in schemes}
