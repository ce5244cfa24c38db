"""Trains the settings of a grid, each with several seeds, and resumes unfinished runs."""

import contextlib
import json
import platform
import shlex
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib import metadata
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import jax
from ml_collections import ConfigDict

from structinit_jax import __version__, evaluate, resume
from structinit_jax import config as config_lib
from structinit_jax.analysis import collect, figures
from structinit_jax.compare import grid, report, results, seeds
from structinit_jax.compare.page import MAPS
from structinit_jax.compare.papers import Row
from structinit_jax.compare.table import LOG, Progress
from structinit_jax.data import datasets
from structinit_jax.errors import InputError, StoppedError, is_reference
from structinit_jax.evaluate import (
    evaluation_name,
    note_shared_examples,
    open_data,
    open_evaluation_sets,
)
from structinit_jax.train import PREEMPTED_EXIT_CODE, train
from structinit_jax.training import workdir as workdir_lib
from structinit_jax.training.setup import set_up
from structinit_jax.training.state import count_parameters

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
NUM_IMAGES = 64  # of which attention maps are drawn
STOPPED = "stopped; all checkpoints are complete: run the same command again to resume"


def run_grid(
    settings: Mapping[str, ConfigDict],
    seed_list: Sequence[int],
    workdir: str | Path,
    *,
    locations: Mapping[str, str] | None = None,
    baseline: str | None = None,
    baselines: Mapping[str, str] | None = None,
    published: Mapping[str, Row] | None = None,
    note: str = "",
    started_by: str = "",
    together: bool | None = None,
) -> int:
    """Trains all settings that are not done, and writes the report.

    Args:
      settings: Config of each setting, by name. Their seeds are replaced.
      seed_list: Seeds of every setting.
      workdir: Output directory. Each run has a workdir of its own, `SETTING/seed_K`.
      locations: Value of --config that each setting comes from, for the report.
      baseline: Scheme that the others are compared with. The default is that of earlier commands in
        the workdir, or else that of the first setting.
      baselines: Setting that each one is compared with, trained or not; replaces what
        `grid.find_baselines` finds.
      published: Rows of the papers whose figures are shown beside ours, by setting.
      note: What readers of the report must know about the settings.
      started_by: Command of this comparison, for the report.
      together: Whether the seeds of a setting train in one program, on one device. The default is
        True on accelerators if no setting has config.fsdp.

    Returns:
      The number of runs of these settings and seeds that failed.

    Raises:
      InputError: A setting cannot be trained, the workdir holds a comparison that disagrees, or it
        cannot be written to.
      StoppedError: A signal stopped the runs.
    """
    workdir = workdir_lib.prepare_workdir(workdir)
    split = {name: config.fsdp for name, config in settings.items() if config.fsdp > 1}
    if together is None:
        # On two CPU cores three seeds together take 0.83 (digits) to 0.94 (Fashion-MNIST) of the
        # time of single runs, whose results are bit-reproducible by `structinit_jax.main`.
        together = jax.default_backend() != "cpu" and not split
    elif together and split:
        raise InputError(
            f"setting {next(iter(split))}: config.fsdp={next(iter(split.values()))} splits the "
            "weights over devices, but --together=yes trains on one: pass --together=no"
        )
    devices = jax.local_devices()[:1] if together else None
    counts: dict[str, int] = {}
    facts = {name: _check(name, config, devices, counts) for name, config in settings.items()}
    for name, config in settings.items():
        command = grid.command(config, locations[name]) if locations else []
        row = published[name] if published else None
        facts[name] |= {
            "config": grid.to_json(config),
            "command": shlex.join(command),
            "published": row.published if row else None,
            "published_training": row.published_training if row else (),
            "note": note,
            "seeds": list(seed_list),
        }
    info = {
        "settings": facts,
        "baselines": baselines or {},
        "commands": [started_by] if started_by else [],
        # A checkout that is not installed has no metadata of its own.
        "versions": {"structinit-jax": __version__}
        | {name: metadata.version(name) for name in PACKAGES},
        "machine": f"{len(jax.devices())} × {jax.devices()[0].device_kind}, Python "
        f"{platform.python_version()}, {platform.uname().system}",
    }
    explain = workdir_lib.explain_failed_write("the comparison", workdir)
    with workdir_lib.lock_workdir(workdir), explain:
        info = _merge(workdir, info, settings)
        if baselines is None:
            # Of all settings, also those of earlier commands, which may lack one until now.
            chosen = [name for name in info["baselines"].values() if name]
            schemes = list(dict.fromkeys(name.split(",")[0] for name in info["settings"]))
            if baseline and grid.file_safe(baseline) not in schemes:
                raise InputError(
                    f"--baseline={baseline} is not a scheme in --workdir={workdir}: "
                    f"{', '.join(schemes)}. Add it to --schemes, or take one of these"
                )
            scheme = baseline or [*chosen, *settings][0].split(",")[0]
            info["baselines"] = grid.find_baselines(info["settings"], scheme)
        text = json.dumps(info, indent=1) + "\n"
        workdir_lib.write_atomically(workdir / results.GRID, text)
        comparison = results.read(workdir)
        todo = {
            name: [seed for seed in seed_list if seed not in comparison.accuracies(name)]
            for name in settings
        }
        _check_what_is_resumed(workdir, todo, together)
        for name, missing in todo.items():
            if missing:
                seeds.remove_incomplete(workdir / name)
        try:
            with Progress(comparison, list(settings), list(seed_list)) as progress:
                runner = _Runner(workdir, settings, progress)
                train_all = runner.train_together if together else runner.train_one_by_one
                train_all(todo)
        except KeyboardInterrupt:
            raise StoppedError(STOPPED, PREEMPTED_EXIT_CODE) from None
        finally:
            report.write_report(workdir)
    runs = results.read(workdir).runs
    return sum(bool(run.error) for name in settings for run in runs[name] if run.seed in seed_list)


