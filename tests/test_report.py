"""Reports of comparisons whose records are written by hand, and their statistics."""

import csv
import json

import numpy as np
import pytest
from scipy import stats

from structinit_jax import compare
from structinit_jax.compare import report

FACTS = {
    **{"num_steps": 12, "steps_per_epoch": 6, "test_name": "test", "published": ""},
    **{"config": {}, "data": {}},
}


def record(workdir, runs, facts=None):
    """Writes and reads a comparison with the baseline 'default'.

    Args:
      workdir: Its folder.
      runs: By setting and seed the test accuracies by step, or other metrics, of runs that are
        done; None for runs that have not begun.
      facts: Of single settings, in addition to `FACTS`.
    """
    settings = {}
    for setting, seeds in runs.items():
        settings[setting] = FACTS | {"seeds": [*seeds]} | (facts or {}).get(setting, {})
        for seed, curve in seeds.items():
            if curve is None:
                continue
            folder = workdir / setting / f"seed_{seed}"
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / "metrics.jsonl").open("w") as file:
                for step, value in curve.items():
                    metrics = value if isinstance(value, dict) else {"eval/accuracy": value}
                    file.write(json.dumps({"step": step} | metrics) + "\n")
            (folder / compare.STATUS).write_text(compare.DONE)
    baselines = dict.fromkeys(runs, "default")
    info = {"settings": settings, "baselines": baselines, "machine": ""}
    (workdir / compare.GRID).write_text(json.dumps(info))
    return compare.read_comparison(workdir)


def test_intervals_are_those_of_scipy():
    values = np.random.default_rng(0).normal(size=5).tolist()
    theirs = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert report.half_interval(values) == pytest.approx((theirs.high - theirs.low) / 2)


def test_steps_after_the_comparison_are_left_out(tmp_path):
    comparison = record(tmp_path, {"default": {0: {6: 0.1, 12: 0.9, 18: 0.95}}})
    (row,) = csv.DictReader(report.csv_text(comparison).splitlines())
    assert (row["epoch"], row["test_accuracy"]) == ("2.0", "0.9")


def test_the_accuracy_of_training_batches_is_not_that_of_the_split_train(tmp_path):
    curve = {3: {"train/accuracy": 0.2}, 12: {"eval/accuracy": 0.5}}
    runs = record(tmp_path, {"default": {0: curve}}, {"default": {"test_name": "train"}}).runs
    assert runs["default"][0].curve == {12: 0.5}


def test_one_seed_is_compared_without_an_interval(tmp_path):
    runs = {"default": {0: {6: 0.8, 12: 0.75}}, "impulse": {0: {6: 0.9, 12: 0.8}}}
    comparison = record(tmp_path, runs)
    text = report.markdown(comparison)
    assert "| impulse | 1 of 1 | 80.00 | +5.00 (one seed) |" in text
    assert "With one seed there is no interval" in text
    rows = list(csv.DictReader(report.csv_text(comparison).splitlines()))
    assert rows[1]["test_accuracy"] == "0.8"


def test_fields_that_differ_from_the_baseline_are_reported(tmp_path):
    def facts(positions, heads):
        model = {"positions": positions, "base_init": "timm", "num_heads": heads}
        config = {"data": {"data_dir": positions}, "model": model, "ema_decay": 0.0}
        return {"config": config}

    settings = {
        "default": facts("sincos", 1) | {"published": "50.10"},
        "of_an_earlier_version": {"config": {"model": facts("sincos", 1)["config"]["model"]}},
        "a": facts("learned", 1),
        "b,model.num_heads=2": facts("learned", 2),
    }
    text = report.markdown(record(tmp_path, {name: {0: {12: 0.5}} for name in settings}, settings))
    for name in ("a", "b,model.num_heads=2"):
        line = f"{name} differs from its baseline: model.positions is 'learned', not 'sincos'.\n"
        assert line in text
    assert "of_an_earlier_version differs" not in text
    assert "| default | 1 of 1 | 50.00 | 50.10 | baseline |" in text


def test_curves_are_those_of_finished_runs(tmp_path):
    runs = {
        "default": {0: {6: 0.1, 12: 0.5}, 1: {6: 0.12, 12: 0.52}, 2: {6: 0.9}},
        "mimetic": {0: {12: {"val/accuracy": 0.4}}, 1: None},
    }
    comparison = record(tmp_path, runs, {"mimetic": {"test_name": "val"}})
    first, second = report.draw_curves(comparison).axes[0].get_lines()
    np.testing.assert_allclose(first.get_ydata(), [11, 51])
    np.testing.assert_allclose(second.get_ydata(), [40])
    assert report.draw_curves(record(tmp_path, {"impulse": {0: None}})) is None


def test_a_report_is_text_without_control_characters(tmp_path):
    facts = {"published": "50\x1b]0;t\x07", "config": {"a\x1b[2J": 1}}
    record(tmp_path, {"default": {0: {6: 0.1, 12: 0.5}}}, {"default": facts})
    (tmp_path / "default" / "seed_0" / compare.STATUS).write_text("Error: \x1b[2J")
    report.write_report(tmp_path)
    for name in ("report.md", "results.csv"):
        text = (tmp_path / name).read_text()
        assert r"Error: \x1b[2J" in text
        assert "\x1b" not in text
