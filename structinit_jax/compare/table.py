"""Shows the progress of a comparison: a live table on a terminal, plain lines in a log."""

import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from structinit_jax.compare import results
from structinit_jax.training.metrics import format_duration

LOG = "log.txt"


class Progress:
    """Shows the settings with their finished runs, the accuracies and the time left.

    Args:
      comparison: The runs as they are before the first of this command starts.
      settings: The settings that this command trains.
      seeds: Its seeds.
    """

    def __init__(
        self, comparison: results.Comparison, settings: Sequence[str], seeds: Sequence[int]
    ):
        self._workdir, self._facts = comparison.workdir, comparison.info["settings"]
        self._metric = comparison.metric
        # Of the seeds of this command alone, like the counts beside them.
        self._accuracies = {
            name: {k: v for k, v in comparison.accuracies(name).items() if k in seeds}
            for name in settings
        }
        self._states = {
            name: {seed: "done" if seed in self._accuracies[name] else "" for seed in seeds}
            for name in settings
        }
        # Of runs that earlier commands have begun, which this one resumes.
        self._first_steps = {
            (name, run.seed): _last_step(run) for name in settings for run in comparison.runs[name]
        }
        self._steps_to_do = sum(
            self._facts[name]["num_steps"] - self._first_steps[name, seed]
            for name, states in self._states.items()
            for seed, state in states.items()
            if state != "done"
        )
        self._steps_done = 0
        self._begun = time.perf_counter()
        # Not what sys.stdout is later: the output of the runs goes to their logs.
        self._console = Console(file=sys.stdout)
        self._live = Live(
            get_renderable=self._render, console=self._console, refresh_per_second=1, transient=True
        )

    def __enter__(self) -> "Progress":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_) -> None:
        if self._console.is_terminal:
            self._live.stop()
        self._console.print(self._render())

    def start(self, setting: str, seeds: Sequence[int]) -> None:
        """Marks runs as running."""
        self._states[setting] |= dict.fromkeys(seeds, "running")

    def finish(self, setting: str, seed: int, error: str = "") -> None:
        """Marks a run as done or failed, and prints a line."""
        self._states[setting][seed] = "failed" if error else "done"
        self._steps_done += self._facts[setting]["num_steps"] - self._first_steps[setting, seed]
        text = f"failed: {error}"
        if not error:
            accuracy = results.Run(self._workdir, setting, seed, self._facts[setting]).accuracy
            self._accuracies[setting][seed] = accuracy
            text = f"{self._facts[setting]['test_name']} accuracy {100 * accuracy:.2f} %"
        line = f"{setting} seed {seed}  {text}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _render(self) -> Table:
        table = Table(caption=self._time_left())
        table.add_column("setting", overflow="fold")
        table.add_column("done", justify="right", no_wrap=True)
        table.add_column(escape(f"{self._metric}, %"), justify="right", no_wrap=True)
        table.add_column("now")
        for name, states in self._states.items():
            kinds = [*states.values()]
            running = [seed for seed, state in states.items() if state == "running"]
            accuracies = [*self._accuracies[name].values()]
            notes = [f"[red]{kinds.count('failed')} failed[/red]"] if "failed" in kinds else []
            if running:
                line = escape(self._last_line(name, running[0]))
                notes.append(f"seed {', '.join(map(str, running))}: {line}")
            table.add_row(
                escape(name),
                f"{kinds.count('done')}/{len(kinds)}",
                percent(accuracies) if accuracies else "",
                "; ".join(notes),
            )
        return table

    def _last_line(self, setting, seed):
        path = results.run_folder(self._workdir, setting, seed) / LOG
        lines = path.read_text().splitlines() if path.exists() else []
        return lines[-1] if lines else "starting"

    def _time_left(self):
        """Extrapolates from the steps that this command has taken."""
        steps = self._steps_done
        for setting, states in self._states.items():
            for seed in (seed for seed, state in states.items() if state == "running"):
                run = results.Run(self._workdir, setting, seed, self._facts[setting])
                steps += max(0, _last_step(run) - self._first_steps[setting, seed])
        elapsed = time.perf_counter() - self._begun
        left = "unknown time"
        if steps or not self._steps_to_do:
            left = format_duration(elapsed / max(1, steps) * max(0, self._steps_to_do - steps))
        return f"{format_duration(elapsed)} elapsed, {left} left"


def _last_step(run: results.Run) -> int:
    return run.lines[-1]["step"] if run.lines else 0


def percent(accuracies: Sequence[float]) -> str:
    """Formats accuracies from 0 to 1 as mean and standard deviation in percent."""
    mean, deviation = results.mean_and_deviation([100 * value for value in accuracies])
    return f"{mean:.2f}" if deviation is None else f"{mean:.2f} ± {deviation:.2f}"
