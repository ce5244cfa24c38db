"""Checkpoints through Orbax: the newest few and the best one, written while training continues."""

import functools
import json
import logging
import math
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers

from structinit_jax.errors import InputError
from structinit_jax.training import manifest, workdir
from structinit_jax.training.remote import Mirror
from structinit_jax.training.state import TrainState

MAX_IGNORED = 64
NOT_EVALUATED = -1.0  # accuracy of such a checkpoint; Orbax would warn at every save without one


class Checkpoints:
    """The checkpoints of a run that is being trained.

    Damaged checkpoints (see `training.manifest`) are reported and moved to `damaged/`, or ignored
    if they cannot be moved.

    Args:
      directory: Absolute path, created if it does not exist.
      keep: Number of newest checkpoints to keep, in addition to the one of the highest accuracy.
      mirror: Copies the checkpoints to object storage. Then each process has a directory of its
        own, and process 0 alone writes, from whole arrays.
      evaluation: What accuracies are measured on. Only those on the same are compared; after a
        resume that changes it, the best checkpoint of each evaluation is kept.
    """

    def __init__(
        self, directory: Path, keep: int, mirror: Mirror | None = None, evaluation: str = ""
    ):
        self.directory, self._mirror, self._evaluation = directory, mirror, evaluation
        self._alone = mirror is not None and jax.process_count() > 1
        self._sealing: Future | None = None  # of the newest checkpoint, while it is being written
        ignored = np.full(MAX_IGNORED, -1)
        if jax.process_index() == 0:
            directory.mkdir(parents=True, exist_ok=True)
            steps = _set_damaged_aside(directory)
            ignored[: len(steps)] = steps
        ignored = multihost_utils.broadcast_one_to_all(ignored)
        if self._alone:
            # The others see process 0's checkpoints, also if theirs were copied a moment later.
            steps = [int(f.name) for f in manifest.step_folders(directory)]
            steps = [step for step in steps if step not in ignored] or [-1]
            latest = int(multihost_utils.broadcast_one_to_all(np.int32(steps[0])))
            self._latest = None if latest < 0 else latest
        if self._alone and jax.process_index() != 0:
            return

        for name in ("absl", "asyncio"):
            logging.getLogger(name).addFilter(_is_worth_logging)
        newest = checkpoint_managers.LatestN(keep)
        # Orbax's own `best_fn` with `max_to_keep` may delete the latest step.
        known = map(_read_metrics, manifest.step_folders(directory))
        names = [evaluation, *(metrics.get("evaluation", evaluation) for metrics in known)]
        best = [
            checkpoint_managers.BestN(
                get_metric_fn=functools.partial(_accuracy, evaluation=name),
                n=1,
                keep_checkpoints_without_metrics=False,
            )
            for name in dict.fromkeys(names)
        ]
        self._manager = ocp.CheckpointManager(
            directory,
            options=ocp.CheckpointManagerOptions(
                create=False,
                step_name_format=_Without(frozenset(ignored.tolist())),
                preservation_policy=checkpoint_managers.AnyPreservationPolicy([newest, *best]),
                best_fn=best[0].get_metric_fn,  # without it Orbax does not write metrics
                cleanup_tmp_directories=True,
                multiprocessing_options=ocp.options.MultiprocessingOptions(
                    active_processes={0} if self._alone else None,
                    barrier_sync_key_prefix="alone" if self._alone else None,
                ),
                # In the background, Orbax waits minutes for a directory that cannot be created.
                async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
            ),
        )
        self._sealer = ThreadPoolExecutor(1, "seal_checkpoint")

    @property
    def latest_step(self) -> int | None:
        """Step of the newest checkpoint, or None if there is no checkpoint."""
        return self._latest if self._alone else self._manager.latest_step()

    def save(
        self, step: int, state: TrainState, run: dict[str, Any], accuracy: float | None
    ) -> None:
        """Starts to save a checkpoint; blocks only for the copy to host memory.

        Args:
          step: Number of the checkpoint. An existing one is not replaced.
          state: Training state after this step.
          run: JSON object to save with it; `read_run` reads it.
          accuracy: Accuracy at this step if it was evaluated; it determines the best checkpoint.

        Raises:
          InputError: The directory is full or not writable, now or at the previous save.
        """
        self.wait()
        state = _with_key_data(state)
        if self._alone:
            state = _whole_arrays(state)
            self._latest = step
            if jax.process_index() != 0:
                return
        if step in self._manager.all_steps():
            return
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), run=ocp.args.JsonSave(run))
        with self._explain_failure():
            accuracy = NOT_EVALUATED if accuracy is None else accuracy
            metrics = {"accuracy": accuracy, "evaluation": self._evaluation}
            self._manager.save(step, args=args, metrics=metrics)
        self._sealing = self._sealer.submit(self._seal, step)

    def _seal(self, step: int) -> None:
        self._manager.wait_until_finished()
        if jax.process_index() == 0:
            manifest.seal(self.directory / str(step))
            if self._mirror is not None:
                self._mirror.push_checkpoints()

    def wait(self) -> None:
        """Waits until the newest checkpoint is complete and sealed.

        Raises:
          InputError: It could not be written.
        """
        sealing, self._sealing = self._sealing, None
        if sealing is not None:
            with self._explain_failure():
                # Raises once in each thread; here, so that `close` does not raise it again.
                self._manager.wait_until_finished()
                sealing.result()

    def close(self) -> None:
        """Waits until everything is written."""
        if self._alone and jax.process_index() != 0:
            return
        try:
            self.wait()
        finally:
            self._sealer.shutdown()
            self._manager.close()

    def _explain_failure(self):
        place = self._mirror.url if self._mirror else self.directory
        return workdir.explain_failed_write("a checkpoint", place, self._what_is_safe)

    def _what_is_safe(self) -> str:
        for folder in manifest.step_folders(self.directory):
            if not manifest.find_damage(folder):
                return f"the checkpoint of step {folder.name} is intact, later steps are lost"
        return "there is no earlier checkpoint"


