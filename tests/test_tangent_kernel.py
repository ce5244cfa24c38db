"""Regression with the tangent kernel, on images that it has seen."""

import runpy

import fork_main
import numpy as np
import pytest


@pytest.mark.usefixtures("library_promotion")
def test_the_tangent_kernel_of_a_model_fits_its_training_images(tiny_config):
    script = runpy.run_path(str(fork_main.ROOT / "benchmarks" / "tangent_kernel.py"))
    tiny_config.attention_init = dict(name="default")
    images = np.random.default_rng(0).normal(size=(8, 8, 8, 1)).astype(np.float32)
    gradients = script["gradients"](tiny_config, images, 1000)
    assert gradients.shape == (8, 1000)
    labels = np.tile(np.arange(8) % 4, 2)
    for features in (gradients, script["as_adam"](gradients, 8)):
        kernel = script["linear_kernel"](np.tile(features, (2, 1)), 8)
        np.testing.assert_allclose(kernel[:8], kernel[8:], rtol=1e-6)
        assert script["accuracy"](kernel, labels) > 80
        assert script["accuracy"](kernel, (labels + (np.arange(16) >= 8)) % 4) < 50  # other labels
