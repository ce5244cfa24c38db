"""Trains several seeds of one setting together: one program steps all of them."""

import contextlib
import dataclasses
import functools
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from structinit_jax import resume
from structinit_jax.compare.results import STATUS, run_folder
from structinit_jax.compare.table import LOG
from structinit_jax.data.loader import make_loader
from structinit_jax.errors import InputError, StoppedError
from structinit_jax.evaluate import (
    Evaluator,
    deciding_accuracy,
    describe,
    describe_evaluation,
    evaluation_name,
    open_data,
    open_evaluation_sets,
)
from structinit_jax.train import check_finite, find_due, stopped_by_signal, train_batches
from structinit_jax.training import manifest, remat
from structinit_jax.training import mesh as mesh_lib
from structinit_jax.training import workdir as workdir_lib
from structinit_jax.training.checkpoint import (
    Checkpoints,
    find_step,
    read_accuracy,
    read_run,
    restore,
)
from structinit_jax.training.metrics import InFlight, MetricsLog, PendingMetrics, Progress
from structinit_jax.training.setup import set_up
from structinit_jax.training.state import initialize_and_measure

# Fraction of the device's memory for the state and the step; images take some of the rest.
USABLE_MEMORY = 0.8
TOGETHER = "together"  # folder of the shared checkpoints, until their seeds are done


def with_seed(config: ConfigDict, seed: int) -> ConfigDict:
    """Returns a copy of a config with another seed."""
    config = config.copy_and_resolve_references()
    config.seed = seed
    return config


def train_together(
    config: ConfigDict,
    seeds: Sequence[int],
    folder: Path,
    device: jax.Device,
    stop: workdir_lib.StopRequest,
) -> Iterator[tuple[int, str]]:
    """Trains seeds of a setting on one device, as many at a time as its memory allows.

    Every seed gets the workdir that `train` would write, with only two checkpoints: that of the
    highest accuracy and that of the last step. Until then, all seeds share one checkpoint in
    `together/`, from which they resume.

    Args:
      config: Config of the setting.
      seeds: The seeds.
      folder: Folder of the setting.
      device: The device.
      stop: Whether to stop after the next step.

    Yields:
      Each seed when it ends, and why it stopped early, or ''. The other seeds are not affected.

    Raises:
      InputError: The config or the data cannot be used.
      StoppedError: `stop` was set. The shared checkpoint is complete.
    """
    if started := _interrupted(folder, seeds):
        parts = [started, [seed for seed in seeds if seed not in started]]
    else:
        with contextlib.ExitStack() as on_exit:
            run = _SharedRun(config, seeds, folder, device, on_exit)
            if run.fits():
                yield from run.train(stop)
                return
        half = len(seeds) // 2
        parts = [seeds[:half], seeds[half:]]
    for part in parts:
        yield from train_together(config, part, folder, device, stop)


def shared_checkpoints(folder: Path) -> dict[Path, list[int]]:
    """Returns the groups of seeds that share a complete checkpoint, by the folder of the group.

    Args:
      folder: Folder of the setting.
    """
    return {
        shared: [int(seed) for seed in shared.name.split("_")[1:]]
        for shared in sorted((folder / TOGETHER).glob("seeds_*"))
        if any((step / manifest.MANIFEST).exists() for step in manifest.step_folders(shared))
    }


def find_states(folder: Path, seeds: Sequence[int]) -> dict[int, str]:
    """Returns which checkpoints each unfinished seed can resume from.

    Args:
      folder: Folder of the setting.
      seeds: The seeds.

    Returns:
      By seed: 'shared' if it shares a complete checkpoint with others, 'alone' if it only has
      checkpoints of its own, or 'none'.
    """
    shared = set().union(*shared_checkpoints(folder).values())

    def find_state(seed):
        own = run_folder(folder.parent, folder.name, seed)
        if seed in shared:
            return "shared"
        has_checkpoints = (own / "checkpoints").exists() and not (own / STATUS).exists()
        return "alone" if has_checkpoints else "none"

    return {seed: find_state(seed) for seed in seeds}


def remove_incomplete(folder: Path) -> None:
    """Removes what a kill before the first complete shared checkpoint has left of a setting."""
    complete = shared_checkpoints(folder)
    for shared in (folder / TOGETHER).glob("seeds_*"):
        if shared not in complete:
            print(f"note: {shared} has no complete checkpoint and is removed")
            shutil.rmtree(shared)
    with contextlib.suppress(OSError):  # there is none, or other seeds have theirs in it
        (folder / TOGETHER).rmdir()


def _interrupted(folder: Path, seeds: Sequence[int]) -> list[int]:
    """Returns the subset of the seeds that shares a checkpoint, if there is one."""
    groups = shared_checkpoints(folder).values()
    return next((group for group in groups if set(group) < set(seeds)), [])


