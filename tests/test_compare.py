"""Comparisons over seeds: runs, resuming, and the command."""

import csv
import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import types

import fork_main
import numpy as np
import pytest

from structinit_jax import train
from structinit_jax.compare import grid, report, run
from structinit_jax.data import datasets
from structinit_jax.errors import InputError, StoppedError
from structinit_jax.training.workdir import listen_for_signals, lock_workdir

pytestmark = pytest.mark.usefixtures("library_promotion")
ACCURACIES = {"default": (0.1, 0.5), "impulse": (0.6, 0.8), "mimetic": (0.3, 0.4)}


def fake_train(config, workdir, trained, stop_request=None, on_evaluation=None, nonfinite=0):
    """Writes accuracies of two epochs; the training of mimetic with seed 1 fails."""
    scheme, seed = config.attention_init.name, config.seed
    trained.append((scheme, seed))
    print("some output of the training \udcff")  # names of files need not be text
    first, last = (value + 0.02 * seed for value in ACCURACIES[scheme])
    lines = [
        {"step": 0, "init/seconds": 0.25, "init/compile_seconds": 2.0},
        {"step": 6, "train/loss": 2.0, "train/nonfinite_steps": 0, "images_per_second": 96.0},
        {"step": 6, "test[:90]/accuracy": first},
        {"step": 12, "train/loss": None, "train/nonfinite_steps": nonfinite},
        {"step": 12, "test[:90]/accuracy": last, "images_per_second": 192.0},
    ]
    failed = (scheme, seed) == ("mimetic", 1)
    with (workdir / "metrics.jsonl").open("w") as file:
        for line in lines[:3] if failed else lines:
            file.write(json.dumps(line) + "\n")
    on_evaluation(6, {"test[:90]/accuracy": first})
    if failed:
        raise RuntimeError("\nout of memory | while training \udcff\nand more")


@pytest.fixture
def start(tiny_config, tmp_path, monkeypatch):
    """Starts a comparison; returns how many runs failed, and which were trained."""
    tiny_config.lock()

    def run_grid(schemes, seeds=(0, 1, 2), config=tiny_config, train=fake_train, **options):
        trained = []
        monkeypatch.setattr(run, "train", functools.partial(train, trained=trained))
        settings = grid.expand(config, schemes, {})
        return run.run_grid(settings, list(seeds), tmp_path, **options), trained

    return run_grid


def test_a_failed_run_is_reported_and_the_others_go_on(start, tmp_path, capsys):
    failed, trained = start(["default", "mimetic", "impulse"], command="the command \udcff")
    assert failed == 1
    assert len(trained) == 9
    lines = capsys.readouterr().out.splitlines()
    lines = [line for line in lines if not line.startswith("note:")]
    assert lines[0] == "[1/9] default seed 0: started"
    assert lines[1] == "[1/9] default seed 0: step 6, epoch 1.0, test[:90] accuracy 10.00%"
    assert lines[2].startswith("[1/9] default seed 0: test[:90] accuracy 50.00%; about ")
    failure = r"failed: RuntimeError: out of memory | while training \udcff"
    assert any(line.startswith(f"[5/9] mimetic seed 1: {failure}") for line in lines)
    log = (tmp_path / "mimetic" / "seed_1" / "log.txt").read_text()
    assert "some output" in log
    assert "Traceback" in log
    assert not any("some output" in line for line in lines)
    text = (tmp_path / "report.md").read_text()
    assert r"| mimetic | 1 | RuntimeError: out of memory \| while training \udcff |" in text
    # Fewer seeds of mimetic are paired with the baseline: 0 and 2.
    row = "| mimetic | 2 of 3 | 42.00 ± 2.83 | -10.00 [-10.00, -10.00] (2 common seeds) |"
    assert row in text
    # default ends at 0.52 on average, which impulse reaches after the first epoch.
    assert "| default | 3 of 3 | 52.00 ± 2.00 | baseline | 2.0 (2 of 3 runs) | 6.0 |" in text
    assert "| impulse | 3 of 3 | 82.00 ± 2.00 | +30.00 [+30.00, +30.00] | 1.0 | 6.0 |" in text
    assert r"the command \udcff" in text  # names of files need not be text


