import contextlib
import csv
import functools
import itertools
import json
import signal
import threading
import types

import fork_main
import pytest

from structinit_jax.compare import grid, report, settings
from structinit_jax.errors import FullDiskError, InputError, NotFiniteError, PreemptedError
from structinit_jax.training import train
from structinit_jax.training.workdir import COMPARISON, lock_workdir

pytestmark = pytest.mark.usefixtures("library_promotion")
MODULE = "structinit_jax.compare"
ACCURACIES = {"default": (0.1, 0.5), "impulse": (0.6, 0.8), "mimetic": (0.3, 0.4)}


def fake_train(config, workdir, trained, stop_request=None, on_evaluation=None):
    """Writes accuracies of two epochs; mimetic with seed 1 fails."""
    scheme = config.attention_init.name
    trained.append((scheme, config.seed))
    print("some output of the training")
    (workdir / "config.json").write_text(config.to_json())
    first, last = (value + 0.02 * config.seed for value in ACCURACIES[scheme])
    lines = [
        {"step": 6, "train/loss": 1.0},
        {"step": 6, "eval/accuracy": first},
        {"step": 12, "eval/accuracy": last},
    ]
    failed = trained[-1] == ("mimetic", 1)
    with (workdir / "metrics.jsonl").open("w") as file:
        for line in lines[:2] if failed else lines:
            file.write(json.dumps(line) + "\n")
    on_evaluation(6, {"eval/accuracy": first})
    if failed:
        raise NotFiniteError("not finite | while training\nand more")


@pytest.fixture
def start(tiny_config, tmp_path, monkeypatch):
    """Starts a comparison; returns how many runs failed, and which were trained."""
    tiny_config.lock()
    # Tracing and drawing would take most of a comparison's time here.
    monkeypatch.setattr(report, "png", lambda figure: b"")
    untraced = dict(make_model=lambda *_: None, make_optimizer=lambda *_: None)
    monkeypatch.setattr(grid, "build", types.SimpleNamespace(**vars(grid.build) | untraced))
    for name in ("make_initializer", "make_train_step"):
        monkeypatch.setattr(grid, name, lambda *_: None)

    def run_grid(schemes, seeds=range(3), config=tiny_config, train=fake_train, axes=(), rows=None):
        trained = []
        monkeypatch.setattr(grid, "train", functools.partial(train, trained=trained))
        configs = settings.expand(config, schemes, dict(axes))
        return grid.run_grid(configs, list(seeds), tmp_path, rows), trained

    return run_grid


def test_a_failed_run_is_reported_and_the_others_go_on(start, tmp_path, capsys):
    failed, trained = start(["default", "mimetic", "impulse"])
    assert (failed, len(trained)) == (1, 9)
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("[1/9] default seed 0: test[:90] accuracy 50.00%") for line in lines)
    failure = "failed: NotFiniteError: not finite | while training"
    assert any(line.startswith(f"[5/9] mimetic seed 1: {failure}") for line in lines)
    log = (tmp_path / "mimetic" / "seed_1" / "log.txt").read_text()
    assert log.startswith("some output of the training\nTraceback")
    assert not any("some output" in line for line in lines)
    text = (tmp_path / "report.md").read_text()
    assert r"| mimetic | 1 | NotFiniteError: not finite \| while training |" in text
    # Only seeds 0 and 2 of mimetic are paired with the baseline.
    row = "| mimetic | 2 of 3 | 42.00 ± 2.83 | -10.00 [-10.00, -10.00] (2 common seeds) |"
    assert row in text
    assert "| default | 3 of 3 | 52.00 ± 2.00 | baseline |" in text
    assert "| impulse | 3 of 3 | 82.00 ± 2.00 | +30.00 [+30.00, +30.00] |" in text


