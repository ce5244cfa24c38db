import jax
import jax.numpy as jnp
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
@pytest.mark.parametrize("kernel_size", [3, 8])
def test_schemes_have_the_documented_shape_also_when_traced(name, kernel_size):
    scheme, site = attention_init.by_name(name), ConvSite(kernel_size, 5, 2)
    eager = scheme(jax.random.key(0), site).kernel
    assert (eager.shape, eager.dtype) == ((2, kernel_size, kernel_size, 5), jnp.float32)
    jitted = jax.jit(lambda key: scheme(key, site))(jax.random.key(0)).kernel
    np.testing.assert_allclose(eager, jitted, rtol=1e-6)
    assert np.abs(eager - scheme(jax.random.key(1), site).kernel).max() > 0
    assert np.abs(eager[0] - eager[1]).max() > 0


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
    """A place of the kernel is the neighbour that the same place of scipy's kernel looks at."""
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
        # Even kernels: scipy's centre is place 4, ours is place 3, as in PyTorch.
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
    ("scheme", "kernel_size", "message"),
    [
        (attention_init.impulse(5), 3, r"kernel_size=5 is larger than model\.kernel_size=3"),
        (attention_init.impulse_2024(5), 3, r"kernel_size=5 is larger than model\.kernel_size=3"),
        (attention_init.impulse(offsets="centre_first"), 8, r"model\.kernel_size=8 is even"),
        (
            attention_init.impulse(filters="difference_of_gaussians"),
            3,
            r"filters='difference_of_gaussians': a convolution takes impulse, gaussian, box",
        ),
        (
            attention_init.impulse(filters=np.ones((2, 5, 5), np.float32)),
            3,
            r"filters has shape \(2, 5, 5\): model\.kernel_size=3 needs kernels \[F, 3, 3\]",
        ),
        (
            attention_init.mimetic(),
            3,
            r"'mimetic' is made for softmax attention.* ConvSite has none: use 'impulse'",
        ),
        (attention_init.impulse_2025(), 3, r"'impulse_2025' is made for softmax attention"),
    ],
)
def test_what_does_not_fit_a_convolution_is_refused(scheme, kernel_size, message):
    with pytest.raises(InputError, match=message):
        kernels(scheme, kernel_size)
