"""Checks the fields of a model, for its constructor and for the config of a run."""

import math
from collections.abc import Mapping
from typing import Any

from structinit_jax.errors import is_below_one, is_count, is_positive, is_positive_or_zero, require
from structinit_jax.models.layers import ACTIVATIONS, BASE_INITS
from structinit_jax.models.model import REMAT_POLICIES

CHOICES = {
    "activation": tuple(ACTIVATIONS),
    "spatial_filters": ("trained", "fixed"),
    "positions": ("sincos", "learned", "rope"),
    "base_init": tuple(BASE_INITS),
    "pool": ("mean", "class_token"),
    "dtype": ("float32", "bfloat16"),
    "attention_implementation": ("auto", "cudnn"),
    "remat": ("auto", *REMAT_POLICIES),
}


def _are_counts(x):
    return len(x) > 0 and all(map(is_count, x)) if isinstance(x, list | tuple) else is_count(x)


# What a value must be, the test for it (a TypeError means no), and the fields that must meet it,
# separated by spaces. Each family has some of them.
NEEDS = [
    (
        "a positive whole number",
        is_count,
        "num_classes patch_size width depth window_size kernel_size",
    ),
    ("a positive whole number, or several", _are_counts, "num_heads depths"),
    ("a whole number, 0 or more", lambda x: is_count(x, 0), "num_registers unroll"),
    ("a finite number above 0", is_positive, "mlp_ratio token_mlp_ratio"),
    ("a finite number, 0 or more", is_positive_or_zero, "layer_scale"),
    ("a finite number", math.isfinite, "mlp_mean"),
    ("a number in [0, 1)", is_below_one, "drop_path dropout"),
    *(
        (f"one of {', '.join(map(repr, choices))}", choices.__contains__, field)
        for field, choices in CHOICES.items()
    ),
]


def check_fields(fields: Mapping[str, Any]) -> None:
    """Raises `InputError` unless each of these fields of `config.model` is what it must be.

    Args:
      fields: Values by name. Names that are not in `NEEDS` are not checked.
    """
    for text, holds, names in NEEDS:
        for name in names.split():
            if name in fields:
                require(f"config.model.{name}", fields[name], text, holds)
