"""Runs the public command in other processes."""

import atexit
import multiprocessing
import os
import runpy
import sys
from pathlib import Path

# Forks of a process that has imported the package, but has not initialized JAX, start at once.
FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(["structinit_jax.dry_run", "structinit_jax.train"])


class Command:
    """A running `python -m structinit_jax.main` in the root of the repository.

    Args:
      arguments: Its arguments.
      environment: Changes to the environment.
      folder: Directory for its output.
    """

    def __init__(self, arguments, environment, folder):
        number = len(list(folder.iterdir()))
        self._out, self._err = folder / f"{number}.out", folder / f"{number}.err"
        self._out.touch()
        options = (list(arguments), environment, self._out, self._err)
        self.process = FORK.Process(target=_run, args=options, daemon=True)
        self.process.start()

    def wait(self, timeout=300):
        """Waits for the end; returns exit code, stdout and stderr."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        return self.process.exitcode, self._out.read_text(), self._err.read_text()


def _run(arguments, environment, out: Path, err: Path):
    os.chdir(Path(__file__).parent.parent)
    os.environ.update(environment)
    for number, path in ((1, out), (2, err)):
        with path.open("w") as file:
            os.dup2(file.fileno(), number)
    sys.argv = ["main", *arguments]
    code = 1
    try:
        runpy.run_module("structinit_jax.main", run_name="__main__")
        code = 0
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        else:
            code = error.code or 0
    except BaseException:
        import traceback

        traceback.print_exc()
    atexit._run_exitfuncs()  # JAX leaves the other processes; multiprocessing would not run it
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