class _SharedRun:
    """Seeds of one setting that are trained by one program.

    Arrays of the state and of a batch have a leading axis of the seeds.
    """

    def __init__(self, config, seeds, folder, device, on_exit):
        self.config, self.seeds = config, list(seeds)
        self.configs = [with_seed(config, seed) for seed in seeds]
        self.folders = [run_folder(folder.parent, folder.name, seed) for seed in seeds]
        self.shared = folder / TOGETHER / f"seeds_{'_'.join(map(str, seeds))}"
        self.device, self.on_exit = device, on_exit
        self.dataset = open_data(config)
        data = config.data
        self.source = self.dataset.split(data.train_split, "data.train_split", data.on_bad_image)
        self.trained_on = resume.describe_data(self.source, self.dataset.class_names)
        self.setup = set_up(config, self.dataset.info, len(self.source), [device])
        replicated = mesh_lib.replicated(self.setup.model.mesh)

        def stacked(leaf):
            return jax.ShapeDtypeStruct((len(seeds), *leaf.shape), leaf.dtype, sharding=replicated)

        self.abstract_state = jax.tree.map(stacked, self.setup.abstract_state)
        self.abstract_batch = jax.tree.map(stacked, self.setup.abstract_batch)
        self.seed_array = jax.device_put(np.array(seeds, np.uint32), replicated)
        self.step: jax.stages.Compiled | None = None

    def fits(self) -> bool:
        """Compiles the step; returns whether the device's memory suffices for it.

        A single seed takes the last policy of `config.model.remat` if none is sure to fit.
        """
        steps = list(self.setup.train_steps.values())
        single = len(self.seeds) == 1
        fits = any(self._compile(step) for step in (steps if single else steps[:1]))
        if single and self.step is None:
            raise InputError(
                f"config.batch_size={self.config.batch_size}: the step does not fit into the "
                "memory of one device: set config.accumulate_steps=2 or more, or pass --together=no"
            )
        return fits or single

    def _compile(self, step: jax.stages.Wrapped) -> bool:
        # The function before `jax.jit`, whose shardings are for two arguments.
        together = jax.jit(jax.vmap(step.__wrapped__), donate_argnums=0)
        lowered = together.lower(self.abstract_state, self.abstract_batch, self.seed_array)
        try:
            self.step = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if not remat.is_out_of_memory(error):
                raise
            return False
        limit = remat.memory_limit([self.device])
        return limit is None or remat.bytes_needed(self.step) < USABLE_MEMORY * limit

    def train(self, stop: workdir_lib.StopRequest) -> Iterator[tuple[int, str]]:
        """Trains all seeds to the end, from the shared checkpoint if there is one.

        Yields what `train_together` does.
        """
        config, schedule = self.config, self.setup.schedule
        num_seeds = len(self.seeds)
        self.shared.mkdir(parents=True, exist_ok=True)
        for folder, own in zip(self.folders, self.configs, strict=True):
            folder.mkdir(parents=True, exist_ok=True)
            workdir_lib.write_atomically(folder / "config.json", own.to_json(indent=2) + "\n")
        log_file = self.on_exit.enter_context((self.folders[0] / LOG).open("a", buffering=1))

        # -- State ---------------------------------------------------------------------------------
        checkpoints = Checkpoints(self.shared, 2)
        self.on_exit.callback(checkpoints.close)
        start_step = checkpoints.latest_step or 0
        pending = [PendingMetrics() for _ in self.seeds]
        errors: dict[int, str] = {}
        best = [_rewind(folder / "checkpoints", start_step) for folder in self.folders]
        if start_step:
            saved = read_run(self.shared, start_step)
            place = f"step {start_step} in {self.shared}"
            resume.check_data(saved, config, self.trained_on, place)
            state = restore(self.shared, start_step, self.abstract_state)
            pending = [PendingMetrics(values) for values in saved["pending_metrics"]]
            errors = {int(seed): error for seed, error in saved["errors"].items()}
            init_metrics = [{}] * num_seeds
        else:
            state, init_metrics = self._initialize()
        logs = [MetricsLog(folder, start_step) for folder in self.folders]
        for log, values in zip(logs, init_metrics, strict=True):
            self.on_exit.callback(log.close)
            if values:
                log.write(0, values)

        # -- Loop ----------------------------------------------------------------------------------
        test_name = evaluation_name(config)
        evaluate = Evaluator(config, self.setup.model, open_evaluation_sets(config, self.dataset))
        take = jax.jit(lambda tree, i: jax.tree.map(lambda leaf: leaf[i], tree))
        progress = Progress(
            start_step, schedule.num_steps, schedule.steps_per_epoch, config.batch_size
        )
        on_device: dict[int, Any] = {}
        in_flight = InFlight()
        for step, batch in enumerate(
            progress.watch(self._batches(start_step)), start=start_step + 1
        ):
            state, metrics = self.step(state, batch, self.seed_array)
            on_device[step] = metrics
            in_flight.add(metrics)
            due = find_due(config, schedule, step, stop)
            if due.log or due.save:
                fetched, on_device = jax.device_get(on_device), {}
                for i, seed in enumerate(self.seeds):
                    for number, values in fetched.items():
                        pending[i].add(number, jax.tree.map(lambda leaf, i=i: leaf[i], values))
                    try:
                        for line in check_finite(config, pending[i].fetch(), self.folders[i], None):
                            print(f"seed {seed}: {line}", file=log_file)
                    except StoppedError as error:
                        if seed not in errors:
                            print(f"seed {seed}: {error}", file=log_file)
                            errors[seed] = str(error).splitlines()[0]
            if due.log:
                speeds = progress.measure(step)
                averages = [values.average() for values in pending]
                for seed, log, values in zip(self.seeds, logs, averages, strict=True):
                    if seed not in errors:
                        log.write(step, values | speeds)
                print(
                    f"step {step}/{schedule.num_steps}  {num_seeds} seeds  "
                    f"{speeds['images_per_second']:.0f} images/s each",
                    file=log_file,
                )
            if due.evaluate:
                with progress.wait("evaluation"):
                    for i, (seed, log) in enumerate(zip(self.seeds, logs, strict=True)):
                        if seed not in errors:
                            own = take(state, i)
                            found = evaluate(own)
                            log.write(step, found)
                            print(f"step {step}  seed {seed}  {describe(found)}", file=log_file)
                            accuracy = deciding_accuracy(found, test_name)
                            # Before the shared checkpoint: a run that resumes from it does not
                            # evaluate this step again.
                            if accuracy >= best[i] or step == schedule.num_steps:
                                best[i] = max(accuracy, best[i])
                                self._save(i, step, own, pending[i], accuracy)
            if len(errors) == num_seeds:
                break
            if due.save:
                run = {
                    **self.trained_on,
                    "pending_metrics": [values.to_json() for values in pending],
                    "errors": {str(seed): error for seed, error in errors.items()},
                }
                with progress.wait("checkpoint"):
                    checkpoints.save(step, state, run, None)
            if due.stop:
                checkpoints.wait()
                raise stopped_by_signal(step, schedule.num_steps)
        checkpoints.wait()
        for seed in self.seeds:
            yield seed, errors.get(seed, "")
        # Last, when the caller has recorded these ends: seeds without one would start anew.
        shutil.rmtree(self.shared)
        with contextlib.suppress(OSError):  # other seeds have theirs in it
            self.shared.parent.rmdir()

    def _initialize(self):
        """Returns the stacked state before the first step, and metrics of each seed."""
        states, metrics = [], []
        for config in self.configs:
            params, model_state, values = initialize_and_measure(config, self.setup.model)
            states.append(self.setup.init_state(params, model_state))
            metrics.append(values)
        return jax.jit(_stack)(*states), metrics

    def _batches(self, start_step: int) -> Iterator[dict[str, jax.Array]]:
        """Yields the batches of all seeds, each with an order of its own."""
        augmentation = self.setup.augmentation
        make = functools.partial(
            make_loader, self.source, self.setup.model.mesh, image_size=augmentation.image_size
        )
        if crop := augmentation.host_crop:
            loaders = [
                make(random_crop=dataclasses.replace(crop, seed=seed)) for seed in self.seeds
            ]
        else:
            loaders = [make()] * len(self.seeds)
        streams = [
            train_batches(config, loader, self.setup.schedule, start_step)
            for config, loader in zip(self.configs, loaders, strict=True)
        ]
        stack = jax.jit(_stack)
        return (stack(*batches) for batches in zip(*streams, strict=True))

    def _save(self, i: int, step: int, state, pending: PendingMetrics, accuracy: float) -> None:
        """Saves a checkpoint of a seed to its own workdir; that of the highest accuracy stays."""
        directory, evaluation = self.folders[i] / "checkpoints", describe_evaluation(self.config)
        with contextlib.closing(Checkpoints(directory, 1, None, evaluation)) as checkpoints:
            run = {
                "config": json.loads(self.configs[i].to_json()),
                **self.trained_on,
                "pending_metrics": pending.to_json(),
            }
            checkpoints.save(step, state, run, accuracy)


def _rewind(directory: Path, step: int) -> float:
    """Removes a seed's checkpoints after a step, which run again; returns the best accuracy."""
    for folder in manifest.step_folders(directory):
        if int(folder.name) > step:
            shutil.rmtree(folder)
    best = find_step(directory, "best")
    return read_accuracy(directory / str(best)) if best else 0.0


def _stack(*trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
