"""Checks that a config and its data continue the run of a checkpoint."""

import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from structinit_jax.attention_init import SCHEMES
from structinit_jax.errors import InputError, printable

OF_WEIGHTS = ("model", "data.mean", "data.std")  # fields and sections that trained weights need
# Fields and sections that must not change on resume: with another value it would be another run.
FIXED = (
    *(*OF_WEIGHTS, "attention_init", "start_from", "seed", "batch_size", "optimizer"),
    *("data.name", "data.train_split", "data.repeats", "data.drop_remainder"),
    *("data.image_size", "data.channels"),
)
# Fields of `model` that may change: how the model is computed and regularized.
FREE = ("model.drop_path", "model.dtype", "model.remat")
SCHEME = "attention_init."  # beginning of the paths of its options


def changes(old: Mapping[str, Any], config: ConfigDict) -> dict[str, tuple[Any, Any]]:
    """Compares the config of a checkpoint, as read from JSON, with the current one.

    Returns the old and new value of every field that differs, by its path, such as 'model.depth'.
    Fields that only one config has, since another version wrote the other, are left out. An option
    of the scheme that is not set has its default.
    """
    # Through JSON, which makes lists of tuples as in the old config.
    new, old = (flatten_dict(c, sep=".") for c in (json.loads(config.to_json()), old))
    defaults = {field: None for field in new.keys() ^ old.keys() if field.startswith(SCHEME)}
    if scheme := SCHEMES.get(new.get(f"{SCHEME}name")):
        for name, option in inspect.signature(scheme).parameters.items():
            defaults[SCHEME + name] = option.default
    old, new = defaults | old, defaults | new
    fields = sorted(old.keys() & new.keys())
    return {field: (old[field], new[field]) for field in fields if old[field] != new[field]}


def check(run: Mapping[str, Any], config: ConfigDict, data_digest: str, place: str) -> list[str]:
    """Checks that a config and its data continue a run; lists changed fields, one line each.

    `run` is the JSON object of the checkpoint, with its 'config' and 'data_digest'. `place` names
    the checkpoint in messages, for example 'step 400 in /tmp/digits'. `data_digest` is the
    `data.source.digest` of the current training split. Raises `InputError` if the data have
    changed, or a field that must not change on resume.
    """
    lines = check_config(run["config"], config, place)
    if run["data_digest"] != data_digest:
        raise InputError(
            f"config.data.train_split={config.data.train_split!r} does not hold the examples and "
            f"classes that {place} was trained on: restore the old data, or start a new run in "
            "another workdir"
        )
    return lines


def check_config(
    old: Mapping[str, Any],
    config: ConfigDict,
    place: str,
    fixed: Sequence[str] = FIXED,
    free: Sequence[str] = FREE,
) -> list[str]:
    """Lists changed fields, one per line; `InputError` for those in `fixed` but not in `free`."""

    def is_fixed(field):
        return (field in fixed or field.split(".")[0] in fixed) and field not in free

    changed = changes(old, config)
    if refused := [_line(field, *pair) for field, pair in changed.items() if is_fixed(field)]:
        first = f"these fields of the config must be as in {place}:"
        last = "Restore the old values, or use another workdir"
        raise InputError("\n".join([first, *refused, last]))
    return [_line(field, *pair) for field, pair in changed.items()]


def _line(field, old, new):
    return f"  {printable(field)}: {old!r} -> {new!r}"
