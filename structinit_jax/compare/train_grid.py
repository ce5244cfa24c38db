"""Makes the settings of a grid from flags, and trains each with several seeds.

A setting is a scheme and values of fields; a run adds a seed. Unfinished runs are resumed.
"""

import contextlib
import functools
import itertools
import json
import platform
import re
import sys
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from operator import attrgetter
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from structinit_jax import __version__, command_line, compare
from structinit_jax import config as config_lib
from structinit_jax.compare import report
from structinit_jax.data.source import digest
from structinit_jax.errors import InputError, StoppedError, printable, require
from structinit_jax.training import build, distributed, resume
from structinit_jax.training import workdir as workdir_lib
from structinit_jax.training.metrics import format_duration
from structinit_jax.training.train import PREEMPTED_EXIT_CODE, train

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
LOG = "log.txt"
STOPPED = "stopped; all checkpoints are complete: run the same command again to resume"

# -- settings --------------------------------------------------------------------------------------


def expand(
    config: ConfigDict, schemes: Sequence[str], axes: Mapping[str, Sequence[str]]
) -> dict[str, ConfigDict]:
    """Returns the config of each setting by its name, such as 'impulse,model.num_heads=6'.

    `schemes` are values of `config.attention_init.name`, set by `config.set_scheme`. `axes` holds
    the values of further fields, by field, as text from the command line. An axis for an option of
    `attention_init` applies to the schemes that take the option; the others ignore it.

    Raises:
      InputError: A scheme, a field or a value does not exist, or appears twice.
    """
    options = {scheme: config_lib.scheme_options(scheme) for scheme in schemes}
    varied = len(options) > 1 or any(field.startswith("attention_init.") for field in axes)
    if varied and (config.start_from or "start_from" in axes):
        raise InputError("config.start_from replaces config.attention_init: pass a single scheme")
    for field in axes:
        section, _, option = field.partition(".")
        if field in ("seed", "attention_init.name"):
            raise InputError(f"--grid={field} cannot be an axis: use --seeds=N and --schemes=A,B")
        if section == "attention_init" and not any(option in own for own in options.values()):
            raise InputError(f"--grid={field}: no scheme of --schemes has the option {option!r}")
    settings = {}
    for scheme in schemes:
        own = {
            field: values
            for field, values in sorted(axes.items())
            if not field.startswith("attention_init.") or field.split(".")[1] in options[scheme]
        }
        start = config.copy_and_resolve_references()
        config_lib.set_scheme(start, scheme)
        for texts in itertools.product(*own.values()):
            point = start.copy_and_resolve_references()
            for field, text in zip(own, texts, strict=True):
                command_line.set_field(point, field, text)
            # From parsed values, so that 1e-3 and 0.001 give the same name.
            parts = [scheme, *(f"{field}={attrgetter(field)(point)}" for field in own)]
            name = ",".join(re.sub(r"[^\w.=+-]", "_", part.replace(" ", "")) for part in parts)
            if name in settings:
                raise InputError(f"--schemes and --grid give {name} twice: give each value once")
            settings[name] = point.lock()
    return settings


def parse_axes(flags: Iterable[str]) -> dict[str, list[str]]:
    """Parses values of --grid, such as 'model.num_heads=3,6', into values by field.

    Commas in brackets do not separate values. Raises `InputError` for a repeated or empty field.
    """
    axes = {}
    for flag in flags:
        field, equals, text = flag.removeprefix("config.").partition("=")
        if not (equals and text):
            raise InputError(f"--grid={flag} must be a field and its values: model.num_heads=3,6")
        if field in axes:
            raise InputError(f"--grid={field} is given twice: give all its values at once")
        axes[field] = re.split(r",(?![^(\[{]*[)\]}])", text)
    return axes


# -- runs ------------------------------------------------------------------------------------------


