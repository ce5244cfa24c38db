"""Trains the settings of a grid, each with several seeds, and resumes unfinished runs."""

import contextlib
import json
import platform
import sys
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from structinit_jax import __version__, evaluate, resume
from structinit_jax.compare import grid, report
from structinit_jax.data import datasets
from structinit_jax.data.source import digest
from structinit_jax.errors import InputError, StoppedError, is_reference
from structinit_jax.train import PREEMPTED_EXIT_CODE, open_run, train
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
    workdir, out = workdir_lib.prepare_workdir(workdir), sys.stdout
    new = {
        "format": report.FORMAT,
        "settings": {},
        "data": {},
        "baselines": dict(baselines or {}),
        "commands": [command] if command else [],
        "machine": _describe_machine(),
    }
    for name, config in settings.items():
        facts = _check(name, config, new["data"])
        facts |= {"seeds": list(seeds), "note": note, "published": (published or {}).get(name, "")}
        new["settings"][name] = facts
    with workdir_lib.lock_workdir(workdir):
        info = _merge(workdir, new, settings)
        if baselines is None:
            info["baselines"] = _choose_baselines(workdir, info, baseline)
        text = json.dumps(info, indent=1) + "\n"
        workdir_lib.write_atomically(workdir / report.GRID, text)

    stop, failed = workdir_lib.StopRequest(), 0
    runs = [(name, seed) for name in settings for seed in seeds]
    began, trained = time.perf_counter(), 0
    try:
        for number, (name, seed) in enumerate(runs, 1):
            label = f"[{number}/{len(runs)}] {name} seed {seed}"
            facts = info["settings"][name]
            run = report.Run(workdir, name, seed, facts)
            if run.status == "done":
                print(f"{label}: already {_describe(run)}", file=out, flush=True)
                continue
            config = settings[name].copy_and_resolve_references()
            config.seed = seed
            _train(config.lock(), report.run_folder(workdir, name, seed), label, facts, stop)
            run, trained = report.Run(workdir, name, seed, facts), trained + 1
            failed += run.status != "done"
            left = (time.perf_counter() - began) / trained * (len(runs) - number)
            print(
                f"{label}: {_describe(run)}; about {format_duration(left)} left",
                file=out,
                flush=True,
            )
            if stop.reached(0):  # by a signal during the last step
                raise StoppedError(STOPPED, PREEMPTED_EXIT_CODE)
    except KeyboardInterrupt:
        raise StoppedError(STOPPED, PREEMPTED_EXIT_CODE) from None
    finally:
        report.write_report(workdir)
    return failed


