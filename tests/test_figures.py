"""Figures of training runs, and results by class."""

import csv

import numpy as np

from structinit_jax.training import figures


def test_curves_show_training_and_evaluation():
    lines = [
        {"step": 0, "init/loss": 0.1},
        {"step": 2, "train/loss": 2.0, "train/learning_rate": 0.1},
        {"step": 2, "eval/loss": 3.0, "eval/accuracy": 0.5},
        {"step": 4, "train/loss": None, "train/learning_rate": 0.2},
    ]
    loss, accuracy, rate = figures.draw_curves(lines).axes
    train, evaluation = loss.get_lines()
    np.testing.assert_array_equal(train.get_xdata(), [2, 4])
    np.testing.assert_array_equal(train.get_ydata(), [2.0, np.nan])
    np.testing.assert_array_equal(evaluation.get_ydata(), [3.0])
    assert [line.get_ydata().tolist() for line in accuracy.get_lines()] == [[0.5]]
    assert [line.get_ydata().tolist() for line in rate.get_lines()] == [[0.1, 0.2]]


def test_results_by_class_are_counted(tmp_path):
    labels = np.array([0, 0, 1, 2], np.int32)
    predicted = np.array([0, 1, 1, 1], np.int32)
    names = ["a", "$x_{$", 'b, "c"', "none\udcff"]  # the last is a folder name in Latin-1
    with figures.write_by_class(tmp_path, labels, predicted, names).open() as file:
        rows = list(csv.DictReader(file))
    assert [row["class"] for row in rows] == [*names[:3], r"none\udcff"]
    assert [row["examples"] for row in rows] == ["2", "1", "1", "0"]
    assert [row["accuracy"] for row in rows] == ["0.5", "1.0", "0.0", ""]
