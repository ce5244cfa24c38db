"""Reports of comparisons whose records are written by hand, and their statistics."""

import csv
import json

import numpy as np
import pytest
from scipy import stats

from structinit_jax.compare import page, report, results

FACTS = {
    "num_steps": 12,
    "steps_per_epoch": 6,
    "test_name": "test",
    "config": {"batch_size": 64},
    "command": "",
    "published": None,
}


def record(workdir, runs, facts=None, **info):
    """Writes and reads a comparison.

    Args:
      workdir: Its folder.
      runs: By setting and seed the test accuracies by step, or other metrics; None if there are
        none yet. The others are done.
      facts: Of single settings, in addition to `FACTS`.
      info: Other content of `compare.json`.
    """
    settings = {}
    for setting, seeds in runs.items():
        settings[setting] = FACTS | {"seeds": [*seeds]} | (facts or {}).get(setting, {})
        for seed, curve in seeds.items():
            if curve is not None:
                folder = results.run_folder(workdir, setting, seed)
                folder.mkdir(parents=True, exist_ok=True)
                metrics = {
                    step: values if isinstance(values, dict) else {"test/accuracy": values}
                    for step, values in curve.items()
                }
                lines = [json.dumps({"step": step, **values}) for step, values in metrics.items()]
                (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
                (folder / results.STATUS).write_text('{"status": "done"}')
    info = {"baselines": dict.fromkeys(runs, "default"), "commands": [], "versions": {}} | info
    text = json.dumps({"settings": settings, "machine": ""} | info)
    (workdir / results.GRID).write_text(text)
    return results.read(workdir)


def text_of(comparison):
    return report.markdown(report.describe(comparison))


def rows_of(comparison):
    return list(csv.DictReader(report.csv_text(comparison).splitlines()))


# -- statistics ------------------------------------------------------------------------------------


def test_intervals_are_those_of_scipy():
    rng = np.random.default_rng(0)
    values, others = rng.normal(size=(2, 5)).tolist()
    ours = results.paired_difference(dict(enumerate(values)), dict(enumerate(others)))
    theirs = stats.ttest_rel(values, others).confidence_interval(0.95)
    assert ours.mean == pytest.approx(np.mean(values) - np.mean(others))
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high))
    assert results.mean_and_deviation(values)[1] == pytest.approx(stats.tstd(values))


def test_only_common_seeds_are_paired(tmp_path):
    found = results.paired_difference({0: 0.5, 1: 0.7, 2: 0.1}, {0: 0.4, 1: 0.5, 5: 0.9})
    assert found.mean == pytest.approx(0.15)
    assert results.paired_difference({0: 0.5}, {0: 0.4}) == (pytest.approx(0.1), None, None)
    assert results.paired_difference({0: 0.5}, {1: 0.4}) is None
    runs = {
        "default": {0: {12: 0.5}, 1: {12: 0.5}},
        "impulse": {0: {12: 0.6}, 1: {12: 0.6}, 2: {12: 0.9}},
    }
    text = text_of(record(tmp_path, runs))
    assert "| impulse | 3 of 3 | 70.00 ± 17.32 | +10.00 [+10.00, +10.00] (2 common seeds) |" in text


def test_one_seed_has_no_interval(tmp_path):
    comparison = record(tmp_path, {"default": {0: {12: 0.5}}, "impulse": {0: {12: 0.8}}})
    text = text_of(comparison)
    assert "| impulse | 1 of 1 | 80.00 | +30.00 (one seed) |" in text
    assert "over 1 seed. With one seed there is no interval" in text


def test_a_run_that_ends_at_the_mean_of_the_baseline_reaches_it(tmp_path):
    # The mean of three times 322/359 is rounded up.
    runs = {"default": {seed: {6: 0.1, 12: 322 / 359} for seed in range(3)}}
    assert record(tmp_path, runs).epochs_to_baseline("default") == [2.0, 2.0, 2.0]


# -- what counts -----------------------------------------------------------------------------------