def run_grid(
    settings: Mapping[str, ConfigDict],
    seeds: Sequence[int],
    workdir: str | Path,
    *,
    baselines: Mapping[str, str] | None = None,
    published: Mapping[str, str] | None = None,
    notes: Mapping[str, str] | None = None,
) -> int:
    """Trains all runs that are not done and writes the report; returns how many of them failed.

    Args:
      settings: Config of each setting, by name. Their seeds are replaced.
      seeds: Seeds of every setting.
      workdir: Output directory. Each run has a workdir of its own, `SETTING/seed_K`.
      baselines: Setting that each one is compared with, trained or not. By default the result of
        `find_baselines`.
      published: Published accuracies that are shown next to ours, by setting.
      notes: Notes that the report shows, by setting; empty for none.

    Raises:
      InputError: A setting cannot be trained, or the workdir holds a comparison that disagrees, or
        runs of other settings under the same names.
      StoppedError: A signal stopped the runs, or the disk is full.
    """
    command_line.use_compilation_cache()  # through which runs share programs
    workdir = workdir_lib.prepare_workdir(workdir)
    new = {}
    for name, config in settings.items():
        new[name] = describe_setting(name, config) | {
            "seeds": list(seeds),
            "published": (published or {}).get(name, ""),
            "note": (notes or {}).get(name, ""),
        }
    with workdir_lib.report_full_disk(workdir):
        with workdir_lib.lock_workdir(workdir):
            info = _merge(workdir, new, settings)
            info["baselines"] |= baselines or find_baselines(info["settings"])
            machines = dict.fromkeys([*info["machine"].split("\n\n"), _describe_machine()])
            info["machine"] = "\n\n".join(filter(None, machines))
            workdir_lib.write_atomically(workdir / compare.GRID, json.dumps(info, indent=1) + "\n")
        try:
            return _train_all(workdir, info, settings, seeds)
        except KeyboardInterrupt:
            raise StoppedError(STOPPED, PREEMPTED_EXIT_CODE) from None
        finally:
            report.write_report(workdir)


def find_baselines(names: Iterable[str]) -> dict[str, str | None]:
    """Returns the baseline of each setting, by name; None if there is none.

    It is the first setting with the scheme of the very first one and the same values of all fields
    outside `attention_init`. If all settings have the same scheme, it is the very first setting.
    """
    schemes = {}
    fields = {}
    for name in names:
        schemes[name], *words = name.split(",")
        fields[name] = tuple(word for word in words if not word.startswith("attention_init."))
    first = next(iter(schemes))
    candidates = [name for name in schemes if schemes[name] == schemes[first]]
    if len(candidates) == len(schemes):
        return dict.fromkeys(schemes, first)
    baselines = {fields[name]: name for name in reversed(candidates)}
    return {name: baselines.get(fields[name]) for name in schemes}


def _train_all(workdir, info, settings, seeds) -> int:
    """Trains the runs that are not done, and returns how many of them failed."""
    stop = distributed.StopRequest()
    began = time.perf_counter()
    trained = 0
    failed = 0
    runs = [(name, seed) for name in settings for seed in seeds]
    for number, (name, seed) in enumerate(runs, start=1):
        run = compare.SeedRun(workdir, name, seed, info["settings"][name])
        # Prints to the output of this moment, also while `_train` redirects it.
        label = f"[{number}/{len(runs)}] {name} seed {seed}:"
        say = functools.partial(print, label, file=sys.stdout, flush=True)
        if run.status == "done":
            say(f"done before, {run.result}")
            continue
        for folder in (run.folder.parent, run.folder):
            workdir_lib.make_folder(folder)
            workdir_lib.prepare_workdir(folder)
        with contextlib.ExitStack() as locked:
            try:
                locked.enter_context(workdir_lib.lock_workdir(run.folder.parent))
            except InputError:
                say("another process trains this setting")
                continue
            _train(settings[name], run, say, stop)
        run = compare.SeedRun(workdir, name, seed, run.facts)
        trained = trained + 1
        failed += run.status == "failed"
        left = (time.perf_counter() - began) / trained * (len(runs) - number)
        say(f"{run.result}; about {format_duration(left)} left")
        if stop.reached(0):  # by a signal during the last step
            raise StoppedError(STOPPED, PREEMPTED_EXIT_CODE)
    return failed


