import json

import jax
import numpy as np
import pytest

from structinit_jax import evaluate, train
from structinit_jax.data.info import CATALOG
from structinit_jax.data.loader import DeviceLoader
from structinit_jax.errors import InputError
from structinit_jax.program import build_program, make_plan
from structinit_jax.training.lock import lock_workdir
from structinit_jax.training.progress import Progress

pytestmark = pytest.mark.usefixtures("library_promotion")


def read_metrics(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def final_params(config, workdir):
    plan = make_plan(config, CATALOG["digits"], 384)
    program = build_program(config, plan)
    checkpoints = train.Checkpoints(workdir / "checkpoints", config.keep_checkpoints)
    step = checkpoints.latest_step
    state = checkpoints.restore(step, program.abstract_state)
    checkpoints.close()
    return step, jax.tree.map(np.asarray, state)


@pytest.mark.parametrize(
    ("num_examples", "fields", "steps", "evaluations"),
    [
        (384, {}, 12, {6, 12}),
        (100, {"batch_size": 64, "num_epochs": 4.0}, 6, {2, 3, 5, 6}),
        (384, {"num_steps": 7}, 7, {6, 7}),
        (384, {"eval_every_epochs": 100.0}, 12, {12}),
        (10, {"num_epochs": 1.0}, 1, {1}),
    ],
)
def test_epochs_become_steps(tiny_config, num_examples, fields, steps, evaluations):
    tiny_config.update(**fields)
    plan = make_plan(tiny_config, CATALOG["digits"], num_examples)
    assert plan.num_steps == steps
    assert plan.eval_steps == evaluations
    assert plan.steps_per_epoch == num_examples / 64


def test_training_leaves_the_documented_files_and_says_what_it_does(tiny_config, tmp_path, capsys):
    results = train.train(tiny_config, tmp_path)
    out = capsys.readouterr().out
    for text in (
        "devices: 8 × cpu",
        "blocks/attention/query/kernel",
        "attention_init impulse:",
        "of the attention on target",
        "training on 384 examples for 12 steps (2.0 epochs), testing on 90",
        "first step after",
        "step 12/12",
        "images/s",
        "done: test accuracy",
    ):
        assert text in out
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        ".lock",
        "checkpoints",
        "config.json",
        "metrics.jsonl",
        "tensorboard",
    ]
    assert json.loads((tmp_path / "config.json").read_text())["model"]["width"] == 16
    metrics = read_metrics(tmp_path)
    assert [m["step"] for m in metrics] == [2, 4, 6, 6, 8, 10, 12, 12]
    names = {"step", "train/loss", "train/accuracy", "train/learning_rate", "images_per_second"}
    assert names | {"data_wait", "checkpoint_wait", "evaluation_wait"} <= metrics[0].keys()
    assert "mfu" not in metrics[0]  # no peak is known of a CPU
    assert metrics[-1]["test/accuracy"] == results["test/accuracy"]
    # 90 examples, counted exactly: every accuracy is a multiple of 1/90.
    assert (results["test/accuracy"] * 90) % 1 == pytest.approx(0, abs=1e-9)

    evaluated = evaluate.evaluate_checkpoint(tiny_config, tmp_path)
    assert evaluated == pytest.approx(results, rel=1e-6)
    assert "on 90 examples of digits test[:90]" in capsys.readouterr().out


def test_a_run_interrupted_and_resumed_is_bit_equal_to_one_that_was_not(
    tiny_config, tmp_path, monkeypatch, capsys
):
    tiny_config.model.drop_path = 0.2
    train.train(tiny_config, tmp_path / "whole")
    write = train.MetricsLog.write

    def interrupted_write(log, step, values):
        write(log, step, values)
        if step == 10:  # checkpoints were at 4, 6 and 8
            raise KeyboardInterrupt

    monkeypatch.setattr(train.MetricsLog, "write", interrupted_write)
    with pytest.raises(KeyboardInterrupt):
        train.train(tiny_config, tmp_path / "stopped")
    monkeypatch.undo()
    capsys.readouterr()
    train.train(tiny_config, tmp_path / "stopped")
    assert "resumed from step 8" in capsys.readouterr().out
    (step, whole), (_, resumed) = (
        final_params(tiny_config, tmp_path / name) for name in ("whole", "stopped")
    )
    assert step == 12
    jax.tree.map(np.testing.assert_array_equal, whole, resumed)
    whole, resumed = (read_metrics(tmp_path / name) for name in ("whole", "stopped"))
    for metrics in whole + resumed:
        for name in ("images_per_second", "data_wait", "checkpoint_wait", "evaluation_wait"):
            metrics.pop(name, None)
    assert whole == resumed


def test_the_first_batch_is_no_wait(tiny_config, tmp_path, monkeypatch):
    """What compiles for it, or is decoded first, comes before the clock of `data_wait`."""
    events = []
    draw, watch = DeviceLoader.train_batches, Progress.watch

    def drawn(*args, **options):
        for batch in draw(*args, **options):
            events.append("drawn")
            yield batch

    def watched(*args):
        events.append("watched")
        return watch(*args)

    monkeypatch.setattr(DeviceLoader, "train_batches", drawn)
    monkeypatch.setattr(Progress, "watch", watched)
    tiny_config.num_steps = 2
    train.train(tiny_config, tmp_path)
    assert events == ["drawn", "watched", "drawn"]


def test_a_finished_run_started_again_says_how_it_ended(tiny_config, tmp_path, capsys):
    first = train.train(tiny_config, tmp_path)
    again = train.train(tiny_config, tmp_path)
    assert again == pytest.approx(first, rel=1e-6)
    assert "resumed from step 12" in capsys.readouterr().out
    assert [m["step"] for m in read_metrics(tmp_path)] == [2, 4, 6, 6, 8, 10, 12, 12]


