import csv
import json

import numpy as np
import pytest
from scipy import stats

from structinit_jax.compare import report
from structinit_jax.training.workdir import COMPARISON

FACTS = {
    **{"num_steps": 12, "steps_per_epoch": 6, "baseline": "default", "published": "", "note": ""},
    **{"config": {"model": {"name": "vit"}, "batch_size": 64}, "num_examples": 390},
}
DATA = {"name": "digits", "train_split": "train", "eval_split": "test"}
FACTS["config"]["data"] = DATA
TITLE = "vit on 390 examples of digits train, 2 epochs, evaluated on"


def record(workdir, runs, facts=None):
    """Writes and reads a comparison with the baseline 'default'.

    Args:
      workdir: The comparison's folder.
      runs: For each setting and seed, the test accuracies or other metrics of a finished run by
        step; None for a run that has not started.
      facts: Facts of individual settings, in addition to `FACTS`.
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
    info = {"settings": settings, "machine": ""}
    (workdir / COMPARISON).write_text(json.dumps(info))
    return report.read_comparison(workdir)


def test_intervals_are_those_of_scipy(tmp_path):
    values = np.random.default_rng(0).normal(size=5).tolist()
    theirs = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert report.half_interval(values) == pytest.approx((theirs.high - theirs.low) / 2)
    curves = {
        "default": {seed: {12: 0.5} for seed in range(3)},
        "impulse": {seed: {12: 0.6 + seed / 100} for seed in range(3)},
        "mimetic": {0: None},
    }
    info, runs = record(tmp_path, curves, {"mimetic": {"baseline": "impulse"}})
    text = report.markdown(info, runs)
    assert "| +11.00 [+8.52, +13.48] vs. default |" in text
    assert text.count(f"\n{TITLE} test\n") == 1


def test_one_seed_is_compared_without_an_interval(tmp_path):
    curves = {
        "default": {0: {6: 0.8, 12: 0.75, 18: 0.95}},  # trained past the comparison's last step
        "impulse": {0: {6: {"train/accuracy": 0.9}, 12: 0.8}},
    }
    config = FACTS["config"] | {"data": DATA | {"eval_split": "train"}}
    info, runs = record(tmp_path, curves, {"impulse": {"config": config}})
    assert runs["impulse"][0].curve == {12: 0.8}  # not the accuracy of training batches
    text = report.markdown(info, runs)
    assert "| impulse | 1 of 1 | 80.00 | +5.00 (one seed) |" in text
    assert "| seeds | accuracy, % |" in text  # on two splits
    assert f"\ndefault: {TITLE} test\n" in text
    assert f"\nimpulse: {TITLE} train\n" in text
    assert "With one seed there is no interval" in text
    rows = csv.DictReader(report.csv_of(runs).splitlines())
    assert [(row["epoch"], row["accuracy"]) for row in rows] == [("2.0", "0.75"), ("2.0", "0.8")]


def test_fields_that_no_name_shows_are_listed(tmp_path):
    scheme = {"name": "impulse", "target_mass": 0.5}
    changes = {
        "default": {"learning_rate": 0.001, "seed": 0},
        "impulse": {"learning_rate": 0.001, "seed": 1, "attention_init": scheme},
        "default,learning_rate=0.1": {"learning_rate": 0.1, "data": DATA | {"repeats": 1}},
        "mimetic": {"learning_rate": 0.01, "data": DATA | {"repeats": 3}},
    }
    facts = {name: {"config": FACTS["config"] | change} for name, change in changes.items()}
    info, runs = record(tmp_path, {name: {0: {12: 0.5}} for name in changes}, facts)
    text = report.markdown(info, runs)
    fields = "- attention_init.target_mass: 0.5 (impulse)\n"
    fields += "- data.repeats: 1 (default,learning_rate=0.1), 3 (mimetic)\n"
    fields += "- learning_rate: 0.001 (default; impulse), 0.01 (mimetic)\n\n"
    assert f"\n\nOther fields:\n\n{fields}" in text


def test_curves_are_those_of_finished_runs(tmp_path):
    runs = {
        "default": {0: {6: 0.1, 9: 0.3, 12: 0.5}, 1: {6: 0.12, 12: 0.52}, 2: {6: 0.9}},
        "mimetic": {0: {12: 0.4}, 1: None},
    }
    _, runs = record(tmp_path, runs)
    axis = report.draw_curves(runs).axes[0]
    first, second = axis.get_lines()
    (band,) = axis.collections
    np.testing.assert_allclose(first.get_ydata(), [11, 51])
    np.testing.assert_allclose(second.get_ydata(), [40])
    heights = band.get_paths()[0].vertices[:, 1]
    np.testing.assert_allclose([heights.min(), heights.max()], [11 - 2**0.5, 51 + 2**0.5])
    _, runs = record(tmp_path, {str(number): {0: {12: 0.5}} for number in range(25)})
    lines = report.draw_curves(runs).axes[0].get_lines()
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 24
