"""The command as a person runs it: real processes, their messages and their exit codes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from structinit_jax import train
from structinit_jax.data.info import CATALOG
from structinit_jax.training import checkpoint

ROOT = Path(__file__).parent.parent
TINY = [
    "--config=configs/vit_t_digits.py",
    "--config.model.width=16",
    "--config.model.depth=2",
    "--config.model.num_heads=2",
    "--config.model.patch_size=2",
]


def command(*arguments):
    return [sys.executable, "-m", "structinit_jax.main", *arguments]


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    """One plain CPU device, and caches of the tests' own."""
    kept = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    return kept | {
        "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")),
        "JAX_PLATFORMS": "cpu",
    }


@pytest.fixture
def run(environment):
    def run(*arguments, timeout=300):
        return subprocess.run(
            command(*arguments),
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "error: --config is required: the path of a config file"),
        (TINY, "error: --workdir is required: the folder for checkpoints"),
        (["--config=configs/nope.py"], "configs/nope.py"),
        ([*TINY, "--config.model.widht=5"], "has no field 'widht'; did you mean 'width'?"),
        ([*TINY, "--config.modle.width=5"], "config has no field 'modle'; did you mean 'model'?"),
        ([*TINY, "--config.batch_size=many"], "batch_size"),
        ([*TINY, "--config.attention_init.kernel=5"], "did you mean 'kernel_size'?"),
        ([*TINY, "--wrokdir=/tmp/x"], "wrokdir"),
        ([*TINY, "--mode=test"], "mode"),
        ([*TINY, "workdir=x"], "'workdir=x' is no flag: write --name=value"),
        (
            [*TINY, "--dry_run", "--config.model.width=18"],
            "error: model.width=18: sin-cos positions need a width divisible by 4",
        ),
    ],
)
def test_mistakes_end_with_a_message_and_no_traceback(run, arguments, message):
    result = run(*arguments)
    assert result.returncode != 0
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_imagenet_that_is_not_prepared_stops_with_instructions(run, tmp_path):
    start = time.perf_counter()
    result = run(
        "--config=configs/vit_2025_imagenet.py",
        f"--workdir={tmp_path}",
        f"--config.data.data_dir={tmp_path}",
    )
    assert time.perf_counter() - start < 30
    assert result.returncode != 0
    assert "ILSVRC2012_img_train.tar" in result.stderr
    assert "python -m structinit_jax.data.prepare --name=imagenet2012" in result.stderr
    assert "Traceback" not in result.stderr


def final_state(workdir, fields):
    from ml_collections import ConfigDict

    config = ConfigDict(json.loads((workdir / "config.json").read_text()))
    config.update_from_flattened_dict(fields)
    setup = train.set_up(config, CATALOG["digits"], 1_438)
    directory = workdir / "checkpoints"
    step = checkpoint.newest_step(directory)
    state = checkpoint.restore(directory, step, setup.abstract_state)
    return jax.tree.map(np.asarray, state)


def test_a_run_killed_or_stopped_at_any_moment_ends_bit_equal(environment, run, tmp_path, data_dir):
    arguments = [
        *TINY,
        f"--config.data.data_dir={data_dir}",
        "--config.num_steps=400",
        "--config.checkpoint_every_steps=18",  # not where lines are logged
        "--config.log_every_steps=5",
        "--config.model.drop_path=0.2",
    ]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert run(*arguments, f"--workdir={whole}").returncode == 0

    metrics = killed / "metrics.jsonl"
    for kill_after, number, exit_code in (
        (60, signal.SIGKILL, -signal.SIGKILL),
        (120, signal.SIGTERM, train.PREEMPTED_EXIT_CODE),
        (200, signal.SIGINT, train.PREEMPTED_EXIT_CODE),
        (290, signal.SIGKILL, -signal.SIGKILL),
    ):
        process = subprocess.Popen(
            command(*arguments, f"--workdir={killed}"),
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        deadline = time.monotonic() + 120
        while not metrics.exists() or f'"step": {kill_after},' not in metrics.read_text():
            assert process.poll() is None, "ended before it was killed"
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.send_signal(number)
        _, message = process.communicate(timeout=300)
        assert process.returncode == exit_code
        if number != signal.SIGKILL:
            stopped_at = int(message.split("stopped by a signal after step ")[1].split()[0])
            assert kill_after <= stopped_at < kill_after + 100
            assert (killed / "checkpoints" / str(stopped_at) / "manifest.json").exists()
    result = run(*arguments, f"--workdir={killed}")
    assert "resumed from step" in result.stdout
    state, expected = (final_state(workdir, {"batch_size": 64}) for workdir in (killed, whole))
    assert int(expected.step) == 400
    jax.tree.map(np.testing.assert_array_equal, state, expected)

    def without_speed(path):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        times = ("images_per_second", "data_wait", "checkpoint_wait", "evaluation_wait")
        return [{k: v for k, v in m.items() if k not in times} for m in lines]

    assert without_speed(metrics) == without_speed(whole / "metrics.jsonl")


@pytest.mark.slow
def test_the_readme_command_reaches_its_accuracy(run, tmp_path):
    """Item by item what the README promises, from a machine that holds no data."""
    start = time.perf_counter()
    result = run(
        "--config=configs/vit_t_digits.py",
        f"--workdir={tmp_path / 'digits'}",
        f"--config.data.data_dir={tmp_path / 'tfds'}",
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    accuracy = float(result.stdout.split("done: test accuracy ")[1].split()[0])
    assert accuracy >= 0.96
    print(f"accuracy {accuracy} in {time.perf_counter() - start:.0f} s")
    evaluated = run(
        "--config=configs/vit_t_digits.py",
        f"--workdir={tmp_path / 'digits'}",
        f"--config.data.data_dir={tmp_path / 'tfds'}",
        "--mode=eval",
    )
    assert f"test accuracy {accuracy:.4f} on 359 examples of digits test" in evaluated.stdout
