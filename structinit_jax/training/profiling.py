"""Traces of training steps, recompilations and device memory."""

import re

import jax
from etils import epath

from structinit_jax.errors import InputError

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class StepTrace:
    """Records a JAX profiler trace of some steps, on the first process.

    clu.periodic_actions.Profile would import TensorFlow, and writes no Perfetto file.

    Args:
      directory: Receives `plugins/profile/<time>/` with files for XProf and Perfetto.
      steps: First and last step to trace, or None for no trace.
    """

    def __init__(self, directory: epath.PathLike, steps: tuple[int, int] | None):
        self._directory = str(directory)
        traces = steps is not None and jax.process_index() == 0
        self._first, self._last = steps if traces else (None, None)
        self._running = False

    def before(self, step: int) -> None:
        """Starts the trace before the first step is dispatched."""
        if step == self._first:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # tracing Python calls would slow the steps down
            jax.profiler.start_trace(
                self._directory, create_perfetto_trace=True, profiler_options=options
            )
            self._running = True

    def after(self, step: int, state) -> str | None:
        """Stops the trace when the last step has finished, and returns a message then."""
        if step != self._last:
            return None
        jax.block_until_ready(state)
        self.close()
        return (
            f"traced steps {self._first} to {self._last} to {self._directory}: open "
            "perfetto_trace.json.gz at https://ui.perfetto.dev, or the directory with XProf"
        )

    def close(self) -> None:
        """Writes the trace, also of a run that ends before its last step."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()


def parse_steps(text: str | None) -> tuple[int, int] | None:
    """Parses the flag --profile_steps, for example '10:13', or None.

    Raises:
      InputError: The text is not a range of steps.
    """
    if text is None:
        return None
    match = re.fullmatch(r"(\d+):(\d+)", text)
    first, last = map(int, match.groups()) if match else (0, 0)
    if not 1 <= first <= last:
        raise InputError(
            f"--profile_steps={text} must be the first and the last step to trace, counted from "
            "1, for example 10:13; the first steps of a run are slower than the others"
        )
    return first, last


def steps_to_trace(
    steps: tuple[int, int] | None, start_step: int, num_steps: int
) -> tuple[int, int] | None:
    """Returns the steps that a run from `start_step` to `num_steps` traces.

    None if it resumes after the first of them: a command that is repeated to resume names steps
    that are done.

    Raises:
      InputError: The run ends before the last of them.
    """
    if steps is None:
        return None
    first, last = steps
    if last > num_steps:
        raise InputError(
            f"--profile_steps={first}:{last}: this run takes steps {start_step + 1} to "
            f"{num_steps}; choose among them"
        )
    if first <= start_step:
        print(
            f"note: --profile_steps={first}:{last}: nothing is traced, since the run resumes after "
            f"step {start_step}"
        )
        return None
    return steps


class RecompilationWatch:
    """A context that reports what JAX compiles after `start`, when all should be compiled."""

    def __init__(self):
        self._counting = False
        self._names: list[str] = []

    def __enter__(self):
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *exception):
        self._counting = False
        # JAX 0.7 cannot unregister a listener, which then stays and counts nothing.
        if hasattr(jax.monitoring, "unregister_event_duration_listener"):
            jax.monitoring.unregister_event_duration_listener(self._listen)

    def start(self) -> None:
        """Starts counting, if it has not started yet."""
        self._counting = True

    def report(self) -> str | None:
        """Returns a warning about the compilations since the last call, or None."""
        names, self._names = self._names, []
        if not names:
            return None
        return (
            f"warning: {len(names)} recompilations, of {', '.join(sorted(set(names)))}: a shape or "
            "a Python value differs between calls, and the devices are idle during compilation"
        )

    def _listen(self, event: str, _duration: float, **details) -> None:
        if self._counting and event == COMPILE_EVENT:
            self._names.append(str(details.get("fun_name", "a function")))


def describe_memory() -> str:
    """Formats the memory use of this process's first device, for the end of a message.

    For example ', device memory 1.20 GiB in use, peak 3.40 of 79.6 GiB'. The peak is since the
    process started. Empty on backends that do not report memory, such as CPUs.
    """
    stats = jax.local_devices()[0].memory_stats()
    if not stats or "peak_bytes_in_use" not in stats:
        return ""
    in_use, peak = (stats[name] / 2**30 for name in ("bytes_in_use", "peak_bytes_in_use"))
    limit = f" of {stats['bytes_limit'] / 2**30:.1f}" if "bytes_limit" in stats else ""
    return f", device memory {in_use:.2f} GiB in use, peak {peak:.2f}{limit} GiB"