def test_accuracies_are_those_of_the_averaged_weights(tmp_path):
    def values(raw, averaged, train):
        return {
            "test/accuracy": raw,
            "test/ema_accuracy": averaged,
            "train_eval/accuracy": 0.1,
            "train_eval/ema_accuracy": train,
        }

    runs = {
        "default": {0: {6: 0.8, 12: 0.75}},
        "impulse": {0: {6: values(0.1, 0.9, 0.5), 12: values(0.95, 0.8, 0.6)}},
    }
    comparison = record(tmp_path, runs)
    assert "averaged weights" not in text_of(comparison)
    config = {"batch_size": 64, "ema_decay": 0.9}
    facts = {"config": config, "published_training": [(2, 50.0)]}
    comparison = record(tmp_path, runs, facts={"impulse": facts})
    text = text_of(comparison)
    assert "| impulse | 1 of 1 | 80.00 | +5.00 (one seed) | 1.0 |" in text
    assert "of the averaged weights where config.ema_decay is set" in text
    assert "| impulse | 60.00 / 50.00 |" in text
    row = rows_of(comparison)[1]
    assert (row["test_accuracy"], row["best_test_accuracy"]) == ("0.8", "0.9")


def test_steps_that_were_trained_after_the_comparison_do_not_count(tmp_path):
    comparison = record(tmp_path, {"default": {0: {6: 0.4, 12: 0.5, 18: 0.9}}})
    assert "| default | 1 of 1 | 50.00 |" in text_of(comparison)
    row = rows_of(comparison)[0]
    assert (row["epoch"], row["test_accuracy"], row["best_test_accuracy"]) == ("2.0", "0.5", "0.5")
    assert [*comparison.runs["default"][0].test_curve] == [6, 12]


def test_only_the_seeds_of_a_setting_are_missing(tmp_path):
    runs = {"default": dict.fromkeys(range(4)), "impulse": {0: {12: 0.5}}}
    text = text_of(record(tmp_path, runs))
    assert "4 runs have not finished" in text
    assert "| impulse | 1 of 1 |" in text
    assert "standard deviation over 1 to 4 seeds" in text
    # Older files have the seeds once for all settings.
    info = json.loads((tmp_path / results.GRID).read_text())
    for facts in info["settings"].values():
        del facts["seeds"]
    (tmp_path / results.GRID).write_text(json.dumps(info | {"seeds": [0, 1]}))
    assert "3 runs have not finished" in text_of(results.read(tmp_path))


def test_what_is_not_known_is_an_empty_cell(tmp_path):
    rows = rows_of(record(tmp_path, {"default": {0: None, 1: {12: 0.5}}}))
    assert [row["training_seconds"] for row in rows] == ["", ""]
    assert [row["test_accuracy"] for row in rows] == ["", "0.5"]


# -- what is said of it ----------------------------------------------------------------------------


def test_fields_that_a_scheme_needs_are_told(tmp_path):
    def facts(positions):
        model = {"positions": positions, "base_init": "timm"}
        return {"config": {"batch_size": 64, "model": model}}

    positions = {"default": "sincos", "impulse": "sincos", "a": "learned", "b": "learned"}
    settings = {name: facts(value) for name, value in positions.items()}
    text = text_of(record(tmp_path, {name: {0: {12: 0.5}} for name in positions}, settings))
    assert "config.model.positions is 'learned' for a; b, but 'sincos' for the baseline." in text
    assert "base_init" not in text


def test_fields_of_another_command_are_told(tmp_path):
    def facts(epochs, sets, heads):
        data = {"test_sets": sets, "data_dir": f"/{epochs}"}
        return {"config": {"num_epochs": epochs, "data": data, "model": {"num_heads": heads}}}

    later = "mimetic,model.num_heads=2"
    settings = {"default": facts(8.0, ["a"], 1), later: facts(2.0, ["a", "b"], 2)}
    text = text_of(record(tmp_path, {name: {0: {12: 0.5}} for name in settings}, settings))
    assert f"config.num_epochs is 2.0 for {later}, but 8.0 for the baseline." in text
    assert f"config.data.test_sets is ['a', 'b'] for {later}, but ['a'] for the baseline" in text
    assert "data_dir is" not in text
    assert "num_heads is" not in text


