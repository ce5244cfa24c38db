"""Grids of settings over seeds: names, runs, resume, statistics and reports."""

import csv
import functools
import json
import re
import shutil
import signal
import time
import types
from importlib import metadata

import fork_main
import jax
import numpy as np
import pytest
from PIL import Image
from scipy import stats

import structinit_jax
from structinit_jax import evaluate, train
from structinit_jax.compare import grid, report, results, run, seeds, table
from structinit_jax.data import datasets
from structinit_jax.errors import InputError, StoppedError
from structinit_jax.training.workdir import StopRequest

pytestmark = pytest.mark.usefixtures("library_promotion")


# -- settings --------------------------------------------------------------------------------------


def test_settings_have_readable_names_and_what_their_scheme_needs(tiny_config, capsys):
    axes = grid.parse_axes(["config.model.depth=1,2", "config.attention_init.norm=0.5"])
    schemes = ["default", "kaiming_uniform", "impulse_2025", "impulse"]
    settings = grid.expand(tiny_config.lock(), schemes, axes)
    assert list(settings) == [
        *("default,model.depth=1", "default,model.depth=2"),
        *("kaiming_uniform,model.depth=1", "kaiming_uniform,model.depth=2"),
        *("impulse_2025,model.depth=1", "impulse_2025,model.depth=2"),
        *(f"impulse,model.depth={depth},attention_init.norm=0.5" for depth in (1, 2)),
    ]
    assert settings["default,model.depth=2"].model.depth == 2
    assert settings["kaiming_uniform,model.depth=1"].model.base_init == "pytorch"
    assert settings["impulse_2025,model.depth=1"].model.positions == "learned"
    assert settings["impulse,model.depth=1,attention_init.norm=0.5"].attention_init.norm == 0.5
    assert tiny_config.model.positions == "sincos"
    assert (
        "impulse_2025 is trained with config.model.positions='learned'" in capsys.readouterr().out
    )
    baselines = grid.find_baselines(settings, "default")
    assert baselines["impulse,model.depth=2,attention_init.norm=0.5"] == "default,model.depth=2"
    assert baselines["default,model.depth=1"] == "default,model.depth=1"
    # An option that the others do not have does not hide the baseline.
    baselines = grid.find_baselines(settings, "impulse")
    assert baselines["default,model.depth=2"] == "impulse,model.depth=2,attention_init.norm=0.5"


def test_a_setting_is_never_compared_with_one_of_other_fields():
    names = ["default", "default,model.depth=1", "mine_scheme,model.depth=1", "x,model.depth=2"]
    assert grid.find_baselines(names, "mine:scheme") == {
        "default": None,
        "default,model.depth=1": "mine_scheme,model.depth=1",
        "mine_scheme,model.depth=1": "mine_scheme,model.depth=1",
        "x,model.depth=2": None,
    }
    names = [f"impulse{option}" for option in (",attention_init.norm=1", "")]
    assert grid.find_baselines(names, "impulse") == dict(zip(names, names, strict=True))


@pytest.mark.parametrize(
    ("axis", "message"),
    [
        ("config.model.dpth=1", r"config\.model\.dpth: .*did you mean 'depth'"),
        ("config.model.depth=x", r"config\.model\.depth=x must be a whole number"),
        ("config.model.depth=1,1", r"impulse,model\.depth=1 appears twice"),
        ("config.seed=1,2", r"use --seeds=N"),
        ("config.attention_init.name=default", r"use --schemes"),
        ("model.depth=1", r"must name a field and its values"),
    ],
)
def test_mistaken_axes_are_refused(tiny_config, axis, message):
    with pytest.raises(InputError, match=message):
        grid.expand(tiny_config.lock(), ["impulse"], grid.parse_axes([axis]))


def test_values_may_have_brackets_and_names_are_safe_for_files(tiny_config):
    axes = grid.parse_axes(["config.data.mean=(0.1,),(0.2,)", "config.data.train_split=train[:64]"])
    assert axes["data.mean"] == ["(0.1,)", "(0.2,)"]
    nested = grid.parse_axes(["config.attention_init={'filters': ((1, 2), 3)},{'norm': 1}"])
    assert nested["attention_init"] == ["{'filters': ((1, 2), 3)}", "{'norm': 1}"]
    names = list(grid.expand(tiny_config.lock(), ["default"], axes))
    assert names[0] == "default,data.mean=_0.1__,data.train_split=train__64_"


def test_the_command_of_a_setting_gives_its_config(tmp_path):
    location = "configs/vit_t_digits.py"
    config = grid.command_line.load_config(location).lock()
    axes = {"model.num_heads": ["2"], "attention_init.norm": ["0.5"]}
    (setting,) = grid.expand(config, ["impulse"], axes).values()
    words = grid.command(setting, location)
    again = grid.command_line.load_config(location)
    for word in words[4:]:
        grid.command_line.override(again, *word.removeprefix("--config.").split("=", 1))
    assert again.to_dict() == setting.to_dict()


# -- statistics ------------------------------------------------------------------------------------


