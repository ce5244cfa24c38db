"""What may differ between the config of a checkpoint and that of the run that goes on from it."""

import json
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from structinit_jax.config import base_config
from structinit_jax.errors import InputError

_ORDER = "the order of the data"
_ARCHITECTURE = "the architecture"
_PIXELS = "what the model's input means"
# Fields and sections with which a run would be another run, and what each of them decides.
FIXED = {
    "seed": "all randomness, and the order of the data",
    "batch_size": _ORDER,
    "data.name": _ORDER,
    "data.train_split": _ORDER,
    "data.repeats": _ORDER,
    "data.image_size": _ARCHITECTURE,
    "data.channels": _ARCHITECTURE,
    "data.mean": _PIXELS,
    "data.std": _PIXELS,
    "model": _ARCHITECTURE,
    "attention_init": "the start weights, which are drawn before step 1 only",
    "start_from": "the start weights, which are taken before step 1 only",
}
# Of these sections, but free: how a model is computed, and what training adds to it.
FREE = (
    "model.attention_implementation",
    "model.drop_path",
    "model.dropout",
    "model.dtype",
    "model.remat",
    "model.unroll",
)
ABSENT = "(no such field)"


def changes(old: Mapping[str, Any], config: ConfigDict) -> dict[str, tuple[Any, Any]]:
    """The fields that differ, such as 'model.depth', with the old and the new value.

    A field that the code did not have when the checkpoint was written counts as its default then.
    A field on one side only has `ABSENT` on the other.

    Args:
      old: the checkpoint's config, from JSON.
      config: the config to go on with.
    """
    new = _flatten(json.loads(config.to_json()))  # tuples become lists, as on the other side
    defaults = _flatten(json.loads(base_config(config.model.name).to_json()))
    # What a scheme was not told is no field that was missing.
    defaults = {k: v for k, v in defaults.items() if not k.startswith("attention_init.")}
    old = _flatten(old)
    pairs = {
        field: (
            old.get(field, defaults.get(field, ABSENT) if field in new else ABSENT),
            new.get(field, ABSENT),
        )
        for field in sorted(new.keys() | old.keys())
    }
    return {field: pair for field, pair in pairs.items() if pair[0] != pair[1]}


def check(run: Mapping[str, Any], config: ConfigDict, num_examples: int, place: str) -> list[str]:
    """What changed since a checkpoint was written, one line a field.

    Args:
      run: what the checkpoint holds beside the state: 'config', and 'num_examples' of the training
        split.
      config: the config to go on with.
      num_examples: of the training split now.
      place: the checkpoint, such as 'step 400 in /tmp/digits'.

    Raises:
      InputError: if it would not be the run that the checkpoint is of.
    """
    changed = changes(run["config"], config)
    reasons = {field: _reason(field, *pair) for field, pair in changed.items()}
    lines = {field: _line(field, *pair) for field, pair in changed.items()}
    refused = [f"{lines[field]}  ({reason})" for field, reason in reasons.items() if reason]
    if refused:
        raise InputError(
            "\n".join(
                [
                    f"this config does not continue the run at {place}; what differs and decides:",
                    *refused,
                    "Give the old values to go on, or another --workdir to start anew",
                ]
            )
        )
    trained_on = run.get("num_examples", num_examples)  # older checkpoints do not say
    if trained_on != num_examples:
        raise InputError(
            f"data.train_split={config.data.train_split!r} has {num_examples:,} examples, but the "
            f"run at {place} was trained on {trained_on:,}, and would see them in another order: "
            "bring the old data back, or start anew in another --workdir"
        )
    return list(lines.values())


def differences_in_evaluation(run: Mapping[str, Any], config: ConfigDict) -> list[str]:
    """What changed of that which gives trained weights their meaning, one line a field.

    Args:
      run: as in `check`.
      config: the config to evaluate with.
    """
    return [
        _line(field, *pair)
        for field, pair in changes(run["config"], config).items()
        if _reason(field, *pair) in (_ARCHITECTURE, _PIXELS)
    ]


def _reason(field: str, old: Any, new: Any) -> str | None:
    """Why a field must not change; None where it may."""
    if field == "ema_decay" and not (old and new):
        return "whether the checkpoint has averaged weights"
    if field in FREE or (ABSENT in (old, new) and not field.startswith("attention_init.")):
        return None  # a weight that came or went with the field is found on restoring
    return FIXED.get(field) or FIXED.get(field.split(".")[0])


def _line(field: str, old: Any, new: Any) -> str:
    old, new = (value if value is ABSENT else repr(value) for value in (old, new))
    return f"  {field}: {old} -> {new}"


def _flatten(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    fields = {}
    for name, value in section.items():
        nested = isinstance(value, Mapping)
        fields |= _flatten(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return fields
