"""Comparisons over seeds: runs and resuming."""

import csv
import errno
import functools
import json
import re
import signal
import threading
import time
import types
from importlib import metadata

import jax
import numpy as np
import pytest
from PIL import Image

import structinit_jax
from structinit_jax import evaluate, train
from structinit_jax.compare import grid, results, run, seeds, table
from structinit_jax.data import datasets
from structinit_jax.errors import InputError, StoppedError
from structinit_jax.training import manifest
from structinit_jax.training import workdir as workdir_lib

pytestmark = pytest.mark.usefixtures("library_promotion")


# -- runs, with a training loop that only writes metrics -------------------------------------------

ACCURACIES = {"default": (0.1, 0.5), "impulse": (0.6, 0.8), "mimetic": (0.3, 0.4)}


def fake_train(config, workdir, trained, stop_request=None):
    """Writes accuracies of two epochs; the training of mimetic with seed 1 fails."""
    scheme, seed = config.attention_init.name, config.seed
    trained.append((scheme, seed))
    print("some output of the training")
    workdir.mkdir(parents=True, exist_ok=True)
    first, last = (value + 0.02 * seed for value in ACCURACIES[scheme])
    lines = [
        {"step": 0, "init/seconds": 0.25, "init/compile_seconds": 2.0},
        {"step": 6, "train/loss": 2.0, "train/accuracy": 0.5, "images_per_second": 96.0},
        {"step": 6, "test[:90]/accuracy": first},
        {"step": 12, "train/loss": 1.0, "train/accuracy": 0.9, "images_per_second": 192.0},
        {"step": 12, "test[:90]/accuracy": last, "train_eval/accuracy": 0.95},
    ]
    failed = (scheme, seed) == ("mimetic", 1)
    with (workdir / "metrics.jsonl").open("w") as file:
        for line in lines[:3] if failed else lines:
            file.write(json.dumps(line) + "\n")
    if failed:
        raise RuntimeError("out of memory | while training\nand more")


@pytest.fixture
def start(tiny_config, tmp_path, monkeypatch):
    """Starts a comparison; returns how many runs failed, and which were trained.

    `start.drawn` has the settings whose maps were to be drawn.
    """
    tiny_config.lock()
    drawn = []

    def run_grid(schemes, seed_list=(0, 1, 2), config=tiny_config, train=fake_train, **options):
        trained = []
        monkeypatch.setattr(run, "train", functools.partial(train, trained=trained))
        monkeypatch.setattr(run._Runner, "_draw_maps", lambda self, name: drawn.append(name))
        settings = grid.expand(config, schemes, {})
        options = dict(started_by="the command") | options
        return run.run_grid(settings, list(seed_list), tmp_path, **options), trained

    run_grid.drawn = drawn
    return run_grid


def no_metadata_of_its_own(version):
    def find(name):
        if name == "structinit-jax":
            raise metadata.PackageNotFoundError(name)
        return version(name)

    return find


def test_a_failed_run_is_reported_and_the_others_go_on(start, tmp_path, capsys):
    failed, trained = start(["default", "mimetic", "impulse"])
    assert failed == 1
    assert len(trained) == 9
    out = capsys.readouterr().out
    assert "mimetic seed 1  failed: RuntimeError: out of memory" in out
    assert "mimetic seed 0  test[:90] accuracy 40.00 %" in out
    assert "some output" not in out
    log = (tmp_path / "mimetic" / "seed_1" / "log.txt").read_text()
    assert "some output" in log
    assert "Traceback" in log
    text = (tmp_path / "report.md").read_text()
    assert r"| mimetic | 1 | RuntimeError: out of memory \| while training |" in text
    # Fewer seeds of mimetic are paired with the baseline: 0 and 2.
    row = "| mimetic | 2 of 3 | 42.00 ± 2.83 | -10.00 [-10.00, -10.00] (2 common seeds) |"
    assert row in text


