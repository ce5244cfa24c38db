import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from structinit_jax import evaluate, export, train
from structinit_jax.data.info import CATALOG
from structinit_jax.errors import InputError
from structinit_jax.interop import from_timm
from structinit_jax.models.registry import create_model
from structinit_jax.program import build_program, make_plan

pytestmark = pytest.mark.usefixtures("library_promotion")


def test_a_trained_model_is_the_one_in_the_file(tiny_config, tmp_path):
    tiny_config.num_epochs = 0.5
    tiny_config.ema_decay = 0.5
    train.train(tiny_config, tmp_path / "run")
    program = build_program(tiny_config, make_plan(tiny_config, CATALOG["digits"], 384))
    step, state = evaluate.restore_newest(program, tmp_path / "run")
    images = jax.random.normal(jax.random.key(0), (2, 8, 8, 1))
    for averaged, params in ((False, state.params), (True, state.ema["params"])):
        path = tmp_path / f"{averaged}.safetensors"
        assert export.export(tiny_config, tmp_path / "run", path, averaged) == step == 3
        options = tiny_config.model.to_dict()
        model = create_model(options, image_size=8, channels=1, rngs=nnx.Rngs(9))
        from_timm(model, load_file(path))
        expected = nnx.merge(program.graphdef, params, {})(images)[0]
        np.testing.assert_allclose(model(images)[0], expected, atol=1e-6)

    with pytest.raises(InputError, match=r"--out=.*cannot be written"):
        export.export(tiny_config, tmp_path / "run", tmp_path / "no" / "file")
    tiny_config.ema_decay = 0.0
    with pytest.raises(InputError, match="--averaged needs a run with averaged weights"):
        export.export(tiny_config, tmp_path / "run", path, averaged=True)
