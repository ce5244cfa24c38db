import numpy as np
import pytest
from PIL import Image

from structinit_jax import show_attention, train

pytestmark = pytest.mark.usefixtures("library_promotion")


def test_heads_are_drawn_before_and_after_training(tiny_config, tmp_path):
    tiny_config.num_epochs = 0.5
    fresh = show_attention.head_kernels(tiny_config, None)
    train.train(tiny_config, tmp_path / "run")
    trained = show_attention.head_kernels(tiny_config, tmp_path / "run")
    for kernels, measures in (fresh, trained):
        assert kernels.shape == (2, 2, 7, 7)
        assert measures.target_mass.shape == (2, 2)
    assert np.abs(fresh[0] - trained[0]).max() > 1e-5
    path = tmp_path / "attention.png"
    show_attention.draw({"fresh": fresh, "trained": trained}, path)
    picture = np.asarray(Image.open(path).convert("L"), np.float32)
    assert picture.shape[1] > 300
    assert picture.std() > 10  # something is drawn
