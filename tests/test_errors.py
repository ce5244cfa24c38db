import dataclasses
import math
from typing import Annotated, Literal

import pytest

import structinit_jax as si
from structinit_jax.checks import (
    Check,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    check_fields,
    check_scheme,
    find,
    is_reference,
)
from structinit_jax.errors import InputError, printable, suggest


@dataclasses.dataclass
class Fields:
    depth: PositiveInt = 1
    registers: NonNegativeInt = 0
    ratio: PositiveFloat = 4.0
    scale: NonNegativeFloat | None = None
    drop: Fraction = 0.0
    flip: Probability = 0.5
    pool: Literal["mean", "class_token"] = "mean"
    norm: bool = True
    name: str = ""
    heads: PositiveInt | tuple[PositiveInt, ...] = 3
    mean: tuple[float, ...] = (0.5,)
    even: Annotated[int, Check("an even number", lambda x: x % 2 == 0)] = 2


def test_good_values_pass():
    check_fields(Fields, dict(depth=2, scale=0.1, flip=1, heads=[2, 4], mean=(0, 1.5)))


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("depth", (0, 1.5, True, "1", None, 2**32)),
        ("registers", (-1,)),
        ("ratio", (0, 1e300, float("nan"), "4")),
        ("scale", (-0.1,)),
        ("drop", (1.0,)),
        ("flip", (1.1,)),
        ("pool", ("max",)),
        ("norm", (1,)),
        ("name", (3,)),
        ("heads", (0, (2, 0), "34")),
        ("mean", (0.5, ("0.5",))),
        ("even", (3, "two")),
    ],
)
def test_a_bad_value_is_named_with_its_field(field, values):
    for value in values:
        with pytest.raises(InputError) as caught:
            check_fields(Fields, {field: value}, "config.model.")
        assert str(caught.value).startswith(f"config.model.{field}={value!r} must be ")


def test_long_values_are_shortened():
    with pytest.raises(InputError, match=r"^depth='xxx") as caught:
        check_fields(Fields, {"depth": "x" * 10_000})
    assert len(str(caught.value)) < 300


def test_suggestions_are_near_names_or_all_of_them():
    with pytest.raises(InputError, match=r"^dpeth .* did you mean 'depth'\?"):
        check_fields(Fields, {"dpeth": 2})
    assert suggest("vitt", ["vit", "swin"]) == "did you mean 'vit'?"
    assert suggest("resnet", ["vit", "swin"]) == "choose from vit, swin"


def test_references_name_a_module_and_an_attribute():
    assert is_reference("my.module:thing")
    for name in ("cifar10", "digits:9.9.9", "huggingface:mnist", "a b:c", ":c", "a:"):
        assert not is_reference(name)
    assert find("known", {"known": 3}, "loss") == 3
    assert find("math:pi", {"known": 3}, "loss") == math.pi
    for name in ("no_such_module:f", "math:no_such_name", "knwon"):
        with pytest.raises(InputError, match=rf"^loss='{name}'"):
            find(name, {"known": 3}, "loss")


def test_control_characters_of_names_are_escaped():
    assert printable("Zürich 1×2 猫") == "Zürich 1×2 猫"
    assert printable("a\x1b]0;t\x07\nerror: b\u202e\udc80") == (
        r"a\x1b]0;t\x07\nerror: b\u202e\udc80"
    )
    assert printable("two\nlines\x1b", keep="\n") == "two\nlines\\x1b"


@pytest.mark.parametrize("scheme", [si.impulse, "impulse"])
def test_a_scheme_is_a_function_of_rng_and_site(scheme):
    with pytest.raises(InputError, match=r"^attention_init="):
        check_scheme(scheme)  # as initialize and models do
