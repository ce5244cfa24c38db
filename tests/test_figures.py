import numpy as np

from structinit_jax import figures


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
