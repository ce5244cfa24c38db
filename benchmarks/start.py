"""Times the start of a run: from the command to the end of the first training step.

    python benchmarks/start.py --out=benchmarks/results/start.json

A cold run starts with an empty compilation cache, a warm run with that of the preceding cold run.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import jax

CONFIG = "configs/vit_t_digits.py"
# Start of an output line -> name of the time at which the line appears.
MARKS = {
    "devices:": "set up",
    "attention_init": "solved",
    "training on": "train step compiled",
    "first step after": "first step",
}
# Some installers do not compile bytecode, and imports take three times as long without it. As on a
# user's machine, the first import writes it.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
ROUNDS = 5


def time_start(cache: str) -> dict[str, float]:
    """Starts a run and ends it after the first step; returns seconds since the command."""
    environment = dict(ENVIRONMENT, XDG_CACHE_HOME=cache, PYTHONUNBUFFERED="1")
    with tempfile.TemporaryDirectory() as workdir:
        command = [sys.executable, "-m", "structinit_jax.main"]
        command += [f"--config={CONFIG}", f"--workdir={workdir}"]
        begin = time.perf_counter()
        seconds = {}
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, text=True
        ) as process:
            for line in process.stdout:
                for mark, name in MARKS.items():
                    if line.lstrip("\r").startswith(mark):
                        seconds[name] = time.perf_counter() - begin
                if "first step" in seconds:
                    break
            process.kill()
    if "first step" not in seconds:
        raise RuntimeError("the run ended before its first step")
    return seconds


def main() -> None:
    """Prints the report, and writes it to --out."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", default=None, help="JSON file to write.")
    args = parser.parse_args()

    runs = {"cold": [], "warm": []}
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as cache:
            runs["cold"].append(time_start(cache))
            runs["warm"].append(time_start(cache))
    summary = {
        kind: {
            name: round(statistics.median(run[name] for run in kind_runs), 2)
            for name in MARKS.values()
        }
        for kind, kind_runs in runs.items()
    }
    report = {
        "config": CONFIG,
        "cpus": os.cpu_count(),
        "jax": jax.__version__,
        "rounds": ROUNDS,
        "seconds since the command, median": summary,
        "first step, range": {
            kind: [round(f(run["first step"] for run in kind_runs), 2) for f in (min, max)]
            for kind, kind_runs in runs.items()
        },
    }
    text = json.dumps(report, indent=2)
    print(text)
    if args.out:
        with open(args.out, "w") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main()
