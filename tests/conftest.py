"""Runs the tests on eight virtual CPU devices, with shapes, types and promotions checked."""

import contextlib
import fcntl
import gc
import io
import json
import os
import resource
import shutil
import types
from pathlib import Path
from typing import NamedTuple

# Before NumPy is imported: the workers' threads would wait for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import fork_main

os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8 "
    f"{fork_main.FAST_COMPILATION}"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jaxtyping import install_import_hook

install_import_hook("structinit_jax", "beartype.beartype")

import jax
import numpy as np
import pytest

gc.set_threshold(100_000)  # as the commands do
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


LONG = (  # files that take more than about 20 s
    *("test_absolute", "test_analyse", "test_colab", "test_distributed", "test_documents"),
    *("test_grid", "test_main", "test_model_programs", "test_models", "test_plugins"),
    *("test_step", "test_train"),
)


def pytest_collection_modifyitems(items):
    """Starts with the long files, so that both workers end at about the same time."""
    items.sort(key=lambda item: item.path.stem not in LONG)


@pytest.fixture(scope="session")
def session_folder(tmp_path_factory):
    """A folder that both workers of a session share."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(session_folder):
    """Compiles identical programs of all tests, their commands and both workers only once."""
    folder = Path(os.environ.get("TEST_CACHE_DIR", session_folder))  # kept between sessions if set
    fork_main.ENVIRONMENT["XDG_CACHE_HOME"] = str(folder)
    jax.config.update("jax_compilation_cache_dir", str(folder / "structinit_jax" / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def make_tiny_config():
    """Digits for two epochs of six steps, with a model that compiles in a second or two.

    It logs at steps 5 and 10, and logs and saves at 4, 6, 8 and 12.
    """
    from structinit_jax.config import base_config

    config = base_config()
    config.update(num_epochs=2.0, batch_size=64, warmup_epochs=0.5)
    config.update(log_every_steps=5, eval_every_epochs=1.0, checkpoint_every_steps=4)
    config.model.update(num_classes=10, width=16, depth=2, num_heads=2, patch_size=2)
    config.model.drop_path = 0.2
    config.data.update(name="digits", train_split="train[:384]")
    config.data.eval_split = "test[:90]"  # not a multiple of the batch size
    config.data.update(image_size=8, channels=1, mean=(0.3,), std=(0.4,))
    return config


@pytest.fixture
def tiny_config():
    return make_tiny_config()


class Run(NamedTuple):
    workdir: Path
    results: dict[str, float]
    output: str


@pytest.fixture(scope="session")
def finished_run(session_folder):
    """A run of 12 steps that the tests of both workers share; none may write to its workdir."""
    from structinit_jax.training import train

    workdir, record = session_folder / "finished_run", session_folder / "finished_run.json"
    with (session_folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not record.exists():
            output = io.StringIO()
            with library_promotion_rules(), contextlib.redirect_stdout(output):
                # What a logger returns, such as a count of characters, does not end a run.
                results = train.train(make_tiny_config(), workdir, on_evaluation=lambda *_: 17)
            record.write_text(json.dumps([results, output.getvalue()]))
    return Run(workdir, *json.loads(record.read_text()))


@pytest.fixture
def workdir(finished_run, tmp_path):
    """A copy of the workdir of `finished_run`."""
    return Path(shutil.copytree(finished_run.workdir, tmp_path / "run"))


def read_metrics(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def assert_close(found, expected, **tolerance):
    """Compares two trees of arrays; an error names the leaf."""

    def compare(path, a, b):
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(a, b, err_msg=name, **tolerance)

    jax.tree.map_with_path(compare, found, expected)


def make_batch(**arrays):
    """A batch of random digits, with arrays replaced or added."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (64, 8, 8, 1), dtype=np.uint8)
    return {"image": images, "label": rng.integers(0, 10, 64, dtype=np.int32), **arrays}


def set_up(config, devices=None):
    """Builds what training builds, for 384 examples."""
    from structinit_jax.training import build, state
    from structinit_jax.training.step import make_train_step

    mesh = build.make_mesh(config, devices)
    schedule = build.make_schedule(config, 384)
    model = build.make_model(config, mesh)
    optimizer = build.make_optimizer(config, schedule.learning_rate, model)
    abstract_state = state.abstract_state(model, optimizer, config.ema_decay > 0)
    abstract_batch = build.abstract_batch(config, mesh)
    step = make_train_step(config, model, optimizer, schedule.learning_rate)

    def initialize():
        initial = state.make_initializer(config, model)()
        return state.initialize_state(*initial.weights, optimizer, abstract_state)

    return types.SimpleNamespace(
        schedule=schedule,
        model=model,
        initialize=initialize,
        abstract_state=abstract_state,
        abstract_batch=abstract_batch,
        arguments=(abstract_state, abstract_batch, build.SEED),
        train_step=build.jit_step(step, mesh, abstract_state),
    )


@pytest.fixture
def config(shared_config):
    """A copy of a file's `shared_config` that a test may change."""
    return shared_config.copy_and_resolve_references()


@pytest.fixture(scope="module")
def setup(shared_config):
    """What training builds from a file's `shared_config`."""
    with library_promotion_rules():
        return set_up(shared_config)


@pytest.fixture(scope="module")
def first_state(setup):
    """The initial state of `setup`, on the host."""
    with library_promotion_rules():
        return jax.device_get(setup.initialize())


def place(state, setup):
    """Puts a host state on the devices, as the training step of `set_up` expects."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, setup.abstract_state)
    return jax.device_put(state, shardings)


@contextlib.contextmanager
def library_promotion_rules():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def library_promotion():
    """JAX's default promotion rules, for optax and Flax code that relies on them."""
    with library_promotion_rules():
        yield


@contextlib.contextmanager
def small_files_only(num_bytes):
    """Simulates a full disk: within the context, no file can grow beyond `num_bytes`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