def test_intervals_are_those_of_scipy():
    rng = np.random.default_rng(0)
    values, others = rng.normal(size=(2, 5)).tolist()
    ours = results.paired_difference(dict(enumerate(values)), dict(enumerate(others)))
    theirs = stats.ttest_rel(values, others).confidence_interval(0.95)
    assert ours.mean == pytest.approx(np.mean(values) - np.mean(others))
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high))
    assert results.mean_and_deviation(values)[1] == pytest.approx(stats.tstd(values))


def test_only_common_seeds_are_paired():
    found = results.paired_difference({0: 0.5, 1: 0.7, 2: 0.1}, {0: 0.4, 1: 0.5, 5: 0.9})
    assert found.mean == pytest.approx(0.15)
    assert results.paired_difference({0: 0.5}, {0: 0.4}) == (pytest.approx(0.1), None, None)
    assert results.paired_difference({0: 0.5}, {1: 0.4}) is None


# -- runs, with a training loop that only writes metrics -------------------------------------------

ACCURACIES = {"default": (0.1, 0.5), "impulse": (0.6, 0.8), "mimetic": (0.3, 0.4)}


def fake_train(config, workdir, trained):
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
    """Starts a comparison; returns how many runs failed, and which were trained."""
    tiny_config.lock()

    def run_grid(schemes, seed_list=(0, 1, 2), config=tiny_config, **options):
        trained = []
        monkeypatch.setattr(run, "train", functools.partial(fake_train, trained=trained))
        monkeypatch.setattr(run._Runner, "_draw_maps", lambda self, name: None)
        settings = grid.expand(config, schemes, {})
        options = dict(started_by="the command") | options
        return run.run_grid(settings, list(seed_list), tmp_path, **options), trained

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
    assert "some output" not in out
    log = (tmp_path / "mimetic" / "seed_1" / "log.txt").read_text()
    assert "some output" in log
    assert "Traceback" in log
    text = (tmp_path / "report.md").read_text()
    assert r"| mimetic | 1 | RuntimeError: out of memory \| while training |" in text
    # Fewer seeds of mimetic are paired with the baseline: 0 and 2.
    assert "| mimetic | 2 of 3 | 42.00 ± 2.83 | -10.00 [-10.00, -10.00] |" in text


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
        assert curves.size == (1050, 630)
    page = (tmp_path / "report.html").read_text()
    assert "82.00 ± 2.00" in page
    assert page.count("data:image/svg+xml;base64,") == 1
    assert not re.search(r'(src|href)="(?!data:)', page)  # opens without a network
    assert "<script" not in page


def test_published_training_accuracies_are_beside_ours(start, tmp_path):
    start(["default", "impulse"], published_training={"impulse": ((2, 87.5), (9, 99.0))})
    text = (tmp_path / "report.md").read_text()
    title, _, header, _, row, *_ = text[text.index("## Training accuracy") :].splitlines()
    assert title == "## Training accuracy, %: ours / published"
    assert header == "| setting | epoch 2 | epoch 9 |"
    assert row == "| impulse | 95.00 ± 0.00 / 87.50 | – / 99.00 |"


def test_one_seed_has_no_interval(start, tmp_path):
    start(["default", "impulse"], seed_list=[0])
    text = (tmp_path / "report.md").read_text()
    assert "| impulse | 1 of 1 | 80.00 | +30.00 (one seed) |" in text
    assert "With one seed there is no interval" in text


def test_a_second_command_trains_only_what_is_missing(start, tiny_config, tmp_path):
    start(["default", "mimetic"])
    _, trained = start(["default", "mimetic"])
    assert trained == [("mimetic", 1)]  # which had failed
    _, trained = start(["default", "impulse"], seed_list=range(4))
    assert trained == [("default", 3), *(("impulse", seed) for seed in range(4))]
    assert "| mimetic | 2 of 4 |" in (tmp_path / "report.md").read_text()
    changed = tiny_config.copy_and_resolve_references()
    changed.num_epochs = 3.0
    with pytest.raises(InputError, match=r"holds the setting default .*\n  num_epochs: 2.0 -> 3.0"):
        start(["default"], config=changed)


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
    start(["mimetic"], seed_list=[0], baseline="mimetic")
    assert read_baselines() == dict.fromkeys(["default", "impulse", "mimetic"], "mimetic")


def test_a_baseline_that_is_not_trained_gives_no_difference(start, tmp_path):
    start(["impulse", "mimetic"], [0], baselines={"impulse": "default", "mimetic": "other"})
    text = (tmp_path / "report.md").read_text()
    assert "| impulse | 1 of 1 | 80.00 | – | – |" in text


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