def _check(
    name: str, config: ConfigDict, devices: list[jax.Device] | None, counts: dict[str, int]
) -> dict[str, Any]:
    """Traces a setting, without training, and returns what the report needs of it.

    `counts` has the training examples of the data opened so far, by the section config.data: with
    on_bad_image='skip' they are counted by decoding all images.
    """
    try:
        config_lib.validate(config)
        dataset, data = open_data(config), config.data
        section = data.to_json()
        if section not in counts:
            source = dataset.split(data.train_split, "data.train_split", data.on_bad_image)
            open_evaluation_sets(config, dataset)
            note_shared_examples(config, dataset)
            counts[section] = len(source)
        setup = set_up(config, dataset.info, counts[section], devices)
    except InputError as error:
        raise InputError(f"setting {name}: {error}") from error
    except Exception as error:  # of your own scheme, model or data set
        error.add_note(f"This is the setting {name} of the comparison")
        raise
    return {
        "num_steps": setup.schedule.num_steps,
        "steps_per_epoch": setup.schedule.steps_per_epoch,
        "num_parameters": count_parameters(setup.model.params),
        "test_name": evaluation_name(config),
    }


def _merge(workdir, new, settings):
    """Adds settings and seeds to those of earlier commands; refuses changes of settings."""
    old = results.read_grid(workdir)
    if old is None:
        return new
    for name in settings.keys() & old["settings"].keys():
        before, now = old["settings"][name], new["settings"][name]
        now["seeds"] = sorted({*before["seeds"], *now["seeds"]})
        config = settings[name]
        changed = resume.changes(before["config"] | {"seed": config.seed}, config)
        lines = [
            f"  {field}: {a!r} -> {b!r}"
            for field, (a, b) in changed.items()
            if not _may_change(field, config)
            and not (resume.is_moved_teacher(field, a, b) and Path(b).parent == workdir)
        ]
        if lines:
            raise InputError(
                f"--workdir={workdir} holds the setting {name} with another config:\n"
                + "\n".join(lines)
                + "\nRestore the old values, or use another --workdir"
            )
    return new | {
        "settings": old["settings"] | new["settings"],
        "baselines": old["baselines"] | new["baselines"],
        "commands": list(dict.fromkeys([*old["commands"], *new["commands"]])),
    }


def _check_what_is_resumed(workdir, todo, together):
    """Refuses settings that were begun with another --together, or prints a note about them."""
    for name, missing in todo.items():
        states = seeds.find_states(workdir / name, missing)
        alone = [str(seed) for seed, state in states.items() if state == "alone"]
        if not together and "shared" in states.values():
            print(
                f"note: {name}: the checkpoint that its seeds share is not used: each seed resumes "
                "from its own best one, or starts over. --together=yes uses it"
            )
        elif together and alone:  # training together would replace their checkpoints
            raise InputError(
                f"setting {name}: seeds {','.join(alone)} were started one by one: pass "
                "--together=no to resume them, or delete their folders"
            )
        elif together:
            _check_groups_are_whole(workdir, name, missing)


def _check_groups_are_whole(workdir, name, missing):
    """Refuses to go on without some of the seeds that share a checkpoint."""
    for folder, group in seeds.shared_checkpoints(workdir / name).items():
        others = [
            str(seed)
            for seed in group
            if seed not in missing
            and not (results.run_folder(workdir, name, seed) / results.STATUS).exists()
        ]
        if others and not set(group).isdisjoint(missing):
            raise InputError(
                f"setting {name}: seeds {','.join(map(str, group))} share a checkpoint, so they "
                f"can only be resumed together: name the seeds {','.join(others)} too, or delete "
                f"{folder} to start over"
            )


