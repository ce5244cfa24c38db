"""Trains the settings of a grid, each with several seeds, and resumes unfinished runs."""

import contextlib
import json
import platform
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from structinit_jax import __version__, evaluate
from structinit_jax.compare import grid, report
from structinit_jax.data.source import digest
from structinit_jax.errors import InputError, StoppedError
from structinit_jax.train import PREEMPTED_EXIT_CODE, open_run, train
from structinit_jax.training import resume
from structinit_jax.training import workdir as workdir_lib
from structinit_jax.training.metrics import format_duration

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
LOG = "log.txt"
STOPPED = "stopped; all checkpoints are complete: run the same command again to resume"


def run_grid(
    settings: Mapping[str, ConfigDict],
    seeds: Sequence[int],
    workdir: str | Path,
    *,
    baseline: str | None = None,
    baselines: Mapping[str, str] | None = None,
    published: Mapping[str, str] | None = None,
    note: str = "",
    command: str = "",
) -> int:
    """Trains all settings that are not done, prints their progress and writes the report.

    Args:
      settings: Config of each setting, by name. Their seeds are replaced.
      seeds: Seeds of every setting.
      workdir: Output directory. Each run has a workdir of its own, `SETTING/seed_K`.
      baseline: Scheme that the others are compared with. The default is that of earlier commands in
        the workdir, or else that of the first setting.
      baselines: Setting that each one is compared with, trained or not; replaces what
        `grid.find_baselines` finds.
      published: Figures of the papers that are shown next to ours, by setting.
      note: A remark on the settings for the report.
      command: Command of this comparison, for the report.

    Returns:
      The number of runs of these settings and seeds that failed.

    Raises:
      InputError: A setting cannot be trained, the workdir holds a comparison that disagrees, or it
        cannot be written to.
      StoppedError: A signal stopped the runs.
    """
    workdir = workdir_lib.prepare_workdir(workdir)
    new = {
        "format": report.FORMAT,
        "settings": {},
        "data": {},
        "baselines": dict(baselines or {}),
        "commands": [command] if command else [],
        "machine": _describe_machine(),
    }
    for name, config in settings.items():
        facts, data = _check(name, config)
        facts |= {"seeds": list(seeds), "note": note, "published": (published or {}).get(name, "")}
        new["settings"][name] = facts
        _check_data(workdir, new["data"], data)
        new["data"] |= data
    explain = workdir_lib.explain_failed_write("the comparison", workdir)
    with workdir_lib.lock_workdir(workdir), explain:
        info = _merge(workdir, new, settings)
        if baselines is None:
            info["baselines"] = _choose_baselines(workdir, info, baseline)
        text = json.dumps(info, indent=1) + "\n"
        workdir_lib.write_atomically(workdir / report.GRID, text)

    stop, began = workdir_lib.StopRequest(), time.perf_counter()
    total, trained, failed = len(settings) * len(seeds), 0, 0
    try:
        for index, (name, config) in enumerate(settings.items()):
            with contextlib.ExitStack() as on_exit:
                try:
                    (workdir / name).mkdir(exist_ok=True)
                    on_exit.enter_context(workdir_lib.lock_workdir(workdir / name))
                except InputError:
                    print(f"{name}: another process trains it", flush=True)
                    continue
                for number, seed in enumerate(seeds, 1 + index * len(seeds)):
                    run = report.SeedRun(workdir, name, seed, info)
                    show = _Progress(f"[{number}/{total}] {name} seed {seed}", run.info)
                    if run.status == "done":
                        show(f"done before, {_result(run)}")
                        continue
                    _train(config, run, show, stop)
                    run, trained = report.SeedRun(workdir, name, seed, info), trained + 1
                    failed += run.status == "failed"
                    left = (time.perf_counter() - began) / trained * (total - number)
                    show(f"{_result(run)}; about {format_duration(left)} left")
                    if stop.reached(0):  # by a signal during the last step
                        raise StoppedError(STOPPED, PREEMPTED_EXIT_CODE)
    except KeyboardInterrupt:
        raise StoppedError(STOPPED, PREEMPTED_EXIT_CODE) from None
    finally:
        report.write_report(workdir)
    return failed


class _Progress:
    """Prints lines about a run to the output of the command, whatever the run redirects."""

    def __init__(self, label: str, facts: Mapping[str, Any]):
        self._label, self._facts, self._out = label, facts, sys.stdout

    def __call__(self, text: str) -> None:
        print(f"{self._label}: {text}", file=self._out, flush=True)

    def show_evaluation(self, step: int, results: Mapping[str, float]) -> None:
        facts = self._facts
        accuracy = evaluate.deciding_accuracy(results, facts["test_name"])
        epoch = step / facts["steps_per_epoch"]
        self(f"step {step}, epoch {epoch:.1f}, {facts['test_name']} accuracy {accuracy:.2%}")