def test_a_second_command_trains_only_what_is_missing(start, tiny_config, tmp_path, capsys):
    start(["default", "mimetic"])
    _, trained = start(["default", "mimetic"])
    assert trained == [("mimetic", 1)]  # which had failed
    assert "[1/6] default seed 0: done before, test[:90] acc" in capsys.readouterr().out
    failed, trained = start(["default", "impulse"], seeds=range(4))
    assert failed == 0  # the failed run of mimetic is not part of this command
    assert trained == [("default", 3), *(("impulse", seed) for seed in range(4))]
    text = (tmp_path / "report.md").read_text()
    assert "| default | 4 of 4 |" in text
    assert "| mimetic | 2 of 3 |" in text  # no command has asked for seed 3
    changed = tiny_config.copy_and_resolve_references()
    changed.num_epochs = 3.0
    with pytest.raises(InputError, match=r"the setting default .*\(num_epochs: 2.0 -> 3.0\)"):
        start(["default"], config=changed)
    changed.update(num_epochs=2.0, keep_checkpoints=5)  # does not change the results
    assert start(["default"], [0], config=changed) == (0, [])


def test_a_second_command_keeps_the_baseline(start, tmp_path):
    start(["default", "impulse"], [0])
    start(["mimetic"], [0])

    def read_baselines():
        rows = csv.DictReader((tmp_path / "results.csv").read_text().splitlines())
        return {row["setting"]: row["baseline"] for row in rows}

    assert read_baselines() == dict.fromkeys(["default", "impulse", "mimetic"], "default")
    start(["mimetic"], [0], baseline="impulse")  # of an earlier command
    assert read_baselines() == dict.fromkeys(["default", "impulse", "mimetic"], "impulse")
    with pytest.raises(InputError, match="--baseline=x"):
        start(["mimetic"], [0], baseline="x")
    start(["impulse"], [0], baselines={"impulse": "other"})  # that is not trained
    assert "| impulse | 1 of 1 | 80.00 | – | – |" in (tmp_path / "report.md").read_text()