def _may_change(field, config):
    """Whether a second command may change a field."""
    data = config.data.name
    is_named = data not in datasets.FILE_SETS and not is_reference(data)
    return field in grid.HARMLESS or (field in ("data.data_dir", "data.manual_dir") and is_named)


class _Runner:
    """Trains runs. If one fails, records it and goes on with the next."""

    def __init__(self, workdir: Path, settings: Mapping[str, ConfigDict], progress: Progress):
        self._workdir = workdir
        self._settings = settings
        self._progress = progress

    def train_one_by_one(self, todo: Mapping[str, Sequence[int]]) -> None:
        """Trains each run on all devices, as `structinit_jax.main` does."""
        stop = workdir_lib.StopRequest()
        for name, missing in todo.items():
            for seed in missing:
                folder = results.run_folder(self._workdir, name, seed)
                self._progress.start(name, [seed])
                with _output_to(folder / LOG), self._recording(name, [seed]):
                    train(seeds.with_seed(self._settings[name], seed), folder, stop_request=stop)
                    self._finish(name, seed)
                if stop.reached(0):  # by a signal during the last step
                    raise StoppedError(STOPPED, PREEMPTED_EXIT_CODE)
            with _output_to(self._workdir / name / LOG):
                self._draw_maps(name)

    def train_together(self, todo: Mapping[str, Sequence[int]]) -> None:
        """Trains the seeds of a setting in one program, and on each device another setting."""
        devices = SimpleQueue()
        for device in jax.local_devices():
            devices.put(device)

        def train_setting(name, missing):
            if not missing:
                return
            if stop.reached(0):
                raise StoppedError(STOPPED, PREEMPTED_EXIT_CODE)
            device = devices.get()
            try:
                self._progress.start(name, missing)
                left = list(missing)
                with self._recording(name, left):
                    config, folder = self._settings[name], self._workdir / name
                    for seed, error in seeds.train_together(config, missing, folder, device, stop):
                        left.remove(seed)
                        self._finish(name, seed, error)
            finally:
                devices.put(device)

        with (
            workdir_lib.listen_for_signals() as stop,
            _output_to(self._workdir / LOG),
            ThreadPoolExecutor(len(jax.local_devices())) as pool,
        ):
            names = {pool.submit(train_setting, *item): item[0] for item in todo.items()}
            for future in as_completed(names):
                future.result()
                self._draw_maps(names[future])

    @contextlib.contextmanager
    def _recording(self, name: str, seed_list: Sequence[int]) -> Iterator[None]:
        """Records an error within the context as that of the runs; a signal stops them all."""
        try:
            yield
        except Exception as error:  # also of your own schemes and data sets
            if isinstance(error, StoppedError) and error.exit_code == PREEMPTED_EXIT_CODE:
                raise
            text = str(error)
            if isinstance(error, InputError | StoppedError):
                print(text)  # to the log; the report has the first line
            else:
                traceback.print_exc(file=sys.stdout)
                text = f"{type(error).__name__}: {text}"
            for seed in seed_list:
                self._finish(name, seed, text.splitlines()[0])

    def _finish(self, name, seed, error=""):
        """Records the end of a run; a failed one is trained again by the next command."""
        status = {"status": "failed", "error": error} if error else {"status": "done"}
        path = results.run_folder(self._workdir, name, seed) / results.STATUS
        path.parent.mkdir(parents=True, exist_ok=True)
        workdir_lib.write_atomically(path, json.dumps(status) + "\n")
        self._progress.finish(name, seed, error)

    def _draw_maps(self, name):
        """Draws the attention of the first seed that is done, before and after training."""
        config, path = self._settings[name], self._workdir / name / MAPS
        if path.exists():
            return
        done = results.read(self._workdir).accuracies(name)
        if not done:
            return
        seed = min(done)
        config = seeds.with_seed(config, seed)
        folder = results.run_folder(self._workdir, name, seed)
        try:
            restored = evaluate.restore_model(config, folder, jax.local_devices()[:1])
            images = collect.read_images(config, NUM_IMAGES)
            snapshots = collect.observe_run(config, restored, images)
            title = figures.title_by_offset(snapshots, f"{name}, seed {seed}")
            figures.draw_by_offset(snapshots, title, path)
        except InputError as error:
            print(f"note: no maps of {name}: {error}")
        except Exception:  # your own model need not have what is drawn
            traceback.print_exc(file=sys.stdout)
            print(f"note: no maps of {name}, see above")


@contextlib.contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Appends what is printed within the context to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", buffering=1) as file, contextlib.redirect_stdout(file):
        yield