def _train(config, run, show, stop):
    """Trains a run, with its output in `log.txt`, and records how it ended.

    A failed run is trained again by the next command.
    """
    show("started")
    config, folder = config.copy_and_resolve_references(), run.folder
    config.seed = run.seed
    folder.mkdir(exist_ok=True)
    status = {"status": "done"}
    log = (folder / LOG).open("a", buffering=1, encoding="utf-8", errors="backslashreplace")
    with log, contextlib.redirect_stdout(log):
        try:
            train(config.lock(), folder, stop_request=stop, on_evaluation=show.show_evaluation)
        except Exception as error:  # of your own schemes and data sets too
            if isinstance(error, StoppedError) and error.exit_code == PREEMPTED_EXIT_CODE:
                raise
            text = str(error).strip() or repr(error)
            if isinstance(error, InputError | StoppedError):
                print(text)
            else:
                traceback.print_exc(file=log)
                text = f"{type(error).__name__}: {text}"
            # Names of files in messages need not be text.
            first = text.splitlines()[0].encode("utf-8", "backslashreplace").decode("utf-8")
            status = {"status": "failed", "error": first}
    workdir_lib.write_atomically(folder / report.STATUS, json.dumps(status) + "\n")


def _result(run: report.SeedRun) -> str:
    if run.status == "done":
        return f"{run.info['test_name']} accuracy {run.accuracy:.2%}"
    return f"failed: {run.error}"


def _describe_machine() -> str:
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES)
    return (
        f"{len(jax.devices())} × {jax.devices()[0].device_kind}, Python "
        f"{platform.python_version()}, {platform.uname().system}; structinit-jax {__version__}, "
        f"{versions}"
    )


def _check(name: str, config: ConfigDict) -> tuple[dict[str, Any], dict[str, Any]]:
    """Traces a setting without training.

    Returns:
      What the report needs of it, and what identifies its data, by the name of the data.
    """
    data = config.data
    try:
        run = open_run(config)
        schedule, eval_sets = run.setup.schedule, run.eval_sets
    except InputError as error:
        raise InputError(f"setting {name}: {error}") from error
    except Exception as error:  # of your own scheme, model or data set
        error.add_note(f"This is the setting {name} of the comparison")
        raise
    digests = {f"{data.name} {data.train_split}": run.describe_data()}
    for each in eval_sets.values():
        examples = {"num_examples": len(each.source), "data_digest": digest(each.source)}
        digests[f"{each.name} for evaluation"] = examples
    fields = json.loads(config.to_json())
    del fields["seed"]
    facts = {
        "config": fields,
        "num_steps": schedule.num_steps,
        "steps_per_epoch": schedule.steps_per_epoch,
        "test_name": evaluate.evaluation_name(config),
    }
    return facts, digests


def _merge(workdir, new, settings):
    """Adds settings and seeds to those of earlier commands; refuses other configs and data."""
    old = report.read_grid(workdir)
    if old is None:
        return new
    _check_data(workdir, old["data"], new["data"])
    for name in settings.keys() & old["settings"].keys():
        before, now = old["settings"][name], new["settings"][name]
        now["seeds"] = sorted({*before["seeds"], *now["seeds"]})
        old_config = before["config"] | {"seed": settings[name].seed}
        changes = [
            f"{field}: {a!r} -> {b!r}"
            for field, (a, b) in resume.changes(old_config, settings[name]).items()
            if field not in report.HARMLESS
            and not (resume.is_moved_teacher(field, a, b) and Path(b).parent == workdir)
        ]
        if changes:
            raise InputError(
                f"--workdir={workdir} holds the setting {name} with another config "
                f"({', '.join(changes)}): restore the old values, or use another --workdir"
            )
    return new | {
        "settings": old["settings"] | new["settings"],
        "data": old["data"] | new["data"],
        "baselines": old["baselines"] | new["baselines"],
        "commands": list(dict.fromkeys([*old["commands"], *new["commands"]])),
    }


def _check_data(workdir, old, new):
    """Refuses other files, labels or classes under the same names: pairs would mean nothing."""
    for name in new.keys() & old.keys():
        if new[name] != old[name]:
            raise InputError(
                f"--workdir={workdir} holds results for other files, labels or classes of {name}: "
                "restore the old data, or use another --workdir"
            )


def _choose_baselines(workdir, info, baseline):
    """Finds the baselines of all settings, also those of earlier commands, which may lack one."""
    names, chosen = list(info["settings"]), [name for name in info["baselines"].values() if name]
    found = grid.find_baselines(names, baseline or [*chosen, *names][0].split(",")[0])
    if baseline and not any(found.values()):
        raise InputError(f"--baseline={baseline}: no setting in --workdir={workdir} has it")
    return found
