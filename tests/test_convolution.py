import json
import pathlib

import jax
import numpy as np
import pytest
import references

from structinit_jax import attention_init
from structinit_jax.attention_init import ConvSite
from structinit_jax.errors import InputError

# Recorded by references/make_convmixer_filters.py from the 2024 paper's program.
PROGRAM = json.loads(
    pathlib.Path(references.__file__).with_name("convmixer_filters.json").read_text()
)


def kernels(scheme, kernel_size=3, width=36, num_layers=2, seed=0):
    site = ConvSite(kernel_size=kernel_size, width=width, num_layers=num_layers)
    return np.asarray(scheme(jax.random.key(seed), site).kernel)


def test_impulses_stand_at_every_place_equally_often():
    values = kernels(attention_init.impulse(), kernel_size=3, width=36)
    assert set(np.unique(values)) == {0, 1}
    np.testing.assert_array_equal(values.sum(axis=(1, 2)), 1)
    np.testing.assert_array_equal(values.sum(axis=3), 4)


@pytest.mark.parametrize("case", PROGRAM)
def test_filters_of_2024_have_the_moments_of_the_program(case):
    name, size = case.split()
    size = int(size)
    scheme = attention_init.default()
    if name != "random":
        scheme = attention_init.impulse_2024(taps=1 if name == "impulse" else int(name[3:]))
    filters = kernels(scheme, size, width=1000, num_layers=20)
    filters = np.moveaxis(filters, -1, 1).reshape(20_000, size**2)
    squares, expected = filters**2, {k: np.asarray(v) for k, v in PROGRAM[case].items()}
    errors = 5 * (2 / len(filters)) ** 0.5  # five standard errors of the difference of two samples
    tolerance = errors * expected["square"] ** 0.5
    assert np.all(np.abs(filters.mean(axis=0) - expected["weight"]) <= tolerance)
    tolerance = tolerance * np.abs(filters).max() + 1e-6
    assert np.all(np.abs(squares.mean(axis=0) - expected["square"]) <= tolerance)
    np.testing.assert_allclose((squares.sum(axis=1) ** 2).mean(), expected["norm4"], rtol=0.02)


def test_given_kernels():
    given = np.arange(18, dtype=np.float32).reshape(2, 3, 3)
    values = kernels(attention_init.impulse(filters=given), width=4)
    for channel in np.moveaxis(values[0], -1, 0):
        assert any(np.array_equal(channel, kernel) for kernel in given)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("impulse_2024", dict(taps=10)),
        ("impulse", dict(filters=np.ones((2, 5, 5), np.float32))),
    ],
)
def test_options_that_do_not_fit_a_convolution_are_refused(name, options):
    with pytest.raises(InputError, match=f"^{next(iter(options))}"):
        kernels(attention_init.SCHEMES[name](**options))