def test_the_report_has_all_that_was_measured(start, tmp_path, monkeypatch):
    # Of a checkout on the path, which is not installed.
    monkeypatch.setattr(run.metadata, "version", no_metadata_of_its_own(run.metadata.version))
    start(["default", "impulse"])
    text = (tmp_path / "report.md").read_text()
    # default ends at 0.52 on average, which impulse reaches after the first epoch. Six batches of
    # 64 images take 4 s at 96 images/s and 2 s at 192.
    row = "| default | 3 of 3 | 52.00 ± 2.00 | baseline | 2.0 (2 of 3 runs) | 6.0 | 0.25 (2.0) |"
    assert row in text
    assert "| impulse | 3 of 3 | 82.00 ± 2.00 | +30.00 [+30.00, +30.00] | 1.0 | 6.0 |" in text
    assert "the command" in text
    assert f"structinit-jax {structinit_jax.__version__}, jax {jax.__version__}, " in text
    rows = list(csv.DictReader((tmp_path / "results.csv").read_text().splitlines()))
    assert [(r["setting"], r["seed"], r["status"]) for r in rows[:2]] == [
        ("default", "0", "done"),
        ("default", "1", "done"),
    ]
    assert float(rows[1]["test_accuracy"]) == pytest.approx(0.52)
    with Image.open(tmp_path / "curves.png") as curves:
        assert curves.size[0] == 1050
    page = (tmp_path / "report.html").read_text()
    assert "82.00 ± 2.00" in page
    assert page.count("data:image/svg+xml;base64,") == 1
    assert not re.search(r'(src|href)="(?!data:)', page)  # opens without a network
    assert "<script" not in page


def test_a_second_command_trains_only_what_is_missing(start, tiny_config, tmp_path):
    start(["default", "mimetic"])
    start.drawn.clear()
    _, trained = start(["default", "mimetic"])
    assert trained == [("mimetic", 1)]  # which had failed
    assert start.drawn == ["default", "mimetic"]  # maps that a kill left out
    assert start(["mimetic"], seed_list=[0])[0] == 0
    failed, trained = start(["default", "impulse"], seed_list=range(4))
    assert failed == 0  # that of mimetic is none of this command
    assert trained == [("default", 3), *(("impulse", seed) for seed in range(4))]
    text = (tmp_path / "report.md").read_text()
    assert "| default | 4 of 4 |" in text
    assert "| mimetic | 2 of 3 |" in text  # no command has asked for seed 3
    changed = tiny_config.copy_and_resolve_references()
    changed.num_epochs = 3.0
    with pytest.raises(InputError, match=r"holds the setting default .*\n  num_epochs: 2.0 -> 3.0"):
        start(["default"], config=changed)


def test_a_second_command_may_change_what_does_not_change_results(start, tiny_config, tmp_path):
    start(["default"], [0])
    (tmp_path / "moved").symlink_to(tiny_config.data.data_dir)
    changed = tiny_config.copy_and_resolve_references()
    changed.update(keep_checkpoints=5, checkpoint_every_steps=7)
    changed.data.data_dir = str(tmp_path / "moved")
    assert start(["default"], [0], config=changed) == (0, [])
    # The images of a folder, and maybe of a data set of the user's own, are others in another one.
    for name, may in {"digits": True, "folder": False, "mine:halves": False}.items():
        changed.data.name = name
        assert run._may_change("data.data_dir", changed) == may
    assert not run._may_change("learning_rate", changed)


def test_a_second_command_keeps_the_baseline(start, tmp_path):
    start(["default", "impulse"], seed_list=[0])
    start(["impulse"], seed_list=[0])
    start(["mimetic"], seed_list=[0])

    def read_baselines():
        rows = csv.DictReader((tmp_path / "results.csv").read_text().splitlines())
        return {row["setting"]: row["baseline"] for row in rows}

    assert read_baselines() == dict.fromkeys(["default", "impulse", "mimetic"], "default")
    text = (tmp_path / "report.md").read_text()
    assert "| impulse | 1 of 1 | 80.00 | +30.00 (one seed) |" in text
    assert "| mimetic | 1 of 1 | 40.00 | -10.00 (one seed) |" in text
    start(["mimetic"], seed_list=[0], baseline="impulse")  # of an earlier command
    assert read_baselines() == dict.fromkeys(["default", "impulse", "mimetic"], "impulse")
    with pytest.raises(InputError, match=r"--baseline=x is not .*: default, impulse, mimetic\. "):
        start(["mimetic"], seed_list=[0], baseline="x")


def test_a_baseline_that_is_not_trained_gives_no_difference(start, tmp_path):
    start(["impulse", "mimetic"], [0], baselines={"impulse": "default", "mimetic": "other"})
    text = (tmp_path / "report.md").read_text()
    assert "| impulse | 1 of 1 | 80.00 | – | – |" in text


def test_the_table_shows_the_seeds_of_the_command(start, capsys):
    start(["impulse"], seed_list=[0, 1])
    assert "81.00 ± 1.41" in capsys.readouterr().out
    start(["impulse"], seed_list=[1])
    out = capsys.readouterr().out
    assert "1/1" in out
    assert "82.00" in out
    assert "±" not in out


