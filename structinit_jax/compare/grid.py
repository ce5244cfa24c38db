"""Trains the settings of a comparison with several seeds. Unfinished runs are resumed."""

import contextlib
import json
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import flax
import jax
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from ml_collections import ConfigDict

from structinit_jax import __version__, files
from structinit_jax import config as config_lib
from structinit_jax.compare import report
from structinit_jax.compare.settings import find_baselines
from structinit_jax.data.source import digest
from structinit_jax.errors import (
    FullDiskError,
    InputError,
    InUseError,
    PreemptedError,
    prefixed,
    printable,
    require,
)
from structinit_jax.training import build, distributed
from structinit_jax.training import workdir as workdir_lib
from structinit_jax.training.checkpoint_files import digest_of
from structinit_jax.training.metrics import format_duration
from structinit_jax.training.state import make_initializer
from structinit_jax.training.step import make_train_step
from structinit_jax.training.train import train

PATIENCE = 60.0  # seconds; other processes of a comparison hold its lock only while they start


def run_grid(
    settings: Mapping[str, ConfigDict],
    seeds: Sequence[int],
    workdir: str | Path,
    rows: Mapping[str, Mapping[str, str]] | None = None,
) -> int:
    """Trains all runs that are not done and writes the report; returns how many of them failed.

    Args:
      settings: Config of each setting, by name. Its seed is replaced.
      seeds: Seeds of every setting.
      workdir: Output directory. Each run has its own workdir, `SETTING/seed_K`.
      rows: Row of each setting in a table of the papers: its 'baseline', trained or not, and the
        'published' accuracy and 'note' that the report shows. By default, `find_baselines` chooses
        the baselines; if all settings have the same scheme, those of earlier settings are kept.

    Raises:
      InputError: A setting cannot be trained, or the workdir holds a conflicting comparison or
        runs that its `compare.json` does not list.
      PreemptedError: A signal stopped the runs.
      FullDiskError: The disk is full.
    """
    for name, config in settings.items():
        with prefixed(f"setting {name}: "):
            config_lib.validate(config)
            build.require_outside_images(config, workdir)
    workdir = workdir_lib.prepare_workdir(workdir)
    needs = "the directory of a comparison, not that of a run"
    require("workdir", str(workdir), needs, not (workdir / "config.json").exists())
    new = {}
    splits = {}
    for name, config in settings.items():
        new[name] = describe_setting(name, config, splits) | {"seeds": list(seeds)}
    with files.report_full_disk(workdir):
        with workdir_lib.lock_workdir(workdir, PATIENCE):
            info = _merge(workdir, new, settings, rows)
            machines = dict.fromkeys([*info["machine"].split("\n\n"), _describe_machine()])
            info["machine"] = "\n\n".join(filter(None, machines))
            files.write_atomically(
                workdir / workdir_lib.COMPARISON, json.dumps(info, indent=1) + "\n"
            )
        try:
            return _train_all(workdir, info, settings, seeds)
        finally:
            report.write_report(workdir)


def describe_setting(
    name: str, config: ConfigDict, splits: dict[str, tuple[int, dict[str, str]]]
) -> dict[str, Any]:
    """Checks a setting without training, and returns the facts that the report needs.

    `splits` holds, by `config.data` as JSON, the training examples and the digests of the splits
    that other settings have opened; those of this setting are added.
    """
    data = config.data
    with prefixed(f"setting {name}: "):
        mesh = build.make_mesh(config)
        dataset = build.open_data(config)
        key = data.to_json()
        if key not in splits:
            train_source, eval_source = build.open_splits(config, dataset)
            digests = {
                f"{data.name} {data.train_split}": digest(train_source, dataset.class_names),
                f"{data.name} {data.eval_split}": digest(eval_source, dataset.class_names),
            }
            splits[key] = len(train_source), digests
        num_examples, digests = splits[key]
        schedule = build.make_schedule(config, num_examples)
        model = build.make_model(config, mesh)
        make_initializer(config, model)  # checks that the scheme fits
        optimizer = build.make_optimizer(config, schedule.learning_rate, model)
        make_train_step(config, model, optimizer, schedule.learning_rate)
        if path := config.start_from:
            digests = digests | {f"start_from {path}": digest_of(Path(path).expanduser())}
    return {
        "config": json.loads(config.to_json()),
        "fields": config_lib.to_fields(config),  # with the scheme's defaults, which may change
        "data": digests,
        "num_examples": num_examples,
        "num_steps": schedule.num_steps,
        "steps_per_epoch": schedule.steps_per_epoch,
    }