def _train(config, run, say, stop):
    """Trains a run, with its output in `log.txt`, and records how it ended."""
    say("started")
    config = config.copy_and_resolve_references()
    config.seed = run.seed
    status = compare.DONE

    def show_evaluation(step, results):
        accuracy = results["eval/accuracy"]
        say(f"step {step}, epoch {run.epoch(step):.1f}, {run.test_name} accuracy {accuracy:.2%}")

    log = workdir_lib.open_to_append(run.folder / LOG)
    with log, contextlib.redirect_stdout(log):
        try:
            train(config.lock(), run.folder, stop_request=stop, on_evaluation=show_evaluation)
        except Exception as error:  # of your own schemes and data sets too
            if isinstance(error, StoppedError) and error.exit_code == PREEMPTED_EXIT_CODE:
                raise
            traceback.print_exc(file=log)
            status = printable(f"{type(error).__name__}: {error}".splitlines()[0])
    workdir_lib.write_atomically(run.folder / compare.STATUS, status + "\n")


def _describe_machine() -> str:
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES)
    return (
        f"{len(jax.devices())} × {jax.devices()[0].device_kind}, Python "
        f"{platform.python_version()}, {platform.uname().system}; structinit-jax {__version__}, "
        f"{versions}"
    )


def describe_setting(name: str, config: ConfigDict) -> dict[str, Any]:
    """Checks a setting without training, and returns the facts that the report needs."""
    try:
        dataset = build.open_data(config)
        train_source, eval_source = build.open_splits(config, dataset)
        mesh = build.make_mesh(config)
        schedule = build.make_schedule(config, len(train_source))
        model = build.make_model(config, mesh)
        build.make_scheme(config, model)
        optimizer = build.make_optimizer(config, schedule.learning_rate, model)
        build.make_step(config, model, optimizer, schedule.learning_rate)
        if (file := config.start_from) and not Path(file).expanduser().is_file():
            raise InputError(f"config.start_from={file!r} is no file")
    except InputError as error:
        raise InputError(f"setting {name}: {error}") from error
    data = config.data
    sources = {
        f"{data.name} {data.train_split}": train_source,
        f"{data.name} {data.eval_split}": eval_source,
    }
    return {
        "config": json.loads(config.to_json()),
        "data": {k: digest(source, dataset.class_names) for k, source in sources.items()},
        "num_steps": schedule.num_steps,
        "steps_per_epoch": schedule.steps_per_epoch,
        "test_name": data.eval_split,
    }


def _merge(workdir, new, settings):
    """Merges settings and seeds into those of earlier commands, which must agree with them."""
    info: dict[str, Any] = {"settings": {}, "baselines": {}, "machine": ""}
    if (workdir / compare.GRID).exists():
        info = compare.read_grid(workdir)
    old = info["settings"]
    for name, facts in new.items():
        # Settings may read folders of the same name at several places.
        earlier = [old[name]] if name in old else old.values()
        for data, new_digest in facts["data"].items():
            digests = [each["data"][data] for each in earlier if data in each["data"]]
            # An earlier version recorded the first part of the digest only.
            if digests and not new_digest.startswith(tuple(digests)):
                raise InputError(
                    f"--workdir={workdir} holds results for other images, labels or classes of "
                    f"{data}: restore the old data, or use another --workdir"
                )
        if name not in old:
            _check_unrecorded(workdir / name, settings[name], facts["seeds"])
            continue
        place = f"the setting {name} in {workdir}"
        free = ("seed", *compare.HARMLESS)
        resume.check_config(old[name]["config"], settings[name], place, tuple(settings[name]), free)
        facts["seeds"] = sorted({*old[name]["seeds"], *facts["seeds"]})
    return info | {"settings": new | {name: old[name] for name in old if name not in new}}


def _check_unrecorded(folder, config, seeds):
    """Checks that runs of a setting that `compare.json` lacks were trained with its config."""
    for seed in seeds:
        path = folder / f"seed_{seed}" / "config.json"
        config = config.copy_and_resolve_references()
        config.seed = seed
        if path.exists():
            saved = workdir_lib.read_json(path)
            require(str(path), saved, "a JSON object", lambda x: isinstance(x, dict))
            place = str(path.parent)
            resume.check_config(saved, config, place, tuple(config), compare.HARMLESS)
        elif (path.parent / compare.STATUS).exists():
            raise InputError(f"{path} is missing, so its run cannot be checked: delete its folder")
