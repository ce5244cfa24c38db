"""Checks that a config and its data continue the run of a checkpoint."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from structinit_jax.errors import InputError

# Fields and sections that decide what a trained model computes.
COMPUTED = ("model", "data.image_size", "data.channels", "data.mean", "data.std")
# Those that must not change on resume: with another value it would be another run.
FIXED = (
    *COMPUTED,
    *("seed", "batch_size", "optimizer", "attention_init", "start_from"),
    *("data.name", "data.train_split", "data.repeats", "data.drop_remainder"),
)
# Fields of `model` that may change: how the model is computed and regularized.
FREE = [
    f"model.{field}"
    for field in ("attention_implementation", "drop_path", "dropout", "dtype", "remat", "unroll")
]
ABSENT = "(absent)"


def changes(old: Mapping[str, Any], config: ConfigDict) -> dict[str, tuple[Any, Any]]:
    """Compares the config of a checkpoint, as read from JSON, with the current one.

    Returns the old and new value of every field that differs, by its path, such as 'model.depth'. A
    field that only one config has is `ABSENT` in the other.
    """
    # Through JSON, which makes lists of tuples as in the old config.
    new, old = (flatten_dict(c, sep=".") for c in (json.loads(config.to_json()), old))
    fields = sorted(new.keys() | old.keys())
    pairs = {field: (old.get(field, ABSENT), new.get(field, ABSENT)) for field in fields}
    return {field: pair for field, pair in pairs.items() if pair[0] != pair[1]}


def check(
    run: Mapping[str, Any], config: ConfigDict, data: Mapping[str, Any], place: str
) -> list[str]:
    """Checks that a config and its data continue a run; lists changed fields, one line each.

    Args:
      run: JSON object of the checkpoint: its 'config', and its data as `data`.
      config: Current config.
      data: 'num_examples', 'class_names' and 'data_digest' of the current training split.
      place: Name of the checkpoint for messages, for example 'step 400 in /tmp/digits'.

    Raises:
      InputError: A field has changed that must not change on resume, or the data have changed.
    """
    changed = changes(run["config"], config)
    if refused := [_line(field, *pair) for field, pair in changed.items() if _fixed(field, *pair)]:
        first = f"these fields of the config must not change when {place} is resumed:"
        last = "Restore the old values, or start a new run in another --workdir"
        raise InputError("\n".join([first, *refused, last]))

    what, num_examples = None, data["num_examples"]
    if run["num_examples"] != num_examples:
        what = f"on {run['num_examples']:,} in another order"
    elif difference := other_class(run, data["class_names"]):
        what = f"with other classes ({difference})"
    elif run["data_digest"] != data["data_digest"]:
        what = "on other files or labels"
    if what:
        raise InputError(
            f"config.data.train_split={config.data.train_split!r} has {num_examples:,} examples, "
            f"but {place} was trained {what}: restore the old data, or start a new run in another "
            "--workdir"
        )
    return [_line(field, *pair) for field, pair in changed.items()]


def other_class(run: Mapping[str, Any], class_names: Sequence[str]) -> str | None:
    """Describes the first class whose name is not that of the run, or returns None."""
    for label, (trained, now) in enumerate(zip(run["class_names"], class_names, strict=False)):
        if trained != now:
            return f"class {label} is {now!r} now and was {trained!r} in training"
    return None


def evaluation_changes(run: Mapping[str, Any], config: ConfigDict) -> list[str]:
    """Lists changed fields that affect what a trained model computes, one line each."""
    changed = changes(run["config"], config)
    return [
        _line(field, *pair)
        for field, pair in changed.items()
        if _is_in(field, COMPUTED) and _fixed(field, *pair)
    ]


def _fixed(field, old, new):
    if field == "ema_decay":
        return not (old and new)  # there are averaged weights, or there are none
    if ABSENT in (old, new) and not field.startswith("attention_init."):
        return False  # weights that appear or disappear with the field are found on restoring
    return _is_in(field, FIXED) and field not in FREE


def _is_in(field, fields):
    return field in fields or field.split(".")[0] in fields


def _line(field, old, new):
    old, new = (value if value is ABSENT else repr(value) for value in (old, new))
    return f"  {field}: {old} -> {new}"
