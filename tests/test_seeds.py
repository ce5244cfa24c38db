"""Seeds of a setting that one program trains."""

import itertools
import json
import shutil

import jax
import pytest

from structinit_jax import evaluate
from structinit_jax.compare import seeds
from structinit_jax.errors import StoppedError
from structinit_jax.training import checkpoint, manifest
from structinit_jax.training.workdir import StopRequest

pytestmark = pytest.mark.usefixtures("library_promotion")


class StopAfter(StopRequest):
    def __init__(self, step):
        self.step = step

    def reached(self, step):
        return step == self.step


def read_metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_seeds_together_give_what_single_runs_give(run_config, finished_run, tmp_path, monkeypatch):
    folder = tmp_path / "impulse"

    # Of seeds 0 and 1 after steps 6 and 12.
    accuracies = itertools.cycle([0.9, 0.3, 0.5, 0.7])
    monkeypatch.setattr(seeds, "deciding_accuracy", lambda *_: next(accuracies))

    def start(stop_after, seed_list=(0, 1)):
        stop = StopAfter(stop_after)
        return seeds.train_together(run_config, seed_list, folder, jax.devices()[0], stop)

    with pytest.raises(StoppedError, match="after step 7 of 12"):
        next(start(7))
    stopped = shutil.copytree(folder, tmp_path / "stopped")
    ends = start(None)
    assert next(ends) == (0, "")
    assert (folder / "together").exists()  # until all seeds are recorded as done
    assert dict(ends) == {1: ""}
    assert not (folder / "together").exists()
    for seed, best in {0: 6, 1: 12}.items():
        directory = folder / f"seed_{seed}" / "checkpoints"
        assert checkpoint.find_step(directory, "best") == best
        assert checkpoint.find_step(directory) == 12
    ours, theirs = read_metrics(folder / "seed_0"), read_metrics(finished_run.workdir)
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        for name in mine.keys() & {"train/loss", "test[:90]/loss", "test[:90]/ema_loss"}:
            assert mine[name] == pytest.approx(other[name], rel=1e-4)
    assert read_metrics(folder / "seed_1")[1]["train/loss"] != ours[1]["train/loss"]
    # Every seed is a workdir for the other commands.
    for seed in (0, 1):
        evaluated = evaluate.evaluate_checkpoint(
            seeds.with_seed(run_config, seed), folder / f"seed_{seed}"
        )
        last = read_metrics(folder / f"seed_{seed}")[-1]
        assert evaluated["test[:90]/loss"] == pytest.approx(last["test[:90]/loss"], rel=1e-5)

    # From step 7 again, as after a kill before the shared checkpoint of step 12 was complete. Now
    # seed 1 has a loss that is not finite.
    (stopped / "together").rename(folder / "together")
    calls = []

    def check_finite(*args):
        calls.append(args)
        if len(calls) % 2 == 0:
            raise StoppedError("step 8: loss nan\nnorms of its layers", exit_code=1)
        return ["step 8: loss inf: skipped"]

    monkeypatch.setattr(seeds, "check_finite", check_finite)
    assert dict(start(None)) == {0: "", 1: "step 8: loss nan"}
    log = (folder / "seed_0" / "log.txt").read_text()
    assert "seed 0: step 8: loss inf: skipped\nseed 1: step 8: loss nan\nnorms of" in log
    assert read_metrics(folder / "seed_0")[-1] == ours[-1]
    assert max(line["step"] for line in read_metrics(folder / "seed_1")) < 8
    # That of step 12 was removed, which seed 1 has not reached again.
    assert checkpoint.find_step(folder / "seed_1" / "checkpoints") is None


def test_seeds_that_do_not_fit_into_memory_are_trained_in_parts(tiny_config, tmp_path, monkeypatch):
    trained = []

    class TwoAtMost:
        def __init__(self, config, seeds, *_):
            self.seeds = seeds

        def fits(self):
            return len(self.seeds) <= 2

        def train(self, stop):
            trained.append(self.seeds)
            yield from ((seed, "failed" if seed == self.seeds[0] else "") for seed in self.seeds)

    monkeypatch.setattr(seeds, "_SharedRun", TwoAtMost)

    def train():
        trained.clear()
        arguments = (tiny_config, [0, 1, 2, 3, 4], tmp_path, jax.devices()[0], StopRequest())
        return dict(seeds.train_together(*arguments))

    errors = train()
    assert trained == [[0, 1], [2], [3, 4]]
    assert {seed for seed, error in errors.items() if error} == {0, 2, 3}
    # Of an interrupted command with seeds 1 and 4, and of one that was killed at its start.
    (tmp_path / "together" / "seeds_1_4" / "10").mkdir(parents=True)
    manifest.seal(tmp_path / "together" / "seeds_1_4" / "10")
    (tmp_path / "together" / "seeds_0_2").mkdir()
    train()
    assert trained == [[1, 4], [0], [2, 3]]
