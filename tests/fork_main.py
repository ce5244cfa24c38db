"""Runs commands of the package in forks of a server that has already imported it.

Imports take most of a short command's time. Like `python -m`, a fork is a process with its own
signals, exit status, output and devices.
"""

import atexit
import contextlib
import multiprocessing
import os
import random
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jaxlib.version

os.environ.setdefault("MPLBACKEND", "Agg")  # before the server imports matplotlib
ROOT = Path(__file__).parent.parent
CONTEXT = multiprocessing.get_context("forkserver")
# Modules that commands import when they need them; not those that are commands themselves.
MODULES = [
    "structinit_jax.dry_run",
    "structinit_jax.training.train",
    "structinit_jax.figures",
    "structinit_jax.analysis.figures",
    "structinit_jax.compare.grid",
    "orbax.checkpoint",
    "tensorboardX",
]
CONTEXT.set_forkserver_preload(["pytest", *MODULES])
# The tests spend most of their time compiling; the first and last flags cut it to a quarter. The
# second disables fused multiply-add instructions, so that programs do not round differently. The
# third keeps programs whole: splitting them costs more time than compiling in parallel saves.
FAST_COMPILATION = (
    "--xla_backend_optimization_level=0 --xla_cpu_max_isa=AVX "
    "--xla_cpu_parallel_codegen_split_count=1"
)
if jaxlib.version.__version_info__ < (0, 11):  # later versions abort on this flag
    FAST_COMPILATION += " --xla_cpu_use_fusion_emitters=false"
# For every command; conftest.py adds the compilation cache directory.
ENVIRONMENT = {"XLA_FLAGS": FAST_COMPILATION, "JAX_PLATFORMS": "cpu"}
TINY = [  # arguments for a model that compiles in a second or two
    "--config=configs/vit_t_digits.py",
    "--config.model.width=16",
    "--config.model.depth=1",
    "--config.model.num_heads=2",
    "--config.model.patch_size=2",
]


class Command:
    """A running `python -m structinit_jax.main`.

    Args:
      arguments: What follows on the command line.
      module: The command's module, or the path of a script.
      folder: The working directory.
      environment: Variables that differ from those of this process.
    """

    def __init__(self, *arguments, module="structinit_jax.main", folder=ROOT, **environment):
        self.arguments = list(map(str, arguments))
        self.directory = tempfile.TemporaryDirectory()
        self.paths = [Path(self.directory.name, name) for name in ("stdout", "stderr")]
        arguments = module, self.arguments, self.paths, folder, ENVIRONMENT | environment
        self.process = CONTEXT.Process(target=_run_module, args=arguments, daemon=True)
        self.process.start()

    def output(self):
        """Returns what the command has printed so far."""
        return self.paths[0].read_text() if self.paths[0].exists() else ""

    def wait_for(self, text, path=None, timeout=300):
        """Waits until a file, by default the command's output, contains the text."""
        path = path or self.paths[0]
        deadline = time.monotonic() + timeout
        while not (path.exists() and text in path.read_text()):
            assert self.process.is_alive(), self.wait().stderr
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def kill(self, number):
        """Sends a signal."""
        os.kill(self.process.pid, number)

    def wait(self, timeout=300):
        """Returns the finished command as `subprocess.run` does."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
            raise subprocess.TimeoutExpired(self.arguments, timeout)
        texts = [path.read_text() if path.exists() else "" for path in self.paths]
        self.directory.cleanup()
        return subprocess.CompletedProcess(self.arguments, self.process.exitcode, *texts)


def run(*arguments, timeout=300, exit_code=0, **options):
    """Runs a command to its end and checks its exit code; see `Command`."""
    result = Command(*arguments, **options).wait(timeout)
    assert result.returncode == exit_code, (result.returncode, result.args, result.stderr)
    return result


def error_of(*arguments, **options):
    """Runs a command that a mistake ends, and returns the one error that it prints."""
    result = run(*arguments, exit_code=2, **options)
    assert "Traceback" not in result.stderr
    (message,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    return message


def free_port():
    """Returns a port of 127.0.0.1 on which a command can listen.

    It is below the ports of outgoing connections, which could take it before the command does.
    The choice is random because the coordinators of two tests would share a port without an error.
    """
    for port in random.sample(range(20_000, 32_000), 100):
        with contextlib.closing(socket.socket()) as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no free port found")


def _run_module(module, arguments, paths, folder, environment):
    for number, path in enumerate(paths, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, closefd=False) for n in (1, 2))
    os.environ.update(environment)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    sys.argv = [module, *arguments]
    try:
        if module.endswith(".py"):
            runpy.run_path(module, run_name="__main__")
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # multiprocessing skips these; JAX disconnects here
