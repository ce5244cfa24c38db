import dataclasses
import math
from typing import Annotated, Literal

import pytest

from structinit_jax import errors
from structinit_jax.errors import InputError, InUseError, prefixed, printable


@dataclasses.dataclass
class Fields:
    depth: errors.PositiveInt = 1
    registers: errors.NonNegativeInt = 0
    ratio: errors.PositiveFloat = 4.0
    scale: errors.NonNegativeFloat | None = None
    drop: errors.Fraction = 0.0
    flip: errors.Probability = 0.5
    pool: Literal["mean", "class_token"] = "mean"
    norm: bool = True
    name: Annotated[str, "of a layer"] = ""
    heads: errors.PositiveInt | tuple[errors.PositiveInt, ...] = 3
    mean: tuple[float, ...] = (0.5,)
    even: Annotated[int, errors.Check("an even number", lambda x: x % 2 == 0)] = 2


def test_good_values_pass():
    errors.check_fields(Fields, dict(depth=2, scale=0.1, flip=1, heads=[2, 4], mean=(0, 1.5)))


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("depth", (0, 1.5, True, "1", None, 2**32)),
        ("ratio", (0, 1e300, float("nan"), "4")),
        *(("drop", (1.0, -0.1)), ("flip", (1.1, -0.1)), ("scale", (-0.1, 1e300))),
        *(("norm", (1,)), ("name", (3,)), ("pool", ("max",)), ("registers", (-1,))),
        *(("heads", (0, (2, 0), "34")), ("mean", (0.5, ("0.5",))), ("even", (3, "two"))),
    ],
)
def test_a_bad_value_is_named_with_its_field(field, values):
    for value in values:
        with pytest.raises(InputError) as caught:
            errors.check_fields(Fields, {field: value}, "config.model.")
        assert str(caught.value).startswith(f"config.model.{field}={value!r} must be ")
    with pytest.raises(InputError, match="mean"):
        errors.check_fields(Fields, dict(mean=(10**400,)))  # too large for a float


def test_references_name_a_module_and_an_attribute():
    assert errors.is_reference("my.module:thing")
    for name in ("cifar10", "digits:9.9.9", "a b:c", ":c", "a:"):
        assert not errors.is_reference(name)
    assert errors.find("known", {"known": 3}, "loss") == 3
    with pytest.raises(InputError, match=r"^loss='math:pi'"):
        errors.find("math:pi", {}, "loss")
    assert errors.find("math:sqrt", {"known": 3}, "loss") is math.sqrt
    for name in ("no_such_module:f", "math:no_such_name", "knwon"):
        with pytest.raises(InputError, match=rf"^loss='{name}'"):
            errors.find(name, {"known": 3}, "loss")


def test_a_place_is_added_to_the_message_of_an_error_that_keeps_its_type():
    with pytest.raises(InUseError, match=r"^config\.workdir=x is in use$"), prefixed("config."):
        raise InUseError("workdir=x is in use")


def test_control_characters_of_names_are_escaped():
    assert printable("Zürich 1×2 猫") == "Zürich 1×2 猫"
    escaped = r"a\x1b]0;t\x07\nerror: b\u202e\udc80"
    assert printable("a\x1b]0;t\x07\nerror: b\u202e\udc80") == escaped
    assert printable("two\nlines\x1b", keep="\n") == "two\nlines\\x1b"
