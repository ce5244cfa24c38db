"""A trace of a few training steps, for XProf (TensorBoard) and Perfetto."""

import re
from pathlib import Path

import jax

from structinit_jax.errors import InputError


class StepTrace:
    """Traces the steps `first` to `last`, both included, on the first process.

    Args:
      folder: gets `plugins/profile/<time>/` with the files of both viewers.
      first: the first step to trace; None for no trace.
      last: the last one.
    """

    def __init__(self, folder: Path, first: int | None, last: int | None):
        self._folder = folder
        self._first, self._last = (first, last) if jax.process_index() == 0 else (None, None)

    def before(self, step: int) -> None:
        """To be called before the step is dispatched."""
        if step == self._first:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # every Python call would slow the steps and bury them
            jax.profiler.start_trace(
                self._folder, create_perfetto_trace=True, profiler_options=options
            )

    def after(self, step: int, state) -> str | None:
        """Ends the trace when the last step's state is there; returns a note then."""
        if step != self._last:
            return None
        jax.block_until_ready(state)
        jax.profiler.stop_trace()
        return (
            f"traced steps {self._first} to {self._last}: {self._folder}; open "
            "perfetto_trace.json.gz at https://ui.perfetto.dev, or the folder in TensorBoard with "
            "xprof"
        )


def parse_steps(text: str | None) -> tuple[int, int] | tuple[None, None]:
    """Reads `--profile_steps`, such as '10:13', as its first and last step.

    Raises:
      InputError: if it is of another form.
    """
    if text is None:
        return None, None
    match = re.fullmatch(r"(\d+):(\d+)", text)
    first, last = map(int, match.groups()) if match else (0, 0)
    if not 1 <= first <= last:
        raise InputError(
            f"--profile_steps={text} needs to be the first and the last step to trace, such as "
            "10:13; steps count from 1, and the first of a run is slow for its own reasons"
        )
    return first, last


def check_steps(first: int | None, last: int | None, start_step: int, num_steps: int) -> None:
    """Raises `InputError` for steps that a run from `start_step` to `num_steps` does not take."""
    if first is not None and not start_step < first <= last <= num_steps:
        raise InputError(
            f"--profile_steps={first}:{last}: this run takes the steps {start_step + 1} to "
            f"{num_steps}; choose among them"
        )
