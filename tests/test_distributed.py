"""Several processes of one run on this machine, through the public command."""

import json
import re
import signal
import time

import fork_main
import numpy as np
import pytest

from structinit_jax import train
from structinit_jax.errors import InputError
from structinit_jax.training import distributed

TINY = [
    "--config=configs/vit_t_digits.py",
    "--config.model.width=128",  # wide enough for its matrices to be split
    "--config.model.depth=2",
    "--config.model.num_heads=2",
    "--config.model.patch_size=2",
    "--config.attention_init.name=default",
    "--config.log_every_steps=1",
    "--config.eval_every_epochs=1000.0",
    # A constant rate, so that a short run can be extended.
    "--config.warmup_epochs=0.0",
    "--config.learning_rate=1e-3",
    "--config.final_learning_rate=1e-3",
]


def coordinator():
    return f"--coordinator_address=127.0.0.1:{fork_main.free_port()}"


def start(num_devices, *arguments):
    """Starts the command on a number of virtual devices."""
    devices = f"--xla_force_host_platform_device_count={num_devices}"
    return fork_main.Command(*arguments, XLA_FLAGS=f"{devices} {fork_main.FAST_COMPILATION}")


@pytest.fixture(scope="module")
def expected(data_dir, tmp_path_factory):
    """The losses of a run of one process on eight devices, by step."""
    workdir = tmp_path_factory.mktemp("one")
    fields = [f"--config.data.data_dir={data_dir}", "--config.num_steps=20"]
    result = start(8, *TINY, *fields, f"--workdir={workdir}").wait()
    assert result.returncode == 0, result
    return losses(workdir)


def start_two(*arguments):
    """Starts the command as two processes of one run, with four devices each."""
    shared = [*arguments, coordinator(), "--num_processes=2"]
    return [start(4, *shared, f"--process_id={i}") for i in range(2)]


def losses(workdir):
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {m["step"]: m["train/loss"] for m in lines if "train/loss" in m}


@pytest.mark.slow
def test_two_processes_train_as_one_and_stop_together(expected, data_dir, tmp_path):
    arguments = [*TINY, f"--config.data.data_dir={data_dir}"]
    two = tmp_path / "two"
    pair = start_two(*arguments, f"--workdir={two}", "--config.num_steps=10")
    first, second = results = [command.wait() for command in pair]
    assert first.returncode == second.returncode == 0, results
    assert "devices: 8 × cpu (2 hosts)" in first.stdout
    assert "done: test accuracy" in first.stdout
    assert "step" not in second.stdout
    assert list(losses(two)) == list(range(1, 11))  # every line once

    # The run is resumed. A signal to one process stops both after the same step.
    pair = start_two(*arguments, f"--workdir={two}", "--config.num_steps=100000")
    deadline = time.monotonic() + 120
    while max(losses(two)) < 20:
        assert all(command.process.is_alive() for command in pair)
        assert time.monotonic() < deadline
        time.sleep(0.1)
    pair[1].kill(signal.SIGTERM)
    results = [command.wait() for command in pair]
    assert [result.returncode for result in results] == [train.PREEMPTED_EXIT_CODE] * 2, results
    (stopped_at,) = {
        int(re.search(r"stopped by a signal after step (\d+)", result.stderr)[1])
        for result in results
    }
    assert "resumed from step 10" in results[0].stdout
    assert (two / "checkpoints" / str(stopped_at) / "run.json").exists()
    assert max(losses(two)) == stopped_at

    actual = losses(two)
    steps = range(1, 21)
    np.testing.assert_allclose(
        [actual[step] for step in steps], [expected[step] for step in steps], rtol=1e-5
    )


@pytest.mark.slow
def test_a_run_is_resumed_on_other_numbers_of_devices(expected, data_dir, tmp_path):
    arguments = [*TINY, f"--config.data.data_dir={data_dir}"]

    def run(num_devices, num_steps, fsdp):
        result = start(
            num_devices,
            *arguments,
            f"--config.fsdp={fsdp}",
            f"--config.num_steps={num_steps}",
            f"--workdir={tmp_path}",
        ).wait()
        assert result.returncode == 0, result
        return result.stdout

    run(num_devices=8, num_steps=7, fsdp=2)
    assert "resumed from step 7" in run(num_devices=4, num_steps=14, fsdp=1)
    assert "8 × cpu, each copy of the state on 4" in run(num_devices=8, num_steps=20, fsdp=4)
    actual = losses(tmp_path)
    assert list(actual) == list(expected) == list(range(1, 21))
    np.testing.assert_allclose(list(actual.values()), list(expected.values()), rtol=1e-5)


def test_a_process_started_alone_gives_up_with_a_message(tmp_path):
    alone = [*TINY, f"--workdir={tmp_path}", coordinator(), "--num_processes=2"]
    result = start(1, *alone, "--process_id=1", "--join_timeout=2").wait()
    assert result.returncode == 1
    assert re.search(r"error: .*, 2, 1\) waited 2 s, but not all .* joined", result.stderr)


@pytest.mark.parametrize("other", ["code", "config"])
def test_processes_with_other_code_or_config_are_refused(monkeypatch, other):
    codes, seen = ["one", "two" if other == "code" else "one"], []
    configs = [{"seed": 0}, {"seed": 1 if other == "config" else 0}]

    def gather(mine):
        seen.append(mine)
        return np.stack(seen)

    monkeypatch.setattr(distributed, "_digest_of_code", lambda: codes[len(seen)])
    monkeypatch.setattr(distributed.multihost_utils, "process_allgather", gather)
    distributed.check_equal({"config": configs[0]})
    with pytest.raises(InputError, match=f"process 1 has another {other} than process 0"):
        distributed.check_equal({"config": configs[1]})


@pytest.mark.parametrize("arguments", [("host:1", None, None), ("host:1", 2, 2)])
def test_incomplete_arguments_are_refused(arguments):
    with pytest.raises(InputError, match="--process_id must be set together"):
        distributed.join(*arguments)


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"}, False),  # the batch script, not srun's step
        ({"SLURM_STEP_NUM_TASKS": "8"}, True),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, False),
        ({"TPU_WORKER_HOSTNAMES": "host-0,host-1"}, True),
    ],
)
def test_clusters_are_recognized_by_their_environment(environment, found):
    assert distributed._in_cluster(environment) == found