def test_the_time_left_is_that_of_steps_not_taken_before(start, tmp_path, monkeypatch):
    start(["default"], seed_list=[0])
    folder = tmp_path / "default" / "seed_0"
    (folder / "status.json").unlink()
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[:3]))  # stopped at step 6 of 12
    clock = types.SimpleNamespace(perf_counter=lambda: 100.0)
    monkeypatch.setattr(table, "time", clock)
    progress = table.Progress(results.read(tmp_path), ["default"], [0])
    progress.start("default", [0])
    metrics.write_text("".join(lines[:3]) + '{"step": 9}\n')
    clock.perf_counter = lambda: 103.0
    assert progress._time_left() == "0:03 elapsed, 0:03 left"


def test_a_signal_during_the_last_step_of_a_run_stops_the_others(start, tmp_path):
    def interrupted(config, workdir, stop_request, trained):
        with workdir_lib.listen_for_signals(stop_request):
            fake_train(config, workdir, trained)
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(StoppedError, match="run the same command again") as error:
        start(["default"], train=interrupted)
    assert error.value.exit_code == train.PREEMPTED_EXIT_CODE
    assert results.read(tmp_path).accuracies("default").keys() == {0}


def test_a_full_disk_is_explained(start, tmp_path, monkeypatch):
    def write(path, content):
        if path.name != "compare.json":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write_atomically(path, content)

    write_atomically = workdir_lib.write_atomically
    monkeypatch.setattr(workdir_lib, "write_atomically", write)
    with pytest.raises(InputError, match=r"comparison could not be written to .*: No space left"):
        start(["default"], [0])


def test_a_setting_that_cannot_be_trained_is_refused_before_the_first_run(start, tiny_config):
    config = tiny_config.copy_and_resolve_references()
    config.model.num_heads = 3
    with pytest.raises(InputError, match=r"setting default: .*config\.model\.num_heads=3"):
        start(["default"], config=config)
    swin = grid.command_line.load_config("configs/swin_digits.py")  # has no config.model.positions
    swin.data.data_dir = tiny_config.data.data_dir
    with pytest.raises(InputError, match=r"setting impulse_2025: .* does not support a WindowSite"):
        start(["impulse_2025"], config=swin.lock())


def test_an_error_of_the_users_own_code_names_the_setting(start, monkeypatch):
    def set_up(*_):
        raise TypeError("dot_general requires contracting dimensions")

    monkeypatch.setattr(run, "set_up", set_up)
    with pytest.raises(TypeError, match="dot_general") as caught:
        start(["default"])
    assert caught.value.__notes__ == ["This is the setting default of the comparison"]


def share_checkpoint(folder, group):
    """Makes the folder of a complete checkpoint that seeds share."""
    step = folder / "together" / group / "6"
    step.mkdir(parents=True)
    manifest.seal(step)


def test_checkpoints_of_another_kind_of_training_are_told_or_refused(start, tmp_path, capsys):
    start(["default"], [0])
    share_checkpoint(tmp_path / "default", "seeds_1_2")
    start(["default"], [0])
    assert "note:" not in capsys.readouterr().out  # its seed is done
    start(["default"], [0, 1])
    out = capsys.readouterr().out
    assert "note: default: the checkpoint that its seeds share is not used" in out
    (tmp_path / "impulse" / "seed_1" / "checkpoints").mkdir(parents=True)
    todo = {"default": [], "impulse": [0, 1]}
    with pytest.raises(InputError, match="impulse: seeds 1 were started one by one: pass"):
        run._check_what_is_resumed(tmp_path, todo, together=True)
    share_checkpoint(tmp_path / "impulse", "seeds_0_1")
    run._check_what_is_resumed(tmp_path, todo, together=True)


def test_a_folder_without_a_complete_checkpoint_is_no_shared_one(start, tmp_path, capsys):
    # Of commands that were killed before their first checkpoint, or while they wrote it.
    shared = tmp_path / "default" / "together"
    (shared / "seeds_0_1").mkdir(parents=True)
    (shared / "seeds_2_3" / "6").mkdir(parents=True)
    own = tmp_path / "default" / "seed_0" / "checkpoints" / "4"
    own.mkdir(parents=True)
    with pytest.raises(InputError, match="default: seeds 0 were started one by one: pass"):
        start(["default"], [0, 1], together=True)
    assert own.exists()
    assert start(["default"], [0, 1], together=False) == (0, [("default", 0), ("default", 1)])
    out = capsys.readouterr().out
    assert f"note: {shared / 'seeds_0_1'} has no complete checkpoint and is removed" in out
    assert "is not used" not in out
    assert not shared.exists()


