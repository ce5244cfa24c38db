"""User-defined objects and scripts, as shown in docs/extending.md."""

import runpy
import sys
import types

import jax
import numpy as np
import pytest
from conftest import set_up
from flax import nnx
from test_documents import EXAMPLES
from tiny_models import make

import structinit_jax as si
from structinit_jax import config as config_lib
from structinit_jax import errors, export
from structinit_jax.analysis import collect
from structinit_jax.attention_init import SCHEMES
from structinit_jax.errors import InputError
from structinit_jax.training import build, evaluation, sharding, train
from structinit_jax.training.state import AbstractModel, make_initializer, split_model
from structinit_jax.training.step import LOSSES

TINY = """
from conftest import make_tiny_config

def get_config():
    config = make_tiny_config()
    config.attention_init = dict(name="default")
    return config
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Makes the modules of docs/extending.md importable and yields the name of the first."""
    modules = ("mine", "my_vit")
    for name in modules:
        (tmp_path / f"{name}.py").write_text(EXAMPLES[name])
    monkeypatch.syspath_prepend(tmp_path)
    yield "mine"
    for name in modules:
        sys.modules.pop(name, None)


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
    with pytest.raises(InputError, match=r"^config\.model\.name='mine:Linear'"):
        export.export(config, tmp_path / "run", tmp_path)
    model, _, _ = evaluation.restore_model(config, tmp_path / "run")
    with pytest.raises(InputError, match=r"^type\(model\)=.*Linear.* must be one of"):
        si.to_timm(nnx.merge(model.graphdef, model.params, model.model_state))
    # The run is not resumed with different labels.
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
    config = config_lib.base_config()
    config.update(optimizer="mine:muon", weight_decay=0.0)
    model = make("vit", positions="learned", pool="class_token")
    _, params, _ = split_model(model)
    rng = np.random.default_rng(0)
    grads = jax.tree.map(lambda x: rng.standard_normal(x.shape, np.float32), params)
    abstract = AbstractModel(*[None] * 5, stacks=tuple(model.stacks()), decayed={})
    optimizer = build.make_optimizer(config, lambda step: 0.1, abstract)

    @jax.jit
    def first_update(grads, params):
        return optimizer.update(grads, optimizer.init(params), params)[0]

    updates = jax.device_get(first_update(grads, params))
    attention = updates["blocks"]["attention"]
    for field, side in (("query", 16), ("out", 16)):
        for layer in attention[field]["kernel"]:
            values = np.linalg.svd(layer.reshape(side, side), compute_uv=False)
            assert 0.03 < values.min() < values.max() < 0.13  # nearly 0.1 times a rotation
    # All other parameters get a first step of the same size from Adam with Nesterov momentum.
    rest = (updates["positions"], updates["class_token"], updates["head"]["kernel"])
    for update in (attention["query"]["bias"], *rest):
        np.testing.assert_allclose(np.abs(update), 0.1474, rtol=1e-3)


@pytest.mark.usefixtures("library_promotion", "mine")
def test_the_pages_vit_takes_every_scheme_and_is_analyzed(tiny_config):
    tiny_config.model = config_lib.base_config("my_vit:MyViT").model
    tiny_config.model.depth = 1
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    for name in SCHEMES:
        tiny_config.attention_init = dict(name=name)
        make_initializer(tiny_config, build.make_model(tiny_config, mesh))
    tiny_config.attention_init = dict(name="impulse")
    snapshot = collect.observe_start(tiny_config, collect.read_images(tiny_config, 8))
    assert snapshot.layers[0].measures["target_mass"].mean() > 1.5 / 16  # uniform: 1 / 16
    setup = set_up(tiny_config, jax.devices()[:1])
    jax.eval_shape(setup.train_step, *setup.arguments)


@pytest.fixture
def run_example(tmp_path, monkeypatch):
    """Runs an example of the page as a script, in a folder with a tiny recipe."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "vit_t_digits.py").write_text(TINY)
    monkeypatch.chdir(tmp_path)

    def run(name):
        (tmp_path / f"{name}.py").write_text(EXAMPLES[name])
        return runpy.run_path(f"{name}.py", run_name="__main__")

    return run


@pytest.fixture
def runs(monkeypatch):
    """The loss and the hook of each `si.train` in an example, which is replaced by a stub."""
    started = []

    def train(config, workdir, on_evaluation=None):
        started.append((errors.find(config.loss, LOSSES, "config.loss"), on_evaluation))

    monkeypatch.setitem(vars(si), "train", train)
    return started


def test_the_pages_early_stopping_waits_for_a_better_accuracy(run_example, runs):
    run_example("early_stopping")
    ((_, hook),) = runs
    accuracies = (0.1, 0.1, 0.3, 0.2, 0.3, 0.3)
    assert [hook(0, {"eval/accuracy": a}) for a in accuracies] == [False] * 5 + [True]


def test_the_page_logs_to_wandb(run_example, runs, monkeypatch):
    logged = []
    run = types.SimpleNamespace(log=lambda results, step: logged.append((step, results)))
    wandb = types.SimpleNamespace(init=lambda project, config: logged.append(config) or run)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    run_example("log_to_wandb")
    ((_, hook),) = runs
    hook(6, {"eval/accuracy": 0.5})
    assert logged[0]["data"]["name"] == "digits"
    assert logged[1] == (6, {"eval/accuracy": 0.5})


@pytest.mark.usefixtures("library_promotion")
def test_the_pages_class_weights_balance_the_classes(run_example, runs):
    found = run_example("class_weights")
    np.testing.assert_allclose(found["WEIGHTS"] * found["counts"], 384 / 10, rtol=1e-6)
    targets = np.eye(10, dtype=np.float32)
    ((loss, _),) = runs
    values = loss(0 * targets, targets)
    np.testing.assert_allclose(values, np.log(10) * found["WEIGHTS"], rtol=1e-6)