def test_a_second_command_trains_only_what_is_missing(start, tiny_config, tmp_path, capsys):
    start(["default", "mimetic"])
    _, trained = start(["default", "mimetic"])
    assert trained == [("mimetic", 1)]  # it had failed
    assert "[1/6] default seed 0: already done, test[:90] acc" in capsys.readouterr().out
    failed, trained = start(["default", "impulse"], seeds=range(4))
    assert failed == 0  # the failed run of mimetic is not part of this command
    assert trained == [("default", 3), *(("impulse", seed) for seed in range(4))]
    text = (tmp_path / "report.md").read_text()
    assert "| default | 4 of 4 |" in text
    assert "| mimetic | 2 of 3 |" in text  # no command has asked for seed 3
    changed = tiny_config.copy_and_resolve_references()
    changed.num_epochs = 3.0
    with pytest.raises(InputError, match=r"num_epochs: 2.0 -> 3.0\n"):
        start(["default"], config=changed)
    # These do not change the results.
    changed.update(num_epochs=2.0, keep_checkpoints=5, seed=7, data=dict(data_dir="/moved"))
    assert start(["default"], [0], config=changed) == (0, [])
    assert "| default | 4 of 4 |" in (tmp_path / "report.md").read_text()
    # The baseline of a setting has the same images, wherever they are.
    changed = tiny_config.copy_and_resolve_references()
    changed.data.data_dir = "/moved"
    start(["impulse"], [0], config=changed, axes={"attention_init.kernel_size": ["5"]})
    row = "| impulse,attention_init.kernel_size=5 | 1 of 1 | 80.00 | +30.00 (one seed) |"
    assert row in (tmp_path / "report.md").read_text()


def test_seeds_are_not_added_after_a_default_has_changed(start, tmp_path):
    start(["mimetic"], [0])
    info = json.loads((tmp_path / COMPARISON).read_text())
    info["settings"]["mimetic"]["fields"]["attention_init"]["value_scale"] = 0.5
    (tmp_path / COMPARISON).write_text(json.dumps(info))
    with pytest.raises(InputError, match=r"attention_init\.value_scale: 0.5 -> 1.0\n"):
        start(["mimetic"], [1])


def test_settings_keep_the_baseline_of_their_last_command(start, tmp_path):
    def baselines():
        rows = csv.DictReader((tmp_path / "results.csv").read_text().splitlines())
        return {row["setting"]: row["baseline"] for row in rows}

    start(["default", "impulse"], [0])
    assert baselines() == dict(default="default", impulse="default")
    start(["mimetic", "impulse"], [0])
    expected = dict(default="default", impulse="mimetic", mimetic="mimetic")
    assert baselines() == expected
    start(["impulse"], [0])  # A command with one scheme changes no baseline.
    assert baselines() == expected
    start(["impulse"], [0], axes={"model.depth": ["4"]})
    assert baselines() == expected | {"impulse,model.depth=4": ""}
    start(["default"], [0], axes={"model.depth": ["4"]})  # unless a setting had none
    deep = {f"{scheme},model.depth=4": "default,model.depth=4" for scheme in ("impulse", "default")}
    assert baselines() == expected | deep
    info = json.loads((tmp_path / COMPARISON).read_text())
    (tmp_path / COMPARISON).write_text(json.dumps(info | {"machine": "1 × TPU"}))
    row = dict(baseline="other", published="50.10", note="a note of the row")
    start(["impulse"], [0], rows={"impulse": row})  # its baseline is not trained
    text = (tmp_path / "report.md").read_text()
    assert "| impulse | 1 of 1 | 80.00 | 50.10 | – |" in text
    assert "\nimpulse: a note of the row\n" in text
    assert "\n1 × TPU\n\n" in text
    assert all(f" {name} " in text for name in ("jax", "flax", "optax", "structinit-jax"))


