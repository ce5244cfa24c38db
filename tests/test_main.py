import json
import re
import runpy
import signal

import fork_main

PREEMPTED = 75  # EX_TEMPFAIL: launch scripts run the command again


def test_a_run_killed_or_stopped_at_any_moment_ends_bit_equal(tmp_path):
    arguments = [
        *fork_main.TINY,
        "--config.attention_init.name=default",
        "--config.num_steps=120",
        "--config.batch_size=32",
        "--config.eval_every_epochs=1.5",
        "--config.checkpoint_every_steps=24",  # not aligned with logging
        "--config.log_every_steps=5",
        "--config.model.drop_path=0.2",
    ]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    # A separate cache, because a killed command can leave a partly written program in it.
    cache = dict(XDG_CACHE_HOME=str(tmp_path))
    fork_main.run(*arguments, f"--workdir={whole}", **cache)
    assert any((tmp_path / "structinit_jax" / "xla").iterdir())

    metrics, stopped_at = killed / "metrics.jsonl", None
    for kill_after, number, exit_code in (
        (30, signal.SIGKILL, -signal.SIGKILL),
        (50, signal.SIGTERM, PREEMPTED),  # test_grid.py sends SIGINT
        (None, None, 0),
    ):
        command = fork_main.Command(*arguments, f"--workdir={killed}", **cache)
        if number:
            command.wait_for(f'"step": {kill_after},', metrics)
            command.kill(number)
        result = command.wait()
        assert result.returncode == exit_code, result.stderr
        if stopped_at:
            assert f"resumed from step {stopped_at}" in result.stdout
        stopped_at = None
        if exit_code == PREEMPTED:
            stopped_at = int(re.search(r"after step (\d+)", result.stderr)[1])
            assert kill_after <= stopped_at < kill_after + 70
    assert "resumed from step" in result.stdout

    assert (killed / "curves.png").read_bytes().startswith(b"\x89PNG")

    def digests(workdir):  # of all arrays, including the optimizer's
        index = (workdir / "checkpoints" / "120" / "index_0.json").read_text()
        files = json.loads(index.splitlines()[0])["files"]
        return {name: digest for name, digest in files.items() if name.count("/") == 2}

    assert len(digests(whole)) > 20
    assert digests(killed) == digests(whole)
    soak = runpy.run_path(str(fork_main.ROOT / "benchmarks" / "soak.py"))

    def evaluations(workdir):  # because a stop adds a line of training metrics
        return [line for line in soak["lines_without_times"](workdir) if "eval/accuracy" in line]

    assert evaluations(killed) == evaluations(whole)


def test_a_run_is_evaluated_and_exported_by_its_workdir(finished_run, tmp_path):
    workdir = f"--workdir={finished_run.workdir}"
    out = tmp_path / "evaluation"
    result = fork_main.run(workdir, "--mode=eval", "--step=best", f"--out={out}")
    assert [path.name for path in out.iterdir()] == ["per_class.csv"]
    assert re.search(r"\nstep \d+  eval loss .* 90 examples of digits", result.stdout)
    folder = tmp_path / "model"
    arguments = (workdir, "--step=8", f"--out={folder}")
    result = fork_main.run(*arguments, module="structinit_jax.export")
    assert result.stdout.startswith(f"wrote the weights of step 8 to {folder}\n")
    assert f'timm.create_model("local-dir:{folder}", pretrained=True)' in result.stdout
    files = {"class_map.pkl", "config.json", "model.safetensors"}
    assert {path.name for path in folder.iterdir()} == files
