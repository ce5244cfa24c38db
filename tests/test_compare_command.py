"""The command structinit_jax.compare."""

import re
import signal
import time

import fork_main

from structinit_jax import train


def test_the_command_does_not_take_the_config_of_a_run(finished_run):
    result = fork_main.run(f"--workdir={finished_run.workdir}", module="structinit_jax.compare")
    assert result.returncode == 2
    assert re.search(r"error: --config is required, .*, unless --report_only", result.stderr)


def test_a_report_alone_takes_no_flags_of_training(tmp_path):
    arguments = ("--report_only", "--grid.config.model.depth=1,2", f"--workdir={tmp_path}")
    result = fork_main.run(*arguments, module="structinit_jax.compare")
    assert result.returncode == 2
    assert "error: --grid.config.model.depth=1,2: --report_only reports what" in result.stderr


def test_the_command_stops_on_ctrl_c_and_resumes(tmp_path, data_dir):
    workdir = tmp_path / "compare"
    arguments = [
        *("--config=configs/vit_t_digits.py", "--config.model.width=16", "--config.model.depth=1"),
        *("--config.model.patch_size=2", "--config.num_steps=300", "--config.log_every_steps=5"),
        *("--schemes=default", "--grid.config.model.num_heads=1,2", "--seeds=1"),
        *(f"--config.data.data_dir={data_dir}", f"--workdir={workdir}"),
    ]
    options = dict(module="structinit_jax.compare")
    command = fork_main.Command(*arguments, **options)
    metrics = workdir / "default,model.num_heads=1" / "seed_0" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and '"step": 5,' in metrics.read_text()):
        assert command.process.is_alive(), command.wait().stderr
        assert time.monotonic() < deadline
        time.sleep(0.002)
    command.kill(signal.SIGINT)
    result = command.wait()
    assert result.returncode == train.PREEMPTED_EXIT_CODE, result.stderr
    assert "run the same command again to resume" in result.stderr
    assert "2 runs have not finished" in (workdir / "report.md").read_text()

    result = fork_main.run(*arguments, **options)
    assert result.returncode == 0, result.stderr
    assert "resumed from step" in (metrics.parent / "log.txt").read_text()
    text = (workdir / "report.md").read_text()
    assert "--grid.config.model.num_heads=1,2" in text
    assert "| default,model.num_heads=2 | 1 of 1 |" in text
    page = (workdir / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 2  # maps before and after training
    # The report can be repeated from the files alone.
    (workdir / "report.md").unlink()
    result = fork_main.run("--report_only", f"--workdir={workdir}", **options)
    assert result.returncode == 0, result.stderr
    assert (workdir / "report.md").read_text() == text
