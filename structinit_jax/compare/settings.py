"""The settings of a comparison: the points of a grid, or the rows of a table of the papers."""

import csv
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from structinit_jax import config as config_lib
from structinit_jax.errors import InputError, require, suggest
from structinit_jax.files import read_file

PAPERS = Path("configs/papers.csv")  # in a checkout, like the configs that it names
MAX_NAME = 255  # bytes in the name of a setting, which is also that of its folder


def expand(
    config: ConfigDict, schemes: Sequence[str], axes: Mapping[str, Sequence[str]]
) -> dict[str, ConfigDict]:
    """Returns the config of each setting by its name, such as 'impulse,model.num_heads=6'.

    `schemes` are values of `config.attention_init.name`, set by `config.set_scheme`. `axes` maps
    further fields to their values, as text from the command line. An axis for an option of
    `attention_init` applies to the schemes that take the option; the others ignore it.

    Raises `InputError` if a scheme, a field or a value does not exist.
    """
    options = {
        scheme: {f"attention_init.{option}" for option in config_lib.scheme_options(scheme)}
        for scheme in schemes
    }
    varied = len(options) > 1 or any(field.startswith("attention_init.") for field in axes)
    if varied and (config.start_from or "start_from" in axes):
        raise InputError(
            "config.start_from replaces config.attention_init: pass a single scheme, and none of "
            "its options in --grid"
        )
    known = set().union(*options.values())
    needs = "fields other than seed and attention_init.name: use --seeds and --schemes"
    require("--grid", list(axes), needs, not {"seed", "attention_init.name"} & axes.keys())
    settings = {}
    for scheme in schemes:
        others = known - options[scheme]
        own = {field: values for field, values in sorted(axes.items()) if field not in others}
        start = config.copy_and_resolve_references()
        config_lib.set_scheme(start, scheme)
        for texts in itertools.product(*own.values()):
            point = start.copy_and_resolve_references()
            for field, text in zip(own, texts, strict=True):
                config_lib.set_field(point, field, text)
            # The name uses the parsed values, so 1e-3 and 0.001 give the same name.
            method = "selected_weights" if point.start_from else scheme
            parts = [method, *(f"{field}={attrgetter(field)(point)}" for field in own)]
            name = ",".join(re.sub(r"[^\w.=+-]", "_", part.replace(" ", "")) for part in parts)
            fits = len(name.encode()) <= MAX_NAME
            require("--grid", list(own), "fewer fields or shorter values", fits)
            same = settings.setdefault(name, point.lock())
            if same.to_dict() != point.to_dict():
                raise InputError(f"--grid: two settings would have the name {name!r}")
    return settings


def parse_axes(flags: Iterable[str]) -> dict[str, list[str]]:
    """Parses --grid flags, such as 'model.num_heads=3,6', into a list of values for each field.

    Commas in brackets, which cannot be nested, do not separate values.
    """
    axes: dict[str, list[str]] = {}
    for flag in flags:
        require("--grid", flag, "FIELD=A,B", "=" in flag)
        field, _, text = flag.removeprefix("config.").partition("=")
        axes.setdefault(field, []).extend(re.split(r",(?![^(\[{]*[)\]}])", text))
    return axes


def find_baselines(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, str | None]:
    """Returns the baseline of each setting, by name; None if there is none.

    `configs` are those of the settings, as plain dicts. The baseline of a setting has the scheme of
    the first setting, and the setting's own values for all fields except `attention_init` and
    `seed`; if there are several, the first that also has the same options. If all settings have the
    same scheme, the first setting is the baseline of all.
    """
    fields = {name: dict(config, seed=None) for name, config in configs.items()}
    options = {name: dict(values.pop("attention_init")) for name, values in fields.items()}
    schemes = {name: values.pop("name") for name, values in options.items()}
    first = next(iter(schemes))
    candidates = [name for name, scheme in schemes.items() if scheme == schemes[first]]
    if len(candidates) == len(schemes):
        return dict.fromkeys(schemes, first)

    def find(name):
        same = [c for c in candidates if fields[c] == fields[name]]
        own = options[name]
        matching = [c for c in same if all(own.get(k, v) == v for k, v in options[c].items())]
        return next(iter(matching + same), None)

    return {name: find(name) for name in schemes}


# -- tables of the papers --------------------------------------------------------------------------


def read_table(table: str, words: Sequence[str] = ()) -> dict[str, dict[str, str]]:
    """Returns the rows of a table in `configs/papers.csv` by name, each as a dict by column.

    Keeps only rows whose name has all the words. Raises `InputError` if there are none.
    """
    needs = "given in a clone of the repository, which has configs/papers.csv"
    require("--table", table, needs, PAPERS.exists())
    every = list(csv.DictReader(read_file(PAPERS).decode().splitlines()))
    rows = {row["row"]: row for row in every if row["table"] == table}
    if not rows:
        tables = dict.fromkeys(row["table"] for row in every)
        raise InputError(f"--table={table} is not in {PAPERS}: {suggest(table, tables)}")
    known = dict.fromkeys(word for name in rows for word in name.split(","))
    for word in words:
        require("--rows", word, f"in table {table}: {suggest(word, known)}", word in known)
    found = {name: row for name, row in rows.items() if {*words} <= {*name.split(",")}}
    require("--rows", ",".join(words), f"words from a single row of table {table}", found)
    return found


def configs_of(
    rows: Mapping[str, Mapping[str, str]], overrides: config_lib.Overrides
) -> dict[str, ConfigDict]:
    """Returns the config of each row, by name.

    `overrides` are fields with values as on the command line, set last and in every config.
    """
    settings = {}
    for name, row in rows.items():
        config = config_lib.load_config(row["config"])
        fields = [tuple(field.split("=", 1)) for field in row["fields"].split()]
        config_lib.set_fields(config, fields)
        config_lib.set_fields(config, overrides)
        settings[name] = config.lock()
    return settings
