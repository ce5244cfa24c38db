import numpy as np
import pytest
from PIL import Image

from structinit_jax import show_attention
from structinit_jax.config import base_config
from structinit_jax.errors import InputError

pytestmark = pytest.mark.usefixtures("library_promotion")


def test_heads_are_drawn_before_and_after_training(run_config, finished_run, tmp_path):
    fresh = show_attention.head_kernels(run_config, None)
    trained = show_attention.head_kernels(run_config, finished_run.workdir)
    for kernels, measures in (fresh, trained):
        assert kernels.shape == (2, 2, 7, 7)
        assert measures.target_mass.shape == (2, 2)
    assert np.abs(fresh[0] - trained[0]).max() > 1e-5
    path = tmp_path / "attention.png"
    show_attention.draw({"fresh": fresh, "trained": trained}, path)
    picture = np.asarray(Image.open(path).convert("L"), np.float32)
    assert picture.shape[1] > 300
    assert picture.std() > 10  # something is drawn


def test_other_families_are_refused(run_config):
    run_config.model = base_config("mixer").model
    with pytest.raises(InputError, match=r"config\.model\.name='mixer'"):
        show_attention.head_kernels(run_config, None)
