"""Processes of one run that differ, through the public command."""

import fork_main
import pytest

from structinit_jax.config import base_config
from structinit_jax.training import agree

TINY = ["--config=configs/vit_t_digits.py", "--config.num_steps=2"]


def start_two(*arguments, first=(), second=()):
    """Returns the results of two processes of one run with some arguments of their own."""
    address = f"--coordinator_address=127.0.0.1:{fork_main.free_port()}"
    shared = [*TINY, *arguments, address, "--num_processes=2"]
    commands = [
        fork_main.Command(*shared, f"--process_id={i}", *own)
        for i, own in enumerate((first, second))
    ]
    return [command.wait(timeout=60) for command in commands]


def assert_both_fail(results, *texts):
    assert [result.returncode for result in results] == [1, 1], results
    for result in results:
        assert "Traceback" not in result.stderr
        for text in texts:
            assert text in result.stderr


def test_processes_that_do_not_share_the_workdir_are_refused(data_dir, tmp_path):
    one, other = (tmp_path / name for name in ("a", "b"))
    results = start_two(
        f"--config.data.data_dir={data_dir}",
        first=[f"--workdir={one}"],
        second=[f"--workdir={other}"],
    )
    assert_both_fail(
        results, f"--workdir={other} of process 1 (on ", f"--workdir={one} of process 0"
    )
    assert [path.name for path in one.iterdir()] == [".lock"]
    assert not list(other.iterdir())


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_processes_with_other_configs_or_data_are_refused(mode, data_dir, tmp_path):
    results = start_two(
        *(f"--mode={mode}", f"--workdir={tmp_path}", f"--config.data.data_dir={data_dir}"),
        second=[
            "--config.seed=1",
            "--config.data.train_split=train[:1000]",
            "--config.data.eval_split=test[:90]",
        ],
    )
    lines = ["process 1 (on ", "  config.seed: 0 -> 1\n", "  evaluation_examples: [359] -> [90]\n"]
    if mode == "train":
        lines.append("  train_split.num_examples: 1438 -> 1000\n")
    assert_both_fail(results, *lines)


# Two processes with the same workdir and their data in different folders.
ALIKE = """
import pathlib, sys
from structinit_jax.config import base_config
from structinit_jax.training import agree, distributed
address, process_id, folder = sys.argv[1:]
distributed.join(address, 2, int(process_id), 60)
config = base_config()
config.data.data_dir = process_id
for _ in range(2):
    agree.check_workdir(folder, pathlib.Path(folder))
    agree.check_workdir("gs://bucket/run", pathlib.Path(folder, process_id))
    agree.check_run(config, {"train_split": {"class_names": [str(i) for i in range(1000)]}})
"""


def test_processes_that_are_alike_go_on(tmp_path):
    script, workdir = tmp_path / "alike.py", tmp_path / "run"
    script.write_text(ALIKE)
    workdir.mkdir()
    address = f"127.0.0.1:{fork_main.free_port()}"
    pair = [fork_main.Command(address, i, workdir, module=str(script)) for i in range(2)]
    results = [command.wait(timeout=60) for command in pair]
    assert [result.returncode for result in results] == [0, 0], results
    assert not list(workdir.iterdir())


def test_the_message_is_that_of_the_first_process_that_differs():
    reports = [
        {"host": f"host-{i}", "values": {"config.seed": seed, **more}}
        for i, (seed, more) in enumerate([("0", {}), ("0", {}), ("1", {"new": "2"}), ("3", {})])
    ]
    assert agree._compare_values(reports[:2]) == ""
    assert agree._compare_values(reports).splitlines() == [
        "process 2 (on host-2) does not run what process 0 (on host-0) runs. From process 0 to "
        "process 2:",
        "  config.seed: 0 -> 1",
        "  new: (absent) -> 2",
        "Start all processes with the same checkout, flags and data",
    ]


def test_a_single_process_agrees_with_itself(tmp_path):
    agree.check_workdir(tmp_path, tmp_path)
    agree.check_run(base_config(), {})
    assert not list(tmp_path.iterdir())