def test_lost_metrics_make_a_run_unfinished(start, tmp_path):
    start(["default"])
    metrics = [tmp_path / "default" / f"seed_{seed}" / "metrics.jsonl" for seed in range(3)]
    metrics[0].unlink()
    metrics[1].write_bytes(b"")
    metrics[2].write_bytes(metrics[2].read_bytes()[:-5])  # the last line is cut
    report.write_report(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "| default | 0 of 3 | – |" in text
    assert "3 runs have not finished" in text
    assert start(["default"])[1] == [("default", 0), ("default", 1), ("default", 2)]
    assert "| default | 3 of 3 |" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize(("bad", "done"), [(5, "1 of 1 | 50.00 (5 of 12 steps were"), (7, "0 of")])
def test_steps_that_were_not_finite_are_reported(start, tmp_path, bad, done):
    failed, _ = start(["default"], [0], train=functools.partial(fake_train, nonfinite=bad))
    text = (tmp_path / "report.md").read_text()
    assert f"| default | {done}" in text
    assert failed == ("| default | 0 | diverged: 7 of 12 steps were not finite |" in text)


def test_an_error_whose_first_line_is_empty_is_an_error(start, tmp_path):
    def train(*_, **__):
        raise InputError("\nsecond line")

    assert start(["default"], [0], train=train) == (1, [])
    assert "| default | 0 | second line |" in (tmp_path / "report.md").read_text()


def test_damaged_files_are_named_in_one_line(start, tmp_path):
    start(["default"], [0])
    (tmp_path / "default" / "seed_0" / "status.json").write_bytes(b"")
    assert start(["default"], [0])[1] == [("default", 0)]
    for content in ("", "[]", '{"settings": {}}'):
        (tmp_path / "compare.json").write_text(content)
        with pytest.raises(InputError, match=r"^\S+compare\.json .*use another --workdir$"):
            report.write_report(tmp_path)


def test_other_data_under_the_same_names_are_refused(start, tiny_config, monkeypatch):
    labels = {"train": np.arange(384) % 10, "test": np.arange(90) % 10}

    def open_set(_):
        image = np.zeros((8, 8, 1), np.uint8)
        splits = {
            name: [{"image": image, "label": int(label)} for label in values]
            for name, values in labels.items()
        }
        return datasets.Dataset.from_records("mine", splits, list("0123456789"), (8, 8, 1))

    monkeypatch.setitem(sys.modules, "mine", types.SimpleNamespace(open_set=open_set))
    config = tiny_config.copy_and_resolve_references()
    config.data.update(name="mine:open_set", train_split="train", eval_split="test")
    start(["default"], [0], config=config)
    assert start(["impulse"], [0], config=config)[1] == [("impulse", 0)]
    for split in labels:
        labels[split] = labels[split][::-1]
        with pytest.raises(InputError, match=rf"other files, labels or classes of .* {split}"):
            start(["mimetic"], [0], config=config)
        labels[split] = labels[split][::-1]


def test_a_signal_during_the_last_step_of_a_run_stops_the_others(start, tmp_path):
    def interrupted(config, workdir, stop_request, **options):
        with listen_for_signals(stop_request):
            fake_train(config, workdir, **options)
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(StoppedError, match="run the same command again") as error:
        start(["default"], train=interrupted)
    assert error.value.exit_code == train.PREEMPTED_EXIT_CODE
    assert report.read(tmp_path).accuracies("default").keys() == {0}


def test_a_second_process_trains_other_settings(start, tmp_path, capsys):
    start(["default"], [0])
    (tmp_path / "default" / "seed_0" / "status.json").unlink()
    with lock_workdir(tmp_path / "default"):  # as the first does
        assert start(["default", "impulse"], [0]) == (0, [("impulse", 0)])
    assert "default: another process trains it\n" in capsys.readouterr().out


def test_a_setting_that_cannot_be_trained_is_refused_before_the_first_run(start, tiny_config):
    config = tiny_config.copy_and_resolve_references()
    config.model.num_heads = 3
    with pytest.raises(InputError, match=r"setting default: .*config\.model\.num_heads=3"):
        start(["default"], config=config)


def test_the_command_writes_into_a_pipe_stops_and_resumes(tmp_path, data_dir):
    arguments = [
        *("--config=configs/vit_t_digits.py", "--config.model.width=16", "--config.model.depth=1"),
        *("--config.model.patch_size=2", "--config.num_steps=400", "--config.eval_every_epochs=5"),
        *("--schemes=default", "--grid=model.num_heads=1,2", "--seeds=1"),
        *(f"--config.data.data_dir={data_dir}", f"--workdir={tmp_path}"),
    ]
    module = "structinit_jax.compare"
    command = [sys.executable, "-m", module, *arguments]
    environment = os.environ | fork_main.ENVIRONMENT
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    name = "[1/2] default,model.num_heads=1 seed 0"
    lines = (process.stdout.readline() for _ in itertools.count())  # while the command runs
    lines = list(itertools.islice((line for line in lines if line[:5] != "note:"), 2))
    assert lines[0] == f"{name}: started\n"
    assert lines[1].startswith(f"{name}: step 112, epoch 5.0, test accuracy ")
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == train.PREEMPTED_EXIT_CODE
    process.stdout.close()
    assert "runs have not finished" in (tmp_path / "report.md").read_text()

    result = fork_main.run(*arguments, module=module)
    assert result.returncode == 0, result.stderr
    assert any("resumed from step" in log.read_text() for log in tmp_path.glob("*/*/log.txt"))
    text = (tmp_path / "report.md").read_text()
    assert "| default,model.num_heads=2 | 1 of 1 |" in text
    # The report can be repeated from the files alone.
    (tmp_path / "report.md").unlink()
    report.write_report(tmp_path)
    assert (tmp_path / "report.md").read_text() == text
