"""Checks that a config and its data continue the run of a checkpoint.

What may change depends on what the checkpoint is for. A check takes a function that says whether
the value of a field, such as 'model.depth', must stay: `decides_weights`, `decides_start` or
`decides_run`, each of which includes the one before.
"""

import contextlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from structinit_jax.config import scheme_options
from structinit_jax.errors import InputError

SCHEME = "attention_init."  # beginning of the paths of its options
# How a model is computed and regularized: its trained weights do not depend on it.
COMPUTATION = ("model.drop_path", "model.dtype", "model.remat")


def decides_weights(field: str) -> bool:
    """Whether trained weights need the value of a field."""
    if field in COMPUTATION:
        return False
    return field.startswith("model.") or field in ("data.mean", "data.std")


def decides_start(field: str) -> bool:
    """Whether the initial weights depend on a field, or the trained ones need its value."""
    return decides_weights(field) or field.startswith(SCHEME) or field in ("start_from", "seed")


def decides_run(field: str) -> bool:
    """Whether a run with another value of a field would be another run."""
    return decides_start(field) or field in (
        "batch_size",
        "optimizer",
        "data.name",
        "data.train_split",
        "data.repeats",
        "data.drop_remainder",
        "data.image_size",
        "data.channels",
    )


def check_run(run: Mapping[str, Any], config: ConfigDict, data_digest: str, place: str) -> str:
    """Checks that a config and its data continue a run; lists changed fields, one a line.

    `run` is the JSON object of the checkpoint, with its 'config' and 'data_digest'. `place` names
    the checkpoint in messages, for example 'step 400 in /tmp/digits'. `data_digest` is the
    `data.source.digest` of the current training split. Raises `InputError` if the data have
    changed, or a field that must not change on resume.
    """
    changed = check_config(run["config"], config, decides_run, place)
    if run["data_digest"] != data_digest:
        raise InputError(
            f"config.data.train_split={config.data.train_split!r} does not hold the examples and "
            f"classes that {place} was trained on: restore the old data, or start a new run in "
            "another workdir"
        )
    return changed


def check_config(
    old: Mapping[str, Any], config: ConfigDict, must_stay: Callable[[str], bool], place: str
) -> str:
    """Lists the fields that differ from an old config, one a line.

    Raises `InputError` if they include one that `must_stay` as in `place`.
    """
    changed = changes(old, config)
    if refused := {field: values for field, values in changed.items() if must_stay(field)}:
        raise InputError(
            f"these fields of the config must be as in {place}:\n{_list(refused)}\n"
            "Restore the old values, or use another workdir"
        )
    return _list(changed)


def changes(old: Mapping[str, Any], config: ConfigDict) -> dict[str, tuple[Any, Any]]:
    """Compares an old config, as read from JSON, with the current one.

    Returns the old and new value of every field that differs, by its path, such as 'model.depth'.
    Fields that only one config has, since another version wrote the other, are left out. An option
    of the scheme that is not set has its default.
    """
    old = flatten_dict(old, sep=".")
    new = flatten_dict(json.loads(config.to_json()), sep=".")  # with lists for tuples, as in `old`
    defaults = {field: None for field in new.keys() ^ old.keys() if field.startswith(SCHEME)}
    with contextlib.suppress(InputError):  # A scheme of the user's own need not be there.
        options = scheme_options(new.get(f"{SCHEME}name", ""))
        for option, default in options.items():  # in JSON, tuples are lists
            defaults[SCHEME + option] = list(default) if isinstance(default, tuple) else default
    old = defaults | old
    new = defaults | new
    fields = sorted(old.keys() & new.keys())
    return {field: (old[field], new[field]) for field in fields if old[field] != new[field]}


def _list(changed: Mapping[str, tuple[Any, Any]]) -> str:
    return "\n".join(f"  {field}: {old!r} -> {new!r}" for field, (old, new) in changed.items())
