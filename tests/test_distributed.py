"""Several processes of one run, on this machine: real ones, through the public command."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from structinit_jax import train
from structinit_jax.errors import InputError
from structinit_jax.training import distributed

ROOT = Path(__file__).parent.parent
TINY = [
    "--config=configs/vit_t_digits.py",
    "--config.model.width=16",
    "--config.model.depth=2",
    "--config.model.num_heads=2",
    "--config.model.patch_size=2",
    "--config.attention_init.name=default",
    "--config.log_every_steps=1",
    "--config.eval_every_epochs=1000.0",
    # A rate that does not depend on the number of steps, so that a short run can be extended.
    "--config.warmup_epochs=0.0",
    "--config.learning_rate=1e-3",
    "--config.final_learning_rate=1e-3",
]


@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache"))


def free_port():
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(caches, num_devices, *arguments):
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}",
        "JAX_PLATFORMS": "cpu",
        "XDG_CACHE_HOME": caches,
    }
    return subprocess.Popen(
        [sys.executable, "-m", "structinit_jax.main", *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start_two(caches, *arguments):
    port = free_port()
    return [
        start(
            caches,
            4,
            *arguments,
            f"--coordinator_address=127.0.0.1:{port}",
            "--num_processes=2",
            f"--process_id={i}",
        )
        for i in range(2)
    ]


def losses(workdir):
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {m["step"]: m["train/loss"] for m in lines if "train/loss" in m}


@pytest.mark.slow
def test_two_processes_train_as_one_and_stop_together(caches, data_dir, tmp_path):
    arguments = [*TINY, f"--config.data.data_dir={data_dir}"]
    one = start(caches, 8, *arguments, f"--workdir={tmp_path / 'one'}", "--config.num_steps=20")
    output = one.communicate(timeout=300)
    assert one.returncode == 0, output

    two = tmp_path / "two"
    pair = start_two(caches, *arguments, f"--workdir={two}", "--config.num_steps=10")
    outputs = [process.communicate(timeout=300) for process in pair]
    assert [process.returncode for process in pair] == [0, 0], outputs
    assert "devices: 8 × cpu (2 hosts)" in outputs[0][0]
    assert "done: test accuracy" in outputs[0][0]
    assert "step" not in outputs[1][0]
    assert list(losses(two)) == list(range(1, 11))  # every line once

    # The same run goes on, is stopped by a signal to one process, and both stop at one step.
    pair = start_two(caches, *arguments, f"--workdir={two}", "--config.num_steps=100000")
    deadline = time.monotonic() + 120
    while max(losses(two)) < 20:
        assert all(process.poll() is None for process in pair)
        assert time.monotonic() < deadline
        time.sleep(0.1)
    pair[1].send_signal(signal.SIGTERM)
    outputs = [process.communicate(timeout=300) for process in pair]
    assert [process.returncode for process in pair] == [train.PREEMPTED_EXIT_CODE] * 2, outputs
    messages = [text[text.index("stopped by a signal after step") :] for _, text in outputs]
    assert messages[0].splitlines()[0] == messages[1].splitlines()[0]
    stopped_at = int(messages[0].split()[6])
    assert "resumed from step 10" in outputs[0][0]
    assert (two / "checkpoints" / str(stopped_at) / "manifest.json").exists()
    assert max(losses(two)) == stopped_at

    expected, actual = losses(tmp_path / "one"), losses(two)
    steps = range(1, 21)
    np.testing.assert_allclose(
        [actual[step] for step in steps], [expected[step] for step in steps], rtol=1e-5
    )


@pytest.mark.slow
def test_a_run_goes_on_with_other_numbers_of_devices(caches, data_dir, tmp_path):
    arguments = [*TINY, f"--config.data.data_dir={data_dir}"]

    def run(workdir, num_devices, num_steps, fsdp):
        process = start(
            caches,
            num_devices,
            *arguments,
            "--config.model.width=128",  # wide enough for its matrices to be split
            f"--config.fsdp={fsdp}",
            f"--config.num_steps={num_steps}",
            f"--workdir={tmp_path / workdir}",
        )
        output = process.communicate(timeout=300)
        assert process.returncode == 0, output
        return output[0]

    run("one", num_devices=8, num_steps=20, fsdp=1)
    run("many", num_devices=8, num_steps=7, fsdp=2)
    assert "resumed from step 7" in run("many", num_devices=4, num_steps=14, fsdp=1)
    assert "8 × cpu, each copy of the state on 4" in run("many", 8, num_steps=20, fsdp=4)
    expected, actual = losses(tmp_path / "one"), losses(tmp_path / "many")
    assert list(actual) == list(expected) == list(range(1, 21))
    np.testing.assert_allclose(list(actual.values()), list(expected.values()), rtol=1e-5)


@pytest.mark.parametrize("process_id", [0, 1])
def test_a_process_started_alone_gives_up_with_a_message(caches, tmp_path, process_id):
    process = start(
        caches,
        1,
        *TINY,
        f"--workdir={tmp_path}",
        f"--coordinator_address=127.0.0.1:{free_port()}",
        "--num_processes=2",
        f"--process_id={process_id}",
        "--join_timeout=2",
    )
    _, message = process.communicate(timeout=300)
    assert process.returncode == 1
    assert f"error: process {process_id} of 2 (coordinator 127.0.0.1:" in message
    assert "waited 2 s and the others did not all come. Start the same command on all" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("host:1", None, None), "--num_processes and --process_id must be given too"),
        ((None, 2, 0), "--coordinator_address must be given too"),
        ((None, 2, None), "--coordinator_address and --process_id must be given too"),
        (("host", 2, 0), "--coordinator_address=host needs a host and a port"),
        (("host:port", 2, 0), "--coordinator_address=host:port needs a host and a port"),
        (("host:1", 0, 0), "--num_processes=0 needs to be 1 or more"),
        (("host:1", 2, 2), "--process_id=2 needs to be from 0 to 1"),
        (("host:1", 2, -1), "--process_id=-1 needs to be from 0 to 1"),
    ],
)
def test_incomplete_arguments_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        distributed.join(*arguments)


def test_one_process_needs_no_others():
    distributed.join()
    distributed.join(num_processes=1)


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, False),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"}, False),  # the batch script, not srun's step
        ({"SLURM_STEP_NUM_TASKS": "1"}, False),
        ({"SLURM_STEP_NUM_TASKS": "8"}, True),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, False),
        ({"TPU_WORKER_HOSTNAMES": "host-0,host-1"}, True),
    ],
)
def test_clusters_are_told_by_their_environment(environment, found):
    assert distributed._in_cluster(environment) == found
