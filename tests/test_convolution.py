import jax
import numpy as np
import pytest
from scipy import ndimage

from structinit_jax import attention_init
from structinit_jax.attention_init import ConvSite
from structinit_jax.errors import InputError

SCHEMES = ("default", "kaiming_uniform", "impulse", "impulse_2024")


def kernels(scheme, kernel_size=3, width=36, num_layers=2, seed=0):
    site = ConvSite(kernel_size=kernel_size, width=width, num_layers=num_layers)
    return np.asarray(scheme(jax.random.key(seed), site).kernel)


@pytest.mark.parametrize("name", SCHEMES)
def test_even_kernels_and_layers_of_their_own(name):
    values = kernels(attention_init.by_name(name), kernel_size=8, width=5)
    assert values.shape == (2, 8, 8, 5)
    assert np.abs(values[0] - values[1]).max() > 0


@pytest.mark.parametrize("name", ["default", "kaiming_uniform"])
def test_random_filters_are_uniform_between_plus_and_minus_one_over_f(name):
    values = kernels(attention_init.by_name(name), kernel_size=4, width=200)
    assert 0.99 / 4 < np.abs(values).max() <= 1 / 4
    assert abs(values.mean()) < 0.01
    np.testing.assert_allclose(values.std(), 1 / 4 / 3**0.5, rtol=0.03)


def test_impulses_stand_at_every_place_equally_often():
    values = kernels(attention_init.impulse(), kernel_size=3, width=36)
    assert set(np.unique(values)) == {0, 1}
    np.testing.assert_array_equal(values.sum(axis=(1, 2)), 1)
    np.testing.assert_array_equal(values.sum(axis=3), 4)


def test_the_papers_impulses_stand_at_independent_places():
    values = kernels(attention_init.impulse_2024(), kernel_size=3, width=36, num_layers=50)
    np.testing.assert_array_equal(values.sum(axis=(1, 2)), 1)
    counts = values.sum(axis=3)  # binomial: mean 4, variance 36 · 1/9 · 8/9
    np.testing.assert_allclose(counts.mean(), 4)
    assert 2.5 < counts.var() < 4.6
    assert np.abs(counts.mean(axis=0) - 4).max() < 1.2


def test_filters_act_as_correlations_do():
    """A place of the kernel is the neighbor that the same place of scipy's kernel looks at."""
    (kernel,) = kernels(attention_init.impulse(), kernel_size=8, width=6, num_layers=1)
    image = np.random.default_rng(0).standard_normal((10, 12, 6)).astype(np.float32)
    ours = jax.lax.conv_general_dilated(
        image[None],
        kernel[:, :, None, :],
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=6,
    )[0]
    for channel in range(6):
        # Even kernels: scipy's center is place 4, ours is place 3, as in PyTorch.
        expected = ndimage.correlate(
            image[..., channel], kernel[..., channel], mode="constant", origin=-1
        )
        np.testing.assert_allclose(ours[..., channel], expected, atol=1e-6)


def test_gaussians_lie_between_impulse_and_box():
    narrow, wide = (
        kernels(attention_init.impulse(filters="gaussian", sigma=s)) for s in (0.1, 99.0)
    )
    impulses = kernels(attention_init.impulse())
    boxes = kernels(attention_init.impulse(filters="box"))
    np.testing.assert_allclose(narrow, impulses, atol=1e-6)
    np.testing.assert_allclose(wide, boxes, atol=1e-3)
    np.testing.assert_array_equal(boxes, 1)
    bump = kernels(attention_init.impulse(filters="gaussian", sigma=0.7), kernel_size=5)
    peaks = bump == 1
    np.testing.assert_array_equal(peaks.sum(axis=(1, 2)), 1)
    layer, row, col, channel = np.argwhere(peaks)[0]
    expected = np.exp(-((np.arange(5) - row) ** 2) / (2 * 0.7**2))
    np.testing.assert_allclose(bump[layer, :, col, channel], expected, rtol=1e-5)


def test_box_filters_span_one_dimension_and_impulses_all():
    impulses, boxes = (
        kernels(attention_init.impulse(filters=f), kernel_size=4, num_layers=1).reshape(16, -1)
        for f in ("impulse", "box")
    )
    assert np.linalg.matrix_rank(impulses) == 16
    assert np.linalg.matrix_rank(boxes) == 1


def test_given_kernels_and_same_layers():
    given = np.arange(18, dtype=np.float32).reshape(2, 3, 3)
    values = kernels(attention_init.impulse(filters=given, same_layers=True), width=4)
    np.testing.assert_array_equal(values[0], values[1])
    for channel in np.moveaxis(values[0], -1, 0):
        assert any(np.array_equal(channel, kernel) for kernel in given)


@pytest.mark.parametrize(
    ("options", "kernel_size", "message"),
    [
        (dict(offsets="center_first"), 8, "offsets='center_first'.*kernel_size=8"),
        (dict(filters="difference_of_gaussians"), 3, "filters=.*impulse, gaussian, box"),
        (
            dict(filters=np.ones((2, 5, 5), np.float32)),
            3,
            r"filters has shape \(2, 5, 5\).*kernels \[F, 3, 3\]",
        ),
    ],
)
def test_options_that_do_not_fit_a_convolution_are_refused(options, kernel_size, message):
    with pytest.raises(InputError, match=message):
        kernels(attention_init.impulse(**options), kernel_size)