def test_some_of_the_seeds_that_share_a_checkpoint_are_refused(start, tmp_path):
    start(["default"], [0])
    share_checkpoint(tmp_path / "default", "seeds_0_1_2")
    with pytest.raises(InputError, match=r"default: seeds 0,1,2 share .* name the seeds 2 too"):
        start(["default"], [1], together=True)
    run._check_what_is_resumed(tmp_path, {"default": [1, 2]}, together=True)
    run._check_what_is_resumed(tmp_path, {"default": [3]}, together=True)


def test_the_config_and_the_data_of_all_settings_are_checked_as_they_are_trained(
    tiny_config, tmp_path, monkeypatch
):
    monkeypatch.setattr(run, "train", functools.partial(fake_train, trained=[]))
    monkeypatch.setattr(run._Runner, "_draw_maps", lambda self, name: None)
    tiny_config.fsdp = 2
    settings = grid.expand(tiny_config.lock(), ["default", "impulse"], {})
    with pytest.raises(InputError, match=r"setting default: config\.fsdp=2.*--together=no"):
        run.run_grid(settings, [0], tmp_path, together=True)

    # Without its bad images, which are left out once for all settings, the run has six steps.
    opened = []
    skip = datasets._skip_bad_images

    def skip_half(source, what):
        opened.append(what)
        source, what = skip(source, what), what.split("=")[0]
        return source.select(np.arange(len(source)) % 2 == 0) if "train" in what else source

    monkeypatch.setattr(datasets, "_skip_bad_images", skip_half)
    tiny_config.data.on_bad_image = "skip"
    settings = grid.expand(tiny_config.lock(), ["default", "impulse"], {})
    assert run.run_grid(settings, [0], tmp_path) == 0
    assert results.read(tmp_path).info["settings"]["impulse"]["num_steps"] == 6
    assert len(opened) == 2


def test_maps_that_cannot_be_drawn_do_not_end_the_comparison(
    start, tiny_config, tmp_path, monkeypatch
):
    draw_maps = run._Runner._draw_maps
    start(["default"], [0])
    monkeypatch.setattr(run._Runner, "_draw_maps", draw_maps)
    # The fake training has left no checkpoint; a model without attention fails like the second.
    settings = grid.expand(tiny_config, ["default"], {})
    progress = run.Progress(results.read(tmp_path), ["default"], [0])
    runner = run._Runner(tmp_path, settings, progress)
    with run._output_to(tmp_path / "log.txt"):
        runner._draw_maps("default")
        monkeypatch.setattr(evaluate, "restore_model", lambda *_: next(iter(())))
        runner._draw_maps("default")
    text = (tmp_path / "log.txt").read_text()
    assert "no maps of default: --workdir=" in text
    assert "StopIteration\nnote: no maps of default, see above" in text


# -- seeds together --------------------------------------------------------------------------------


def test_settings_are_spread_over_the_devices(tiny_config, tmp_path, monkeypatch):
    devices, drawn, ended = [], [], []
    first_drawn = threading.Event()

    def fake_train_together(config, seed_list, folder, device, stop):
        devices.append(device)
        for seed in seed_list:
            fake_train(seeds.with_seed(config, seed), folder / f"seed_{seed}", [])
        while len(devices) < 2:  # the other setting trains at the same time
            time.sleep(0.01)
        yield 0, ""
        if folder.name == "impulse":  # the maps of the other, which has ended, are drawn now
            ended.append(first_drawn.wait(20))
        raise InputError("it does not fit")

    monkeypatch.setattr(seeds, "train_together", fake_train_together)

    def draw(self, name):
        drawn.append(name)
        first_drawn.set()

    monkeypatch.setattr(run._Runner, "_draw_maps", draw)
    settings = grid.expand(tiny_config.lock(), ["default", "impulse"], {})
    assert run.run_grid(settings, [0, 1], tmp_path, together=True) == 2
    assert len(set(devices)) == 2
    assert ended == [True]
    assert drawn == ["default", "impulse"]
    text = (tmp_path / "report.md").read_text()
    assert "| default | 1 | it does not fit |" in text
    assert "| default | 1 of 2 |" in text  # seed 0 had been done before
    assert run.run_grid(settings, [0], tmp_path, together=True) == 0
    assert len(drawn) == 4