def test_newest_and_best_checkpoints_are_kept(tiny_config, tmp_path):
    tiny_config.update(num_epochs=3.0, checkpoint_every_steps=3, keep_checkpoints=1)
    train.train(tiny_config, tmp_path)
    kept = {int(p.name) for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit()}
    evaluated = {m["step"]: m["test/accuracy"] for m in read_metrics(tmp_path) if "test/loss" in m}
    assert evaluated.keys() == {6, 12, 18}
    best = max(evaluated.values())
    assert 18 in kept
    assert len(kept) <= 2
    assert best in {evaluated[step] for step in kept}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "model.width",
            32,
            r"(?s)at step 12 in .*\n  model\.width: 16 -> 32  \(the architecture\)",
        ),
        ("attention_init.kernel_size", 1, r"attention_init\.kernel_size: 3 -> 1  \(the start weig"),
        ("num_steps", 5, r"holds a checkpoint of step 12, but the config ends at step 5"),
        ("seed", 1, r"seed: 0 -> 1  \(all randomness"),
        ("ema_decay", 0.9, r"ema_decay: 0\.0 -> 0\.9  \(whether the checkpoint has averaged weigh"),
    ],
)
def test_resuming_with_another_config_is_refused(
    tiny_config, tmp_path_factory, field, value, message
):
    workdir = tmp_path_factory.getbasetemp() / "resumed_with_another_config"
    if not workdir.exists():
        train.train(tiny_config, workdir)
    tiny_config.update_from_flattened_dict({field: value})
    with pytest.raises(InputError, match=message):
        train.train(tiny_config, workdir)


def test_a_run_goes_on_with_what_may_change_and_tells_it(tiny_config, tmp_path, capsys):
    train.train(tiny_config, tmp_path)
    capsys.readouterr()
    # The optimizer's state keeps its form.
    tiny_config.update(num_epochs=3.0, learning_rate=5e-4, clip_norm=0.0, layer_decay=0.75)
    train.train(tiny_config, tmp_path)
    out = capsys.readouterr().out
    assert (
        "config changed since the checkpoint:\n"
        "  clip_norm: 1.0 -> 0.0\n"
        "  layer_decay: 1.0 -> 0.75\n"
        "  learning_rate: 0.001 -> 0.0005\n"
        "  num_epochs: 2.0 -> 3.0\n"
        "resumed from step 12"
    ) in out
    assert json.loads((tmp_path / "config.json").read_text())["layer_decay"] == 0.75
    assert read_metrics(tmp_path)[-1]["step"] == 18


def test_evaluating_with_other_pixels_is_told(tiny_config, tmp_path, capsys):
    tiny_config.num_steps = 2
    train.train(tiny_config, tmp_path)
    capsys.readouterr()
    evaluate.evaluate_checkpoint(tiny_config, tmp_path)
    assert "note:" not in capsys.readouterr().out
    tiny_config.data.mean = (0.0,)
    evaluate.evaluate_checkpoint(tiny_config, tmp_path)
    assert "trained with another config:\n  data.mean: [0.3] -> [0.0]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model.width", 32, r"another architecture .*weights 'blocks/attention/key/bias', shape"),
        ("model.positions", "learned", r"'positions', missing in the checkpoint, shape \[16, 16\]"),
        (
            "ema_decay",
            0.9,
            r"12 holds no averaged weights, which config\.ema_decay asks for: set it",
        ),
    ],
)
def test_evaluating_another_model_is_refused(tiny_config, tmp_path_factory, field, value, message):
    workdir = tmp_path_factory.getbasetemp() / "evaluated_with_another_config"
    if not workdir.exists():
        train.train(tiny_config, workdir)
    tiny_config.update_from_flattened_dict({field: value})
    with pytest.raises(InputError, match=message):
        evaluate.evaluate_checkpoint(tiny_config, workdir)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("data.name", "digitz", r"digits"),
        ("data.train_split", "trian", r"data\.train_split"),
        ("data.eval_split", "validation", r"data\.eval_split"),
        ("model.num_classes", 100, r"model\.num_classes=100"),
        ("data.image_size", 9, r"data\.image_size=9 is not divisible by config\.model\.pa"),
        ("model.num_heads", 3, r"model\.width=16 is not divisible by config\.model\.num_heads=3"),
        ("model.name", "vitt", r"model\.name='vitt' is not a known model: similar names are vit"),
        ("batch_size", 60, r"config\.batch_size=60 .* divisible by the 8 devices.* 56 or 64"),
        ("attention_init.kernel_size", 5, r"kernel_size=5 is larger than the token grid 4x4"),
        ("num_steps", -1, r"config\.num_steps=-1"),
    ],
)
def test_mistakes_are_refused_before_training(tiny_config, tmp_path, field, value, message):
    tiny_config.update_from_flattened_dict({field: value})
    with pytest.raises(InputError, match=message):
        train.train(tiny_config, tmp_path)


def test_unusable_workdirs_are_refused(tiny_config, tmp_path, small_files_only):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"--workdir=.*file cannot be written to"):
        train.train(tiny_config, tmp_path / "file")
    with (
        small_files_only(1000),
        pytest.raises(InputError, match=r"cannot be written to \(File too large\)"),
    ):
        train.train(tiny_config, tmp_path / "full")
    with pytest.raises(InputError, match=r"holds no checkpoints: train there first"):
        evaluate.evaluate_checkpoint(tiny_config, tmp_path / "empty")
    with lock_workdir(tmp_path), pytest.raises(InputError, match=r"in use by another run"):
        train.train(tiny_config, tmp_path)
