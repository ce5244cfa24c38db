import runpy
from pathlib import Path

import numpy as np
import pytest
from flax import nnx

from structinit_jax.config import base_config
from structinit_jax.models.model import Model

benchmark = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "tangent_kernel.py"))


class Linear(Model):
    """A linear classifier, whose tangent kernel is known."""

    @staticmethod
    def default_config():
        return dict(num_classes=3)

    def __init__(self, *, image_size, channels, num_classes, attention_init=None, rngs):
        self.head = nnx.Linear(image_size**2 * channels, num_classes, rngs=rngs)

    def sites(self):
        return {}

    def __call__(self, images, *, rng=None, with_maps=False):
        return self.head(images.reshape(len(images), -1)), {}


@pytest.mark.usefixtures("library_promotion")
def test_the_tangent_kernel_of_a_linear_model_is_that_of_its_inputs():
    config = base_config(f"{__name__}:Linear")
    config.data.update(image_size=4, channels=1)
    images = np.random.default_rng(0).standard_normal((50, 4, 4, 1)).astype(np.float32)
    gradients = benchmark["gradients"](config, images, num_coordinates=1000)
    kernel, flat = gradients @ gradients.T, images.reshape(50, -1)
    scale = (1 + flat[0] @ flat[0]) / kernel[0, 0]
    np.testing.assert_allclose(scale * kernel, 1 + flat @ flat.T, 1e-4)