def test_lost_metrics_make_a_run_fail(start, tmp_path, capsys):
    start(["default"], [0, 1])
    metrics = [tmp_path / "default" / f"seed_{seed}" / "metrics.jsonl" for seed in range(2)]
    metrics[0].unlink()
    metrics[1].write_bytes(metrics[1].read_bytes()[:-5])  # the last line is cut
    report.write_report(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "| default | 0 of 2 | – |" in text
    assert "| default | 1 | metrics.jsonl has no result: " in text
    # A run with all its checkpoints does not train again and writes no metrics.
    assert start(["default"], [0], train=lambda *run, **options: None)[0] == 1
    assert "failed: metrics.jsonl has no result" in capsys.readouterr().out
    assert start(["default"], [0, 1])[1] == [("default", 0), ("default", 1)]


def test_a_damaged_or_lost_record_is_named(start, tmp_path):
    start(["default"], [0])
    (tmp_path / COMPARISON).write_text("{")
    with pytest.raises(InputError, match=r"compare\.json"):
        start(["default"], [0])
    (tmp_path / COMPARISON).unlink()
    with pytest.raises(InputError, match=r"default holds runs that compare\.json does not list"):
        start(["default"], [0])
    (tmp_path / "config.json").touch()
    with pytest.raises(InputError, match=r"^workdir=.* not that of a run"):
        start(["default"], [0])


def test_other_images_of_the_same_names_are_refused(start, tiny_config, monkeypatch):
    def digest_of(train="12", test="12"):  # for the two settings
        digests = {384: itertools.cycle(train), 90: itertools.cycle(test)}
        monkeypatch.setattr(grid, "digest", lambda source, class_names: next(digests[len(source)]))

    digest_of()
    axes = {"data.data_dir": ["/here", "/there"]}  # may hold folders with the same name
    assert len(start(["default"], [0], axes=axes)[1]) == 2
    assert len(start(["default", "impulse"], [0], axes=axes)[1]) == 2
    for split in ("train", "test"):
        digest_of(**{split: "3"})
        for scheme in ("default", "mimetic"):
            with pytest.raises(InputError, match=rf"classes of digits {split}\["):
                start([scheme], [1], axes=axes)
    digest_of("21", "21")  # as if the folders were swapped
    with pytest.raises(InputError, match="classes of digits"):
        start(["default"], [1], axes=axes)
    digest_of("4", "4")
    assert len(start(["default"], [0], axes={"data.data_dir": ["/third"]})[1]) == 1
    moved = tiny_config.copy_and_resolve_references()
    moved.data.data_dir = "/fourth"
    digest_of("5", "5")
    with pytest.raises(InputError, match="classes of digits"):
        start(["mimetic"], [0], config=moved)


def test_other_weights_of_the_same_name_are_refused(start, tiny_config, tmp_path):
    teacher = tmp_path.with_suffix(".safetensors")
    config = tiny_config.copy_and_resolve_references()
    config.start_from = str(teacher)
    teacher.write_bytes(b"first")
    for seed in range(2):
        assert start(["default"], [seed], config=config)[1] == [("default", seed)]
    teacher.write_bytes(b"second")
    with pytest.raises(InputError, match=rf"classes of start_from {teacher}: restore"):
        start(["default"], [2], config=config)


def test_a_run_that_was_killed_before_its_last_checkpoint_is_not_done(start, tmp_path):
    def killed(*run, **options):
        fake_train(*run, **options)  # logs the accuracy of the last step
        raise SystemExit

    with pytest.raises(SystemExit):
        start(["default"], [0], train=killed)
    text = (tmp_path / "report.md").read_text()
    assert "| default | 0 of 1 | – |" in text
    assert "Failed runs" not in text
    assert start(["default"], [0]) == (0, [("default", 0)])
    assert start(["default"], [0]) == (0, [])


def test_a_signal_during_the_last_step_of_a_run_stops_the_others(start, tmp_path):
    def interrupted(config, workdir, stop_request, **options):
        with stop_request:
            fake_train(config, workdir, **options)
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(PreemptedError):
        start(["default"], train=interrupted)
    assert "| default | 1 of 3 |" in (tmp_path / "report.md").read_text()


def test_a_full_disk_stops_all_runs(start):
    def fail(*run, **options):
        raise FullDiskError("no space left")

    with pytest.raises(FullDiskError, match="no space"):
        start(["default", "mimetic"], train=fail)


def test_a_second_process_trains_other_settings(start, tmp_path, capsys):
    start(["default"], [0])
    (tmp_path / "default" / "seed_0" / "metrics.jsonl").unlink()
    with lock_workdir(tmp_path / "default"):  # as the first process does
        assert start(["default", "impulse"], [0]) == (0, [("impulse", 0)])
    assert "default: another process is training this setting\n" in capsys.readouterr().out


def test_a_setting_is_locked_between_its_runs_too(start, tmp_path, monkeypatch):
    def format_duration(seconds):  # the time left, printed after a run
        with pytest.raises(InputError), lock_workdir(tmp_path / "default"):
            pass
        return "an hour"

    monkeypatch.setattr(grid, "format_duration", format_duration)
    assert start(["default"], [0, 1]) == (0, [("default", 0), ("default", 1)])
    # Another process writes compare.json.
    locked = contextlib.ExitStack()
    locked.enter_context(lock_workdir(tmp_path))
    threading.Timer(0.2, locked.close).start()
    assert start(["default"], [0]) == (0, [])
    monkeypatch.setattr(grid, "PATIENCE", 0.1)
    with lock_workdir(tmp_path), pytest.raises(InputError):
        start(["default"], [0])


def test_a_comparison_stops_and_resumes(start, tmp_path):
    def stopped(config, workdir, trained, stop_request, on_evaluation):
        def hook(step, results):
            on_evaluation(step, results)
            signal.raise_signal(signal.SIGINT)

        return train.train(config, workdir, stop_request=stop_request, on_evaluation=hook)

    def resumed(config, workdir, trained, **options):
        return train.train(config, workdir, **options)

    with pytest.raises(PreemptedError):
        start(["default"], [0], train=stopped)
    assert "| default | 0 of 1 |" in (tmp_path / "report.md").read_text()

    assert start(["default"], [0], train=resumed)[0] == 0
    assert "resumed from step 7" in (tmp_path / "default" / "seed_0" / "log.txt").read_text()
    text = (tmp_path / "report.md").read_text()
    assert "| default | 1 of 1 |" in text
    # The report can be regenerated from the files alone.
    (tmp_path / "report.md").unlink()
    report.write_report(tmp_path)
    assert (tmp_path / "report.md").read_text() == text


def test_the_command_trains_a_row_of_a_table(tmp_path):
    small = {
        "data": dict(name="digits", eval_split="test", image_size=8, channels=1, mean=0.3, std=0.4),
        "model": dict(num_classes=10, patch_size=2, width=16, depth=1, num_heads=2),
        "augment": dict(crop="none", rand_augment="", erasing=0.0, mixup=0.0, cutmix=0.0),
    }
    arguments = [
        *("--table=2024.2", f"--workdir={tmp_path}", "--config.model.dtype=float32"),
        *("--config.num_steps=2", "--config.batch_size=64", "--config.seed=3"),
        *(f"--config.{part}.{k}={v}" for part in small for k, v in small[part].items()),
    ]
    rows = "--rows=cifar10,truncated_normal"  # cifar100 has such a row too
    fork_main.run(*arguments, rows, module=MODULE)
    text = (tmp_path / "report.md").read_text()
    (row,) = [line for line in text.splitlines() if "| 1 of 1 |" in line]
    assert row.startswith("| cifar10,truncated_normal |")
    assert (tmp_path / "cifar10,truncated_normal" / "seed_3").exists()
    assert "| 88.63 |" in row
    assert "cifar10,truncated_normal: Table 1 has 85.30" in text
    other = tmp_path / "cifar10,truncated_normal" / "seed_4"
    other.mkdir()
    with lock_workdir(other):  # so that its run fails
        result = fork_main.run(*arguments, rows, "--seeds=2", module=MODULE, exit_code=1)
    assert "1 of 2 runs failed: see the report" in result.stderr
    assert "--schemes" in fork_main.error_of(*arguments, "--schemes=default", module=MODULE)
