"""Progress display: a bar on a terminal, plain lines in a log file."""

import contextlib
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

BAR_WIDTH = 24
WAITS = ("data", "checkpoint", "evaluation")


class Progress:
    """Prints step, epoch, metrics, speed and remaining time.

    On a terminal the line is rewritten in place, after a progress bar. By hand, since tqdm counts
    evaluations as training time and writes no plain lines to a log file.

    Args:
      start_step: Steps taken before this run.
      num_steps: Total number of steps.
      steps_per_epoch: May be fractional.
      batch_size: Images per step.
      peak_speed: Images per second at the peak of the devices, for the model FLOPs utilization
        (MFU). None if it is unknown.
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
        self._waited = dict.fromkeys(WAITS, 0.0)

    @contextlib.contextmanager
    def wait(self, name: str) -> Iterator[None]:
        """Counts the time within the context as one of `WAITS`."""
        start = time.perf_counter()
        yield
        self._waited[name] += time.perf_counter() - start

    def watch(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yields the batches, and counts the time until each is available as waiting for data."""
        batches = iter(batches)
        while True:
            with self.wait("data"):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def measure(self, step: int) -> dict[str, float]:
        """Measures speed and waiting times since the last call.

        Returns:
          'images_per_second', without checkpoints and evaluations; 'mfu', this speed as a fraction
          of the peak speed, if that is known; and 'data_wait', 'checkpoint_wait' and
          'evaluation_wait' as fractions of the elapsed time.
        """
        now = time.perf_counter()
        seconds = now - self._last_time
        waits = {f"{name}_wait": waited / seconds for name, waited in self._waited.items()}
        training = seconds - self._waited["checkpoint"] - self._waited["evaluation"]
        steps = step - self._last_step
        self._last_step, self._last_time = step, now
        self._waited = dict.fromkeys(WAITS, 0.0)
        self._training_steps += steps
        self._training_seconds += training
        speed = steps * self._batch_size / training
        mfu = {"mfu": speed / self._peak_speed} if self._peak_speed else {}
        return {"images_per_second": speed, **mfu, **waits}

    def show(self, step: int, values: dict[str, float]) -> None:
        """Prints the metrics of a step."""
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
        """Prints a separate line, above the bar."""
        print(f"\r\x1b[K{text}" if self._bar else text, flush=True)

    def _time_left(self, step: int) -> str:
        seconds = self._training_seconds / self._training_steps * (self._num_steps - step)
        minutes, seconds = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