def _whole_arrays(state: TrainState) -> TrainState:
    """Returns a state of several processes as NumPy arrays; every process must call this."""
    with jax.transfer_guard("allow"):
        return jax.tree.map(lambda x: multihost_utils.process_allgather(x, tiled=True), state)


def _is_key(leaf):
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _with_key_data(tree):
    """Replaces random keys, or their shapes, by their data, since Orbax does not restore keys."""

    def convert(leaf):
        if not _is_key(leaf):
            return leaf
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.random.key_data(leaf)
        data = jax.eval_shape(jax.random.key_data, leaf)
        return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)

    return jax.tree.map(convert, tree)


def _set_damaged_aside(directory):
    """Moves damaged checkpoints away; returns the steps of those that could not be moved."""
    left = []
    for folder in manifest.step_folders(directory):
        if damage := manifest.find_damage(folder):
            try:
                result = f"Moved to {manifest.set_aside(folder)}"
            except OSError as error:
                left.append(int(folder.name))
                result = f"It cannot be moved ({error.strerror}) and is ignored"
            print(f"note: checkpoint {folder} is damaged: {damage}. {result}")
    return left[:MAX_IGNORED]


class _Without(ocp.path.step.NameFormat):
    """Names of step folders, except those of some steps."""

    def __init__(self, ignored):
        self._ignored, self._names = ignored, ocp.path.step.standard_name_format()

    def build_name(self, step):
        return self._names.build_name(step)

    def find_all(self, base_path):
        found = self._names.find_all(base_path)
        return (metadata for metadata in found if metadata.step not in self._ignored)

    def find_step(self, base_path, step):
        return self._names.find_step(base_path, step)


def find_step(directory: Path, wanted: str = "newest") -> int | None:
    """Returns the step of an intact checkpoint, or None if there is none.

    Changes nothing, so it can be called while a run writes to the directory.

    Args:
      directory: Directory of the checkpoints.
      wanted: 'newest', 'best' (of the highest accuracy on the split that training evaluated last,
        see `evaluate.deciding_accuracy`, among those that are kept), or the number of a step.

    Raises:
      InputError: `wanted` is none of these.
    """
    if wanted not in ("newest", "best") and not wanted.isdecimal():
        raise InputError(f"--step={wanted} must be 'newest', 'best' or the number of a step")
    step = -1
    if jax.process_index() == 0:
        folders = manifest.step_folders(directory)
        if wanted == "best":
            folders = _best_first(folders)
        elif wanted != "newest":
            folders = [folder for folder in folders if int(folder.name) == int(wanted)]
        for folder in folders:
            if damage := manifest.find_damage(folder):
                print(f"note: skipping checkpoint {folder}: {damage}")
            else:
                step = int(folder.name)
                break
    step = int(multihost_utils.broadcast_one_to_all(np.int32(step)))
    return None if step < 0 else step


