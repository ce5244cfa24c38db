"""Objects of the user's own, as docs/extending.md shows them."""

import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny_models import make

from structinit_jax import config as config_lib
from structinit_jax import export, train
from structinit_jax.errors import InputError
from structinit_jax.training.optimizer import make_optimizer
from structinit_jax.training.state import split_model

PAGE = Path(__file__).parent.parent / "docs" / "extending.md"
SHOWN = re.search(r"<!-- mine\.py -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The module of docs/extending.md, importable."""
    (tmp_path / "mine.py").write_text(SHOWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield "mine"
    sys.modules.pop("mine", None)


@pytest.mark.usefixtures("library_promotion")
def test_the_readmes_objects_train_and_the_model_is_not_exported(mine, tmp_path, monkeypatch):
    config = config_lib.base_config("mine:Linear")
    config.update(batch_size=64, num_epochs=6.0, warmup_epochs=1.0, learning_rate=1e-2)
    config.update(eval_every_epochs=6.0, loss="mine:focal")
    config.model.num_classes = 2
    config.data.update(name="mine:halves", channels=1, mean=(0.5,), std=(0.5,), image_size=8)
    config_lib.set_scheme(config, "default")
    results = train.train(config, tmp_path / "run")
    assert results["eval/accuracy"] > 0.9
    with pytest.raises(InputError, match=r"config\.model\.name='mine:Linear' cannot be exported"):
        export.export(config, tmp_path / "run", tmp_path / "model")
    # The run is not resumed with other labels.
    halves = sys.modules[mine].halves

    def swapped(data_dir):
        dataset = halves(data_dir)
        for record in dataset.open_split("train"):
            record["label"] = 1 - record["label"]
        return dataset

    monkeypatch.setattr(sys.modules[mine], "halves", swapped)
    with pytest.raises(InputError, match=r"does not hold the examples .* trained on"):
        train.train(config, tmp_path / "run")


@pytest.mark.usefixtures("library_promotion")
def test_the_readmes_optimizer_makes_the_updates_of_kernels_orthogonal(mine):
    model = make("vit")
    _, params, _ = split_model(model)
    rng = np.random.default_rng(0)
    grads = jax.tree.map(lambda x: rng.standard_normal(x.shape, np.float32), params)
    fields = dict(weight_decay=0.0)
    optimizer = make_optimizer("mine:muon", lambda step: 0.1, fields, model.stacks())
    updates, _ = jax.jit(optimizer.update)(grads, optimizer.init(params), params)
    attention = updates["blocks"]["attention"]
    for field, side in (("query", 16), ("out", 16)):
        for layer in attention[field]["kernel"]:
            values = np.linalg.svd(layer.reshape(side, side), compute_uv=False)
            assert 0.03 < values.min() < values.max() < 0.13  # nearly 0.1 times a rotation
    # The first step of Adam with Nesterov's momentum is equal for all other parameters.
    for update in (attention["query"]["bias"], updates["head"]["kernel"]):
        np.testing.assert_allclose(np.abs(update), 0.1474, rtol=1e-3)