def test_a_setting_that_cannot_be_trained_is_refused_before_the_first_run(start, tiny_config):
    config = tiny_config.copy_and_resolve_references()
    config.model.num_heads = 3
    with pytest.raises(InputError, match=r"setting default: .*config\.model\.num_heads=3"):
        start(["default"], config=config)
    swin = grid.command_line.load_config("configs/swin_digits.py")  # has no config.model.positions
    swin.data.data_dir = tiny_config.data.data_dir
    with pytest.raises(InputError, match=r"setting impulse_2025: .* does not support a WindowSite"):
        start(["impulse_2025"], config=swin.lock())


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
    devices = []

    def fake_train_together(config, seed_list, folder, device, stop):
        devices.append(device)
        for seed in seed_list:
            fake_train(seeds.with_seed(config, seed), folder / f"seed_{seed}", [])
        while len(devices) < 2:  # the other setting trains at the same time
            time.sleep(0.01)
        yield 0, ""
        raise InputError("it does not fit")

    monkeypatch.setattr(seeds, "train_together", fake_train_together)
    monkeypatch.setattr(run._Runner, "_draw_maps", lambda self, name: None)
    settings = grid.expand(tiny_config.lock(), ["default", "impulse"], {})
    assert run.run_grid(settings, [0, 1], tmp_path, together=True) == 2
    assert len(set(devices)) == 2
    text = (tmp_path / "report.md").read_text()
    assert "| default | 1 | it does not fit |" in text
    assert "| default | 1 of 2 |" in text  # seed 0 had been done before


class StopAfter(StopRequest):
    def __init__(self, step):
        self.step = step

    def reached(self, step):
        return step == self.step


def read_metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_seeds_together_give_what_single_runs_give(run_config, finished_run, tmp_path, monkeypatch):
    folder = tmp_path / "impulse"

    def start(stop_after, seed_list=(0, 1)):
        stop = StopAfter(stop_after)
        return dict(seeds.train_together(run_config, seed_list, folder, jax.devices()[0], stop))

    with pytest.raises(StoppedError, match="after step 7 of 12"):
        start(7)
    stopped = shutil.copytree(folder, tmp_path / "stopped")
    assert start(None) == {0: "", 1: ""}
    assert not (folder / "together").exists()
    ours, theirs = read_metrics(folder / "seed_0"), read_metrics(finished_run.workdir)
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        for name in mine.keys() & {"train/loss", "test[:90]/loss", "test[:90]/ema_loss"}:
            assert mine[name] == pytest.approx(other[name], rel=1e-4)
    assert read_metrics(folder / "seed_1")[1]["train/loss"] != ours[1]["train/loss"]
    # Every seed is a workdir for the other commands.
    for seed in (0, 1):
        evaluated = evaluate.evaluate_checkpoint(
            seeds.with_seed(run_config, seed), folder / f"seed_{seed}"
        )
        last = read_metrics(folder / f"seed_{seed}")[-1]
        assert evaluated["test[:90]/loss"] == pytest.approx(last["test[:90]/loss"], rel=1e-5)

    # From step 7 again, and seed 1 has a loss that is not finite.
    shutil.rmtree(folder)
    stopped.rename(folder)
    calls = []

    def check_finite(*args):
        calls.append(args)
        if len(calls) % 2 == 0:
            raise StoppedError("step 8: loss nan\nnorms of its layers", exit_code=1)
        return ["step 8: loss inf: skipped"]

    monkeypatch.setattr(seeds, "check_finite", check_finite)
    assert start(None) == {0: "", 1: "step 8: loss nan"}
    log = (folder / "seed_0" / "log.txt").read_text()
    assert "seed 0: step 8: loss inf: skipped\nseed 1: step 8: loss nan\nnorms of" in log
    assert read_metrics(folder / "seed_0")[-1] == ours[-1]
    assert max(line["step"] for line in read_metrics(folder / "seed_1")) < 8
    assert not (folder / "seed_1" / "checkpoints").exists()


def test_seeds_that_do_not_fit_into_memory_are_trained_in_parts(tiny_config, tmp_path, monkeypatch):
    trained = []

    class TwoAtMost:
        def __init__(self, config, seeds, *_):
            self.seeds = seeds

        def fits(self):
            return len(self.seeds) <= 2

        def train(self, stop):
            trained.append(self.seeds)
            return {self.seeds[0]: "failed"}

    monkeypatch.setattr(seeds, "_SharedRun", TwoAtMost)

    def train():
        trained.clear()
        arguments = (tiny_config, [0, 1, 2, 3, 4], tmp_path, jax.devices()[0], StopRequest())
        return dict(seeds.train_together(*arguments))

    errors = train()
    assert trained == [[0, 1], [2], [3, 4]]
    assert {seed for seed, error in errors.items() if error} == {0, 2, 3}
    # Of an interrupted command with seeds 1 and 4, and of one that was killed at its start.
    (tmp_path / "together" / "seeds_1_4" / "10").mkdir(parents=True)
    (tmp_path / "together" / "seeds_0_2").mkdir()
    train()
    assert trained == [[1, 4], [0], [2, 3]]


# -- the command -----------------------------------------------------------------------------------


def test_the_command_does_not_take_the_config_of_a_run(finished_run):
    result = fork_main.run(f"--workdir={finished_run.workdir}", module="structinit_jax.compare")
    assert result.returncode == 1
    assert re.search(r"error: --config is required, .* is that of a run", result.stderr)


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
    report.write_report(workdir)
    assert (workdir / "report.md").read_text() == text
