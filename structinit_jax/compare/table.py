"""The live table of a comparison on a terminal, and plain lines in a log."""

import sys
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from structinit_jax.compare import results

LOG = "log.txt"


class Progress:
    """Shows all settings with their finished runs and the time left.

    Args:
      workdir: The workdir of the comparison.
      done: Fraction of steps that were done before, from 0 to 1, by (setting, seed).
      num_steps: Steps of a run, by setting.
    """

    def __init__(
        self,
        workdir: Path,
        done: Mapping[tuple[str, int], bool],
        num_steps: Mapping[str, int],
    ):
        self._workdir = workdir
        self._num_steps = num_steps
        self._state = {run: "done" if finished else "" for run, finished in done.items()}
        self._left = sum(num_steps[name] for (name, _), finished in done.items() if not finished)
        self._begun = time.perf_counter()
        self._trained = 0
        self._console = Console(file=sys.stdout)  # not that of the runs, which goes to their logs
        self._live = Live(
            get_renderable=self.render, console=self._console, refresh_per_second=1, transient=True
        )

    def __enter__(self) -> "Progress":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_) -> None:
        if self._console.is_terminal:
            self._live.stop()
        self._console.print(self.render())

    def start(self, setting: str, seeds) -> None:
        """Marks runs as running."""
        self._state |= {(setting, seed): "running" for seed in seeds}

    def finish(self, setting: str, seed: int, error: str = "") -> None:
        """Marks a run as done or failed, and prints a line."""
        self._state[setting, seed] = "failed" if error else "done"
        self._trained += self._num_steps[setting]
        if error:
            text = f"failed: {error}"
        else:
            accuracy = results.read(self._workdir).accuracies(setting)[seed]
            text = f"test accuracy {100 * accuracy:.2f} %"
        self._console.print(f"{setting} seed {seed}  {text}", markup=False, highlight=False)

    def render(self) -> Table:
        """Draws the table from the files of the runs."""
        comparison = results.read(self._workdir)
        rows = Table(caption=self._caption())
        for header, justify in (
            *(("setting", "left"), ("done", "right"), ("test accuracy, %", "right")),
            ("", "left"),
        ):
            rows.add_column(header, justify=justify, no_wrap=header != "")
        for name in dict.fromkeys(setting for setting, _ in self._state):
            states = {seed: s for (setting, seed), s in self._state.items() if setting == name}
            accuracies = [*comparison.accuracies(name).values()]
            failed = sum(state == "failed" for state in states.values())
            running = [seed for seed, state in states.items() if state == "running"]
            note = f"[red]{failed} failed[/red]" if failed else ""
            if running:
                note = f"seed {', '.join(map(str, running))}: {self._last_line(name, running[0])}"
            rows.add_row(
                name,
                f"{sum(state == 'done' for state in states.values())}/{len(states)}",
                percent(accuracies) if accuracies else "",
                note,
            )
        return rows

    def _last_line(self, setting, seed):
        path = results.run_folder(self._workdir, setting, seed) / LOG
        lines = path.read_text().splitlines() if path.exists() else []
        return lines[-1] if lines else "starting"

    def _caption(self):
        """Extrapolates the time of the steps that have been taken."""
        running = [run for run, state in self._state.items() if state == "running"]
        info = results.read(self._workdir).info["settings"]
        partial = 0
        for setting, seed in running:
            lines = results.Run(self._workdir, setting, seed, info[setting]).lines
            partial += lines[-1]["step"] if lines else 0
        trained = self._trained + partial
        if not self._left:
            return "all runs had finished before"
        elapsed = time.perf_counter() - self._begun
        left = "unknown"
        if trained:
            left = duration(elapsed / trained * max(0, self._left - trained))
        return f"{duration(elapsed)} elapsed, {left} left"


def percent(accuracies) -> str:
    """Formats accuracies from 0 to 1 as mean and standard deviation in percent."""
    mean, deviation = results.mean_and_deviation([100 * value for value in accuracies])
    return f"{mean:.2f}" if deviation is None else f"{mean:.2f} ± {deviation:.2f}"


def duration(seconds: float) -> str:
    """Formats a time, for example '1:02:03'."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
