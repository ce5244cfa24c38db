"""What a person sees of a run: a bar on a terminal, plain lines in a log."""

import contextlib
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

BAR_WIDTH = 24
PAUSES = ("checkpoint", "evaluation")


class Progress:
    """Prints step, epoch, metrics, speed and time left.

    On a terminal the line is rewritten in place behind a bar; elsewhere each update is a line.

    Args:
      start_step: steps done before this run.
      num_steps: steps of the whole training.
      steps_per_epoch: may be fractional.
      batch_size: images of a step, for images per second.
      peak_speed: images per second at the peak of the devices, for MFU; None where it is not known.
    """

    def __init__(
        self,
        start_step: int,
        num_steps: int,
        steps_per_epoch: float,
        batch_size: int,
        peak_speed: float | None = None,
    ):
        self._num_steps = num_steps
        self._steps_per_epoch = steps_per_epoch
        self._batch_size = batch_size
        self._peak_speed = peak_speed
        self._bar = sys.stdout.isatty()
        self._last_step, self._last_time = start_step, time.perf_counter()
        self._training_steps, self._training_seconds = 0, 0.0
        self._waited = 0.0
        self._paused = dict.fromkeys(PAUSES, 0.0)

    def watch(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The same batches; the time until each is at hand counts as waiting for data."""
        batches = iter(batches)
        while True:
            start = time.perf_counter()
            batch = next(batches, None)
            self._waited += time.perf_counter() - start
            if batch is None:
                return
            yield batch

    @contextlib.contextmanager
    def pause(self, name: str) -> Iterator[None]:
        """The time within is no training: one of `PAUSES`."""
        start = time.perf_counter()
        yield
        self._paused[name] += time.perf_counter() - start

    def measure(self, step: int) -> dict[str, float]:
        """Speed and where the time went since the last call.

        Returns:
          'images_per_second', pauses left out; 'mfu', that speed over the peak speed, where it is
          known; and shares of all the time: 'data_wait', 'checkpoint_wait' and 'evaluation_wait'.
          The rest is the steps themselves.
        """
        now = time.perf_counter()
        seconds = now - self._last_time
        waits = {"data_wait": self._waited / seconds}
        waits |= {f"{name}_wait": paused / seconds for name, paused in self._paused.items()}
        steps, training = step - self._last_step, seconds - sum(self._paused.values())
        self._last_step, self._last_time = step, now
        self._waited, self._paused = 0.0, dict.fromkeys(PAUSES, 0.0)
        self._training_steps += steps
        self._training_seconds += training
        speed = steps * self._batch_size / training
        mfu = {"mfu": speed / self._peak_speed} if self._peak_speed else {}
        return {"images_per_second": speed, **mfu, **waits}

    def show(self, step: int, values: dict[str, float]) -> None:
        """Prints one update."""
        mfu = f"  mfu {100 * values['mfu']:.1f} %" if "mfu" in values else ""
        text = (
            f"step {step}/{self._num_steps}  epoch {step / self._steps_per_epoch:.1f}  "
            f"loss {values['train/loss']:.4f}  lr {values['train/learning_rate']:.2e}  "
            f"{values['images_per_second']:.0f} images/s{mfu}  {self._time_left(step)} left"
        )
        if self._bar:
            done = BAR_WIDTH * step // self._num_steps
            bar = "█" * done + "░" * (BAR_WIDTH - done)
            print(f"\r\x1b[K{bar} {text}", end="", flush=True)
        else:
            print(text, flush=True)

    def note(self, text: str) -> None:
        """Prints a line of its own, above the bar."""
        print(f"\r\x1b[K{text}" if self._bar else text, flush=True)

    def _time_left(self, step: int) -> str:
        seconds = self._training_seconds / self._training_steps * (self._num_steps - step)
        minutes, seconds = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
