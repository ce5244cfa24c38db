"""Runs the public command with many argument lists in turn, each in a fork of this process.

Reads a JSON list of argument lists and prints a JSON list of [exit code, stdout, stderr]. The
imports, which take most of a command's time, are done once.
"""

import json
import os
import runpy
import sys
import tempfile
import threading

from structinit_jax import dry_run, train  # noqa: F401


def run(arguments: list[str]) -> tuple[int, str, str]:
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        child = os.fork()
        if child == 0:
            os.dup2(stdout.fileno(), 1)
            os.dup2(stderr.fileno(), 2)
            threading.Timer(60, os._exit, (124,)).start()  # it trains: no mistake was found
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
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        stdout.seek(0)
        stderr.seek(0)
        return os.waitstatus_to_exitcode(status), stdout.read(), stderr.read()


if __name__ == "__main__":
    results = [run(arguments) for arguments in json.load(sys.stdin)]
    json.dump(results, sys.__stdout__)
