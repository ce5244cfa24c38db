import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from structinit_jax import evaluate, export
from structinit_jax.errors import InputError
from structinit_jax.interop import from_timm
from structinit_jax.models.registry import create_model

pytestmark = pytest.mark.usefixtures("library_promotion")


@pytest.mark.parametrize("averaged", [False, True])
def test_the_file_has_the_weights_of_the_newest_checkpoint(
    run_config, finished_run, tmp_path, averaged
):
    model, state = evaluate.restore_model(run_config, finished_run.workdir)
    params = jax.device_get(state.ema["params"] if averaged else state.params)
    path = tmp_path / "model.safetensors"
    run_config.batch_size = 9  # does not fit the devices
    assert export.export(run_config, finished_run.workdir, path, averaged) == 12
    options = run_config.model.to_dict()
    loaded = create_model(options, image_size=8, channels=1, rngs=nnx.Rngs(9))
    from_timm(loaded, load_file(path))
    images = jax.random.normal(jax.random.key(0), (2, 8, 8, 1))
    expected = nnx.merge(model.graphdef, params, {})(images)[0]
    np.testing.assert_allclose(loaded(images)[0], expected, atol=1e-6)


def test_mistakes_are_refused(run_config, finished_run, tmp_path):
    with pytest.raises(InputError, match=r"--out=.*cannot be written"):
        export.export(run_config, finished_run.workdir, tmp_path / "no" / "file")
    run_config.ema_decay = 0.0
    with pytest.raises(InputError, match=r"--averaged .*config\.ema_decay is 0"):
        export.export(run_config, finished_run.workdir, tmp_path / "file", averaged=True)