def _merge(workdir, new, settings, rows):
    """Merges settings and seeds with those of earlier commands; the two must agree."""
    info: dict[str, Any] = {"settings": {}, "machine": ""}
    if (workdir / workdir_lib.COMPARISON).exists():
        info = files.read_json(workdir / workdir_lib.COMPARISON)
    old = info["settings"]
    for name, facts in new.items():
        earlier = old.values()
        if "data.data_dir=" in name:  # other folders may hold different data of the same name
            folder = facts["config"]["data"]["data_dir"]
            earlier = [other for other in earlier if other["config"]["data"]["data_dir"] == folder]
        if name in old:
            earlier = [old[name]]
            place = f"the setting {name} in {workdir}"
            config = settings[name].copy_and_resolve_references()
            saved = old[name].get("fields", old[name]["config"])  # earlier versions lack the former
            config.seed = saved["seed"]  # each run has its own
            workdir_lib.check_config(saved, config, workdir_lib.RESULTS, place)
            facts["seeds"] = sorted({*old[name]["seeds"], *facts["seeds"]})
        elif (workdir / name).exists():
            raise InputError(
                f"{workdir / name} holds runs that {workdir_lib.COMPARISON} does not list: move it"
            )
        for data, new_digest in facts["data"].items():
            digests = [each["data"][data] for each in earlier if data in each["data"]]
            if digests and new_digest not in digests:
                raise InputError(
                    f"--workdir={workdir} was started with other weights, images, labels or "
                    f"classes of {data}: restore the old ones, or use another --workdir"
                )
    merged = old | new
    for name, row in (rows or _find_rows(old, new)).items():
        merged[name] |= {column: row[column] for column in ("baseline", "published", "note")}
    return info | {"settings": merged}


def _find_rows(old, new):
    """Returns baselines of settings, in the form of rows of a table.

    A command with a single scheme adds to the comparison: it changes no baseline, but can be one
    for earlier settings that had none.
    """
    configs = _configs(new)
    kept = {}
    if len({config["attention_init"]["name"] for config in configs.values()}) == 1:
        configs = _configs(old) | configs
        baselines = {name: facts["baseline"] for name, facts in old.items()}
        kept = {name: value for name, value in baselines.items() if value is not None}
    baselines = find_baselines(configs) | kept
    names = [name for name in configs if name in new or name not in kept]
    return {name: {"baseline": baselines[name], "published": "", "note": ""} for name in names}


def _configs(settings):
    """Returns what decides the results of settings: the fields of their configs, and the data."""
    configs = {}
    for name, facts in settings.items():
        fields = flatten_dict(facts["config"], sep=".")
        kept = {k: v for k, v in fields.items() if workdir_lib.decides(k) < workdir_lib.NOTHING}
        configs[name] = unflatten_dict(kept, sep=".") | {"digests": facts["data"]}
    return configs


def _describe_machine() -> str:
    devices = jax.devices()
    packages = dict(jax=jax.__version__, flax=flax.__version__, optax=optax.__version__)
    packages["structinit-jax"] = __version__
    versions = ", ".join(f"{name} {version}" for name, version in packages.items())
    return f"{len(devices)} × {devices[0].device_kind}, {versions}"


# -- runs ------------------------------------------------------------------------------------------


def _train_all(workdir, info, settings, seeds) -> int:
    """Trains the runs that are not done, and returns how many of them failed."""
    stop = distributed.StopRequest()
    began = time.perf_counter()
    trained = 0
    failed = 0
    total = len(settings) * len(seeds)
    for done, (name, config) in enumerate(settings.items()):
        facts = info["settings"][name]
        (workdir / name).mkdir(exist_ok=True)
        with contextlib.ExitStack() as locked:
            try:
                locked.enter_context(workdir_lib.lock_workdir(workdir / name))
            except InUseError:
                print(f"{name}: another process is training this setting", flush=True)
                continue
            for number, seed in enumerate(seeds, start=done * len(seeds) + 1):
                run = report.SeedRun(workdir, name, seed, facts)
                label = f"[{number}/{total}] {name} seed {seed}:"
                if run.status == "done":
                    print(label, f"already done, {run.result}", flush=True)
                    continue
                _train(config, run, label, stop)
                run = report.SeedRun(workdir, name, seed, facts)
                trained += 1
                failed += run.status != "done"
                left = (time.perf_counter() - began) / trained * (total - number)
                print(label, f"{run.result}; about {format_duration(left)} left", flush=True)
                if stop.reached(0):  # by a signal during the last step
                    raise PreemptedError("stopped: run the same command again to resume")
    return failed


def _train(config, run, label, stop):
    """Trains a run, writes its output to `log.txt`, and records the error if it fails."""
    print(label, "started", flush=True)
    run.folder.mkdir(exist_ok=True)
    config = config.copy_and_resolve_references()
    config.seed = run.seed
    terminal = sys.stdout

    def show_evaluation(step, results):
        accuracy = f"{run.split} accuracy {results['eval/accuracy']:.2%}"
        text = f"step {step}, epoch {run.epoch(step):.1f}, {accuracy}"
        print(label, text, file=terminal, flush=True)

    error_file = run.folder / report.ERROR
    error_file.write_text("")
    log = (run.folder / "log.txt").open("a", buffering=1, errors="backslashreplace")
    with log, contextlib.redirect_stdout(log):
        try:
            train(config.lock(), run.folder, stop_request=stop, on_evaluation=show_evaluation)
            error_file.unlink()
        except (PreemptedError, FullDiskError):  # they stop all runs
            raise
        except Exception as error:  # including those of your own schemes and data sets
            traceback.print_exc(file=log)
            text = printable(f"{type(error).__name__}: {error}".splitlines()[0])
            files.write_atomically(error_file, text + "\n")
