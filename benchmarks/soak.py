"""Kills a run at random moments and compares the result with an undisturbed run.

    python benchmarks/soak.py --out=soak.json

The public command trains a tiny ViT on digits and is killed (SIGKILL) fifty times: sometimes while
it starts or restores, mostly while it trains and writes checkpoints. Each time, the same command
resumes the run. At the end, all arrays of the last checkpoint (optimizer state included) and all
lines of metrics.jsonl (except for timings) must be bit-identical to those of the undisturbed run.
"""

import argparse
import collections
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from structinit_jax.training import checkpoint

ROOT = Path(__file__).parent.parent
CONFIG = [
    "--config=configs/vit_t_digits.py",
    "--config.model.width=32",
    "--config.model.depth=2",
    "--config.model.num_heads=2",
    "--config.model.patch_size=2",
    "--config.model.drop_path=0.1",
    "--config.augment.mixup=0.8",
    "--config.checkpoint_every_steps=15",
    "--config.log_every_steps=10",
    "--config.eval_every_epochs=10",
]
KILLS = 50
STEPS = 2000
EARLY = 0.2  # probability of a kill before the first step
SKIPPED = "note: skipping checkpoint"  # start of a line about a damaged checkpoint
TIMES = ("images_per_second", "data_wait", "checkpoint_wait", "evaluation_wait")
TIMES += ("init/seconds", "init/compile_seconds")


class Run:
    """A process running the command; its output goes to a file that can be read meanwhile."""

    def __init__(self, folder: Path, name: str, steps: int):
        self.workdir = folder / name
        self._output = folder / f"{name}.txt"
        self._file = self._output.open("w")
        self.began = time.perf_counter()
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-u", "-m", "structinit_jax.main", *CONFIG),
                *(f"--config.num_steps={steps}", f"--workdir={self.workdir}"),
            ],
            cwd=ROOT,
            stdout=self._file,
            stderr=subprocess.STDOUT,
        )

    def text(self) -> str:
        """Returns the output so far."""
        return self._output.read_text()

    def wait_for(self, text: str) -> float:
        """Waits until a text is printed or the process ends; returns the seconds since start."""
        while text not in self.text() and self.process.poll() is None:
            time.sleep(0.01)
        return time.perf_counter() - self.began

    def end(self, kill: bool) -> None:
        """Waits for the process to end, or kills it; exits on an unexpected status."""
        if kill:
            self.process.kill()
        code = self.process.wait()
        self._file.close()
        if code != (-9 if kill else 0):
            sys.exit(f"a run ended with {code}:\n{self.text()[-2000:]}")


def find_moment(run: Run) -> str:
    """Infers from the files of a killed run what it was doing."""
    if "first step after" not in run.text():
        return "starting"
    newest = checkpoint.step_folders(run.workdir / "checkpoints")[:1]
    unfinished = newest and not (newest[0] / checkpoint.RUN_FILE).exists()
    return "writing a checkpoint" if unfinished else "training"


def soak(folder: Path, kills: int, steps: int) -> tuple[dict, Path, Path]:
    """Runs both and prints each kill; returns the kill statistics and the two workdirs."""
    whole = Run(folder, "whole", steps)
    start = whole.wait_for("first step after")
    whole.end(kill=False)
    training = time.perf_counter() - whole.began - start
    print(f"undisturbed: {start:.1f} s to the first step, {training:.1f} s from it", flush=True)

    moments = random.Random(0)
    rows, damages = [], []
    while len(rows) < kills:
        run = Run(folder, "killed", steps)
        if rows and moments.random() < EARLY:
            time.sleep(moments.uniform(0, start))
        else:
            start = run.wait_for("first step after")  # with compiled programs in the cache
            time.sleep(moments.uniform(0, training / kills))  # leaves about half of the steps
        if run.process.poll() is not None:
            sys.exit(f"the run ended after {len(rows)} kills; give more --steps\n{run.text()}")
        run.end(kill=True)
        text = run.text()
        damages += [line for line in text.splitlines() if line.startswith(SKIPPED)]
        resumed = re.search(r"resumed from step (\d+) ", text)
        row = {
            "killed_after_s": round(time.perf_counter() - run.began, 2),
            "while": find_moment(run),
            # None: no checkpoint yet, or killed before restoring one.
            "resumed_from": int(resumed[1]) if resumed else None,
        }
        rows.append(row)
        print(
            f"kill {len(rows):2}  {row['killed_after_s']:5.2f} s after the start, resumed from "
            f"{row['resumed_from']}, {row['while']}",
            flush=True,
        )
    run = Run(folder, "killed", steps)
    run.end(kill=False)
    damages += [line for line in run.text().splitlines() if line.startswith(SKIPPED)]
    return {"kills": rows, "set_aside": len(damages)}, whole.workdir, run.workdir


def final_state(workdir: Path) -> tuple[int, dict[str, bytes]]:
    """Returns the step and arrays of the newest checkpoint."""
    newest = checkpoint.step_folders(workdir / "checkpoints")[0]
    with ocp.PyTreeCheckpointer() as reader:
        leaves = jax.tree.leaves_with_path(reader.restore(newest / "state"))
    return int(newest.name), {
        jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in leaves
    }


def lines_without_times(workdir: Path) -> list[dict]:
    """Returns metrics.jsonl without the fields that depend on speed."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines]


def main() -> None:
    """Prints the results and writes them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="soak.json", help="JSON file (default: soak.json)")
    parser.add_argument("--kills", type=int, default=KILLS, help="how often the run is killed")
    parser.add_argument("--steps", type=int, default=STEPS, help="length of the run")
    arguments = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        results, whole, killed = soak(Path(folder), arguments.kills, arguments.steps)
        (_, expected), (step, state) = final_state(whole), final_state(killed)
        assert expected.keys() == state.keys()
        results |= {
            "step": step,
            "arrays": len(state),
            "arrays_bit_equal": sum(state[name] == expected[name] for name in state),
            "metrics_equal": lines_without_times(killed) == lines_without_times(whole),
        }
    results["seconds"] = round(time.perf_counter() - began)
    results["while"] = dict(collections.Counter(row["while"] for row in results["kills"]))
    moments = ", ".join(f"{count} {moment}" for moment, count in results["while"].items())
    print(
        f"{arguments.kills} kills in {results['seconds']} s: {moments}; {results['set_aside']} "
        f"unfinished checkpoints set aside\n"
        f"step {results['step']}: {results['arrays_bit_equal']} of {results['arrays']} arrays are "
        "bit-equal to the undisturbed run's; metrics.jsonl is "
        f"{'equal' if results['metrics_equal'] else 'NOT equal'}"
    )
    Path(arguments.out).write_text(json.dumps(results, indent=2) + "\n")
    print(f"wrote {arguments.out}")
    if results["arrays_bit_equal"] != results["arrays"] or not results["metrics_equal"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