def test_a_note_of_several_settings_is_told_once(tmp_path):
    runs = {name: {0: {12: 0.5}} for name in ("default", "impulse", "mimetic")}
    facts = {name: {"note": "Trained on digits."} for name in ("impulse", "mimetic")}
    assert text_of(record(tmp_path, runs, facts)).count("Trained on digits.") == 1


def test_accuracies_are_labelled_with_the_split(tmp_path, monkeypatch):
    runs = {"default": {0: {12: {"train[90%:]/accuracy": 0.5}}}}
    comparison = record(tmp_path, runs, {"default": {"test_name": "train[90%:]"}})
    assert "| setting | seeds | train[90%:] accuracy, % |" in text_of(comparison)
    assert draw(comparison, monkeypatch).axes[0].get_ylabel() == "train[90%:] accuracy, %"


def test_published_training_accuracies_are_beside_ours(tmp_path):
    curve = {12: {"test/accuracy": 0.5, "train_eval/accuracy": 0.95}}
    runs = {"default": {0: curve}, "impulse": {0: curve, 1: curve}}
    facts = {"impulse": {"published_training": ((2, 87.5), (9, 99.0))}}
    text = text_of(record(tmp_path, runs, facts))
    title, _, header, _, row, *_ = text[text.index("## Training accuracy") :].splitlines()
    assert title == "## Training accuracy, %: ours / published"
    assert header == "| setting | epoch 2 | epoch 9 |"
    assert row == "| impulse | 95.00 ± 0.00 / 87.50 | – / 99.00 |"


# -- figures ---------------------------------------------------------------------------------------


def draw(comparison, monkeypatch):
    """Returns the figure of curves.png."""
    drawn = []
    monkeypatch.setattr(page.import_pyplot(), "close", drawn.append)
    page.draw_test_curves(comparison)
    (figure,) = drawn
    figure.canvas.draw()
    return figure


def test_curves_are_those_of_finished_runs(tmp_path, monkeypatch):
    runs = {
        "default": {0: {6: 0.1, 12: 0.5}, 1: {6: 0.12, 12: 0.52}, 2: {6: 0.9}},
        "mimetic": {0: {6: 0.3, 12: 0.4}, 1: None},
    }
    record(tmp_path, runs)
    (results.run_folder(tmp_path, "default", 2) / results.STATUS).unlink()
    lines = draw(results.read(tmp_path), monkeypatch).axes[0].get_lines()
    np.testing.assert_allclose([line.get_ydata() for line in lines], [[11, 51], [30, 40]])
    for status in tmp_path.glob("*/*/status.json"):
        status.unlink()
    assert not page.has_curves(results.read(tmp_path))


def test_a_single_evaluation_is_seen(tmp_path, monkeypatch):
    comparison = record(tmp_path, {"default": {0: {12: 0.5}}})
    (line,) = draw(comparison, monkeypatch).axes[0].get_lines()
    assert (len(line.get_xdata()), line.get_marker()) == (1, "o")


@pytest.mark.parametrize("length", [1, 40, 120])
def test_a_legend_of_many_settings_leaves_place_for_the_curves(tmp_path, monkeypatch, length):
    comparison = record(tmp_path, {"default": {0: {6: 0.1, 12: 0.5}}})
    runs = {f"{i}{'m' * length}": comparison.runs["default"] for i in range(20)}
    figure = draw(comparison._replace(runs=runs), monkeypatch)
    (legend,), (axis,) = figure.legends, figure.axes
    box = legend.get_window_extent()
    assert box.y0 > axis.get_window_extent().y1
    assert axis.get_window_extent().height > 300
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.width
