import io
import sys

from structinit_jax.training import progress as progress_lib
from structinit_jax.training.progress import Progress

VALUES = {"train/loss": 0.5, "train/learning_rate": 1e-3, "images_per_second": 800.0}


class Clock:
    """A clock that is set by hand."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(progress_lib.time, "perf_counter", lambda: self.now)


def test_a_log_gets_plain_lines_with_speed_and_time_left(monkeypatch, capsys):
    clock = Clock(monkeypatch)
    progress = Progress(0, 1000, 10.0, 64)
    clock.now = 8.0
    assert progress.measure(100) == {
        "images_per_second": 800.0,
        "data_wait": 0.0,
        "checkpoint_wait": 0.0,
        "evaluation_wait": 0.0,
    }
    progress.show(100, VALUES)
    out = capsys.readouterr().out
    assert out == ("step 100/1000  epoch 10.0  loss 0.5000  lr 1.00e-03  800 images/s  1:12 left\n")


def test_waiting_for_data_is_a_fraction_of_the_time(monkeypatch):
    clock = Clock(monkeypatch)
    progress = Progress(0, 1000, 10.0, 64)

    def slow_batches():
        for number in range(4):
            clock.now += 0.5
            yield number

    seen = []
    for number in progress.watch(slow_batches()):
        clock.now += 1.5
        seen.append(number)
    assert seen == [0, 1, 2, 3]
    values = progress.measure(4)
    assert (values["images_per_second"], values["data_wait"]) == (32.0, 0.25)
    clock.now += 1.0
    assert progress.measure(5)["data_wait"] == 0.0


def test_checkpoints_and_evaluations_do_not_count_as_training(monkeypatch, capsys):
    clock = Clock(monkeypatch)
    progress = Progress(50, 1_000_150, 10.0, 64)
    clock.now = 8.0
    with progress.wait("evaluation"):
        clock.now += 4.0
    for _ in range(2):
        with progress.wait("checkpoint"):
            clock.now += 2.0
    values = progress.measure(150)
    assert values["images_per_second"] == 800.0
    assert (values["evaluation_wait"], values["checkpoint_wait"]) == (0.25, 0.25)
    progress.show(150, VALUES)
    assert "22:13:20 left" in capsys.readouterr().out
    clock.now += 1.0
    assert progress.measure(151)["checkpoint_wait"] == 0.0


def test_mfu_is_shown_if_the_peak_is_known(monkeypatch, capsys):
    clock = Clock(monkeypatch)
    progress = Progress(0, 1000, 10.0, 64, peak_speed=1600.0)
    clock.now = 8.0
    values = progress.measure(100)
    assert values["mfu"] == 0.5
    progress.show(100, VALUES | values)
    assert "800 images/s  mfu 50.0 %  1:12 left" in capsys.readouterr().out


def test_a_terminal_gets_a_bar_rewritten_in_place(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    clock = Clock(monkeypatch)
    progress = Progress(0, 100, 10.0, 64)
    clock.now = 1.0
    progress.measure(50)
    progress.show(50, VALUES)
    progress.note("step 50  test accuracy 0.9")
    text = terminal.getvalue()
    assert text.startswith("\r\x1b[K" + "█" * 12 + "░" * 12 + " step 50/100")
    assert text.endswith("\r\x1b[Kstep 50  test accuracy 0.9\n")
    assert text.count("\n") == 1