def read_run(directory: Path, step: int) -> dict[str, Any]:
    """Reads the JSON object that was saved with a checkpoint."""
    return ocp.JsonCheckpointHandler().restore(directory / str(step) / "run")


def restore(
    directory: Path, step: int, abstract_state: TrainState, *, weights_only: bool = False
) -> TrainState:
    """Restores a training state with the shapes, types and shardings of an abstract one.

    Args:
      directory: Directory of the checkpoints.
      step: Step to restore.
      abstract_state: Shapes, types and shardings.
      weights_only: Restore no optimizer state, and averaged weights only if `abstract_state` has
        them: for evaluation and export.

    Raises:
      InputError: The checkpoint does not fit; the message names the first difference.
    """
    folder, handler = directory / str(step) / "state", ocp.PyTreeCheckpointHandler()
    saved, expected = handler.metadata(folder).tree, abstract_state._asdict()
    if weights_only:
        del expected["opt_state"]
    if weights_only and not expected["ema"]:
        del expected["ema"]
    numbers = {part: _with_key_data(tree) for part, tree in expected.items()}
    _check_fits(folder.parent, saved, numbers)
    args = ocp.args.PyTreeRestore(
        numbers,
        restore_args=ocp.checkpoint_utils.construct_restore_args(numbers),
        partial_restore=weights_only,
    )
    restored = jax.tree.map(
        lambda leaf, value: jax.random.wrap_key_data(value) if _is_key(leaf) else value,
        expected,
        handler.restore(folder, args=args),
    )
    return TrainState(**{"opt_state": {}, "ema": {}} | restored)


def _check_fits(folder: Path, saved: dict[str, Any], expected: dict[str, Any]) -> None:
    if "ema" in expected and bool(saved["ema"]) != bool(expected["ema"]):
        has, rate = ("has", "is 0") if saved["ema"] else ("has no", "is not 0")
        raise InputError(
            f"checkpoint {folder} {has} averaged weights, but config.ema_decay {rate}: set it to "
            "the value that the run was trained with"
        )
    for part, tree in expected.items():
        old, new = _shapes_by_name(saved[part]), _shapes_by_name(tree)
        for name in sorted(old.keys() | new.keys()):
            if old.get(name) != new.get(name):
                raise InputError(
                    f"checkpoint {folder} does not fit: {part} {name!r} is "
                    f"{old.get(name, 'missing')} in the checkpoint, {new.get(name, 'missing')} in "
                    "the model of this config. Use the config.model of the checkpoint, or another "
                    "--workdir"
                )


def _shapes_by_name(tree) -> dict[str, str]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): f"shape {list(leaf.shape)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _accuracy(metrics: dict[str, Any], evaluation: str | None) -> float:
    """Reads the accuracy of a checkpoint: `NOT_EVALUATED` also if it is one on something else.

    Older checkpoints do not tell their evaluation; the oldest call the accuracy 'test/accuracy'.
    """
    if evaluation is not None and metrics.get("evaluation", evaluation) != evaluation:
        return NOT_EVALUATED
    return metrics.get("accuracy", metrics.get("test/accuracy", NOT_EVALUATED))


def _best_first(folders):
    """Sorts checkpoints, newest first, by their accuracies on what the newest was evaluated on."""
    metrics = {folder: _read_metrics(folder) for folder in folders}
    evaluated = [folder for folder in folders if _accuracy(metrics[folder], None) >= 0]
    told = (metrics[folder].get("evaluation") for folder in evaluated)
    evaluation = next(filter(None, told), None)
    accuracies = {folder: _accuracy(metrics[folder], evaluation) for folder in evaluated}
    comparable = [folder for folder in evaluated if accuracies[folder] >= 0]
    return sorted(comparable, key=accuracies.__getitem__, reverse=True)  # of equals, the newest


def read_accuracy(folder: Path) -> float:
    """Reads the accuracy that a checkpoint was saved with, below 0 if it was not evaluated."""
    return _accuracy(_read_metrics(folder), None)


def _read_metrics(folder):
    try:
        return json.loads((folder / "metrics" / "metrics").read_text())
    except (OSError, ValueError):
        return {"accuracy": math.inf}  # looked at first, and found to be damaged


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """Drops failed writes that Orbax logs with a traceback and raises as well."""
    from_orbax = "orbax" in record.pathname or record.name == "asyncio"
    return not (from_orbax and record.exc_info and workdir.is_failed_write(record.exc_info[1]))