def _train(config, folder, label, facts, stop):
    """Trains a run, with its output in `log.txt`, and records how it ended.

    A failed run is trained again by the next command.
    """
    out = sys.stdout

    def show(step, results):
        accuracy = evaluate.deciding_accuracy(results, facts["test_name"])
        print(
            f"{label}: step {step}, epoch {step / facts['steps_per_epoch']:.1f}, "
            f"{facts['test_name']} accuracy {100 * accuracy:.2f} %",
            file=out,
            flush=True,
        )

    print(f"{label}: training for {facts['num_steps']:,} steps", file=out, flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    status = {"status": "done"}
    log = (folder / LOG).open("a", buffering=1, encoding="utf-8", errors="backslashreplace")
    with log, contextlib.redirect_stdout(log):
        try:
            train(config, folder, stop_request=stop, on_evaluation=show)
        except Exception as error:  # of your own schemes and data sets too
            if isinstance(error, StoppedError) and error.exit_code == PREEMPTED_EXIT_CODE:
                raise
            text = str(error).strip() or repr(error)
            if isinstance(error, InputError | StoppedError):
                print(text)
            else:
                traceback.print_exc(file=log)
                text = f"{type(error).__name__}: {text}"
            status = {"status": "failed", "error": text.splitlines()[0]}
    workdir_lib.write_atomically(folder / report.STATUS, json.dumps(status) + "\n")


def _describe(run: report.Run) -> str:
    if run.status == "done":
        return f"done, {run.info['test_name']} accuracy {100 * run.accuracy:.2f} %"
    return f"failed: {run.error}"


def _describe_machine() -> str:
    # A checkout that is not installed has no metadata of its own.
    versions = [f"{name} {metadata.version(name)}" for name in PACKAGES]
    return (
        f"{len(jax.devices())} × {jax.devices()[0].device_kind}, Python "
        f"{platform.python_version()}, {platform.uname().system}; structinit-jax {__version__}, "
        f"{', '.join(versions)}"
    )


def _check(name: str, config: ConfigDict, digests: dict[str, Any]) -> dict[str, Any]:
    """Traces a setting, without training, and returns what the report needs of it.

    `digests` gets those of its data, by the name of the data.
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
    place = "" if _is_named(data.name) else f" in {data.data_dir}"
    digests[f"{data.name} {data.train_split}{place}"] = run.describe_data()
    for eval_set in eval_sets.values():
        sizes = {"num_examples": len(eval_set.source), "data_digest": digest(eval_set.source)}
        digests[f"{eval_set.name}{place} for evaluation"] = sizes
    fields = json.loads(config.to_json())
    del fields["seed"]
    return {
        "config": fields,
        "num_steps": schedule.num_steps,
        "steps_per_epoch": schedule.steps_per_epoch,
        "test_name": evaluate.evaluation_name(config),
    }


def _merge(workdir, new, settings):
    """Adds settings and seeds to those of earlier commands; refuses changes of either or of data.

    Data are compared by their digests, so that results of other files or labels under the same
    names are never paired.
    """
    old = report.read_grid(workdir)
    if old is None:
        return new
    for name in settings.keys() & old["settings"].keys():
        before, now = old["settings"][name], new["settings"][name]
        now["seeds"] = sorted({*before["seeds"], *now["seeds"]})
        config = settings[name]
        lines = [
            f"  {field}: {a!r} -> {b!r}"
            for field, (a, b) in resume.changes(
                before["config"] | {"seed": config.seed}, config
            ).items()
            if not _may_change(field, config.data.name)
            and not (resume.is_moved_teacher(field, a, b) and Path(b).parent == workdir)
        ]
        if lines:
            changes = "\n".join(lines)
            raise InputError(
                f"--workdir={workdir} holds the setting {name} with another config:\n{changes}\n"
                "Restore the old values, or use another --workdir"
            )
    for name in new["data"].keys() & old["data"].keys():
        if new["data"][name] != old["data"][name]:
            raise InputError(
                f"--workdir={workdir} holds results for other files, labels or classes of {name}: "
                "restore the old data, or use another --workdir"
            )
    return new | {
        "settings": old["settings"] | new["settings"],
        "data": old["data"] | new["data"],
        "baselines": old["baselines"] | new["baselines"],
        "commands": list(dict.fromkeys([*old["commands"], *new["commands"]])),
    }


def _may_change(field: str, data_name: str) -> bool:
    """Whether a second command may change a field."""
    is_folder = field in ("data.data_dir", "data.manual_dir")
    return field in report.HARMLESS or (is_folder and _is_named(data_name))


def _is_named(data_name: str) -> bool:
    """Whether the name of a data set tells what is in it, wherever it is."""
    return data_name not in datasets.FILE_SETS and not is_reference(data_name)


def _choose_baselines(workdir, info, baseline) -> dict[str, str | None]:
    """Finds the baselines of all settings, also those of earlier commands, which may lack one."""
    names: Iterable[str] = info["settings"]
    chosen = [name for name in info["baselines"].values() if name]
    scheme = baseline or [*chosen, *names][0].split(",")[0]
    found = grid.find_baselines(names, scheme)
    if baseline and not any(found.values()):
        raise InputError(f"--baseline={baseline}: no setting in --workdir={workdir} has it")
    return found
