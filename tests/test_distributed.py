"""Runs with several processes on this machine, through the public command."""

import shutil
import signal

import fork_main
import jax
import numpy as np
import pytest
from conftest import read_metrics
from etils import epath

from structinit_jax.errors import InputError, PreemptedError
from structinit_jax.training import distributed, workdir

TINY = [
    *fork_main.TINY,
    "--config.model.width=128",  # wide enough for its matrices to be split
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
    """Starts the command on the given number of virtual devices."""
    devices = f"--xla_force_host_platform_device_count={num_devices}"
    return fork_main.Command(*arguments, XLA_FLAGS=f"{devices} {fork_main.FAST_COMPILATION}")


def start_two(*arguments):
    """Starts the command as two processes of one run, with four devices each."""
    shared = [*arguments, coordinator(), "--num_processes=2"]
    return [start(4, *shared, f"--process_id={i}") for i in range(2)]


def losses(folder):
    return {m["step"]: m["train/loss"] for m in read_metrics(folder) if "train/loss" in m}


@pytest.mark.slow
def test_a_run_goes_on_with_other_processes_and_devices_and_stops_together(tmp_path):
    def arguments(folder, *more):
        fields = ["--config.num_steps=12", "--config.checkpoint_every_steps=6", *more]
        return [*TINY, *fields, f"--workdir={tmp_path / folder}"]

    result = start(4, *arguments("one")).wait()
    assert result.returncode == 0, result
    expected, changed = losses(tmp_path / "one"), tmp_path / "changed"
    shutil.copytree(tmp_path / "one", changed)
    shutil.rmtree(changed / "checkpoints" / "12")

    # The state is split over both processes. A signal to one of them before the first step stops
    # both after that step, which they also evaluate.
    evaluates = "--config.eval_every_epochs=0.3116"  # after 7 of 22.47 steps
    pair = start_two(*arguments("changed", "--config.fsdp=8", evaluates))
    pair[1].wait_for("has joined")
    pair[1].kill(signal.SIGTERM)
    first, second = results = [command.wait() for command in pair]
    assert [result.returncode for result in results] == [PreemptedError.exit_code] * 2, results
    assert all("stopped by a signal after step 7 " in result.stderr for result in results)
    assert "devices: 8 × cpu (2 processes), each copy of the state on 8" in first.stdout
    assert "resumed from step 6" in first.stdout
    assert "step 7  eval loss" in first.stdout
    assert "step" not in second.stdout

    result = start(4, *arguments("changed")).wait()
    assert result.returncode == 0, result
    assert "resumed from step 7" in result.stdout
    actual = losses(changed)
    assert list(actual) == list(expected)  # every line once
    np.testing.assert_allclose(list(actual.values()), list(expected.values()), rtol=1e-5)


def test_a_process_started_alone_and_a_mistake_that_one_process_sees_end_the_run(tmp_path):
    alone = [*TINY, f"--workdir={tmp_path}", coordinator(), "--num_processes=2"]
    waiting = start(1, *alone, "--process_id=1", "--join_timeout=2")
    with workdir.lock_workdir(tmp_path):  # process 0 alone takes the lock
        results = [command.wait() for command in start_two(*TINY, f"--workdir={tmp_path}")]
    assert [result.returncode for result in results] == [1, 1], results  # a later start may succeed
    messages = ("is in use by another run", "process 0 cannot continue")
    for result, words in zip(results, messages, strict=True):
        (message,) = [x for x in result.stderr.splitlines() if x.startswith("error: ")]
        assert words in message
    result = waiting.wait(timeout=60)
    assert result.returncode != 0
    assert "waiting up to 2 s for all processes to join" in result.stderr


@pytest.fixture
def processes(monkeypatch):
    """Makes each check that gathers values that of one more process."""
    seen = []

    def gather(mine):
        seen.append(mine)
        return np.stack(seen)

    monkeypatch.setattr(distributed.multihost_utils, "process_allgather", gather)
    monkeypatch.setattr(jax, "process_count", lambda: 2)


@pytest.mark.usefixtures("processes")
def test_processes_with_another_config_or_file_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(workdir, "identify", str)
    file = tmp_path / "model.safetensors"
    file.write_text("a")

    def check(seed, data_dir):
        fields = {"seed": seed, "start_from": str(file), "data": {"data_dir": data_dir}}
        workdir.check_processes({"config": fields}, epath.Path("run"))

    check(0, "/here")
    check(0, "/there")  # each process may have its own copy
    file.write_text("b")
    message = r"process 2 has a different file config\.start_from than process 0"
    with pytest.raises(InputError, match=message):
        check(0, "/here")
    with pytest.raises(InputError, match="process 2 has a different"):
        check(1, "/here")


@pytest.mark.usefixtures("processes")
def test_processes_with_other_code_are_refused():
    for _ in range(2):
        distributed.check_program(jax.jit(lambda x: x * np.arange(9.0)).lower(1.0))
    with pytest.raises(InputError, match=r"process 2 has a different training step.* same code"):
        distributed.check_program(jax.jit(lambda x: x * np.arange(9.0)[::-1]).lower(1.0))


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


def test_a_second_signal_interrupts_at_once():
    former = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with distributed.StopRequest() as stop:
        assert not stop.reached(1)
        signal.raise_signal(signal.SIGTERM)
        assert stop.reached(2)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == former


def test_a_process_of_a_cluster_may_train_alone(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    distributed.join(num_processes=1)
    assert not jax.distributed.is_initialized()
