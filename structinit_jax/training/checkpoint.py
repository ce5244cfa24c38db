"""Checkpoints through Orbax: the newest few and the best one, written while training continues."""

import logging
import operator
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
from structinit_jax.training.state import TrainState

BEST_METRIC = "test/accuracy"
# Never the best. Orbax would warn about missing metrics at every save without an evaluation.
NOT_EVALUATED = {BEST_METRIC: -1.0}
PARTS = {"opt_state": "optimizer state", "ema": "averaged weights"}  # all others: weights


class Checkpoints:
    """The checkpoints of a run that is being trained.

    Damaged checkpoints (see `training.manifest`) are reported and moved to `damaged/`.

    Args:
      directory: Absolute path, created if it does not exist.
      keep: Number of newest checkpoints to keep, in addition to the best by `BEST_METRIC`.
    """

    def __init__(self, directory: Path, keep: int):
        self.directory = directory
        if jax.process_index() == 0:
            for folder in manifest.step_folders(directory):
                if damage := manifest.find_damage(folder):
                    target = manifest.set_aside(folder)
                    print(f"note: checkpoint {folder} is damaged: {damage}. Moved to {target}")
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("checkpoints verified")

        for name in ("absl", "asyncio"):
            logging.getLogger(name).addFilter(_is_worth_logging)
        accuracy = operator.itemgetter(BEST_METRIC)
        newest = checkpoint_managers.LatestN(keep)
        # Orbax's own `best_fn` with `max_to_keep` may delete the latest step.
        best = checkpoint_managers.BestN(
            get_metric_fn=accuracy, n=1, keep_checkpoints_without_metrics=False
        )
        self._manager = ocp.CheckpointManager(
            directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=checkpoint_managers.AnyPreservationPolicy([newest, best]),
                best_fn=accuracy,  # without it Orbax does not write metrics
                cleanup_tmp_directories=True,
                # In the background, Orbax waits minutes for a directory that cannot be created.
                async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
            ),
        )
        self._sealer = ThreadPoolExecutor(1, "seal_checkpoint")
        self._sealing: Future | None = None  # of the newest checkpoint, while it is being written

    @property
    def latest_step(self) -> int | None:
        """Step of the newest checkpoint, or None if there is no checkpoint."""
        return self._manager.latest_step()

    def save(
        self, step: int, state: TrainState, run: dict[str, Any], metrics: dict[str, float] | None
    ) -> None:
        """Starts to save a checkpoint; blocks only for the copy to host memory.

        Args:
          step: Number of the checkpoint. An existing one is not replaced.
          state: Training state after this step.
          run: JSON object to save with it; `read_run` reads it.
          metrics: Evaluation results at this step, or None.

        Raises:
          InputError: The directory is full or not writable, now or at the previous save.
        """
        self.wait()
        if step in self._manager.all_steps():
            return
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), run=ocp.args.JsonSave(run))
        with self._explain_failure():
            self._manager.save(step, args=args, metrics=metrics or NOT_EVALUATED)
        self._sealing = self._sealer.submit(self._seal, step)

    def _seal(self, step: int) -> None:
        self._manager.wait_until_finished()
        if jax.process_index() == 0:
            manifest.seal(self.directory / str(step))

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
        try:
            self.wait()
        finally:
            self._sealer.shutdown()
            self._manager.close()

    def _explain_failure(self):
        return workdir.explain_failed_write("a checkpoint", self.directory, self._what_is_safe)

    def _what_is_safe(self) -> str:
        for folder in manifest.step_folders(self.directory):
            if not manifest.find_damage(folder):
                return f"the checkpoint of step {folder.name} is intact, later steps are lost"
        return "there is no earlier checkpoint"


def newest_step(directory: Path) -> int | None:
    """Returns the step of the newest intact checkpoint, or None if there is none.

    Changes nothing, so it can be used while a run is writing to the directory.
    """
    step = -1
    if jax.process_index() == 0:
        for folder in manifest.step_folders(directory):
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


def restore(directory: Path, step: int, abstract_state: TrainState) -> TrainState:
    """Restores a training state with the shapes, types and shardings of an abstract one.

    Raises:
      InputError: The checkpoint does not fit; the message names the first difference.
    """
    folder = directory / str(step)
    _check(folder, abstract_state._asdict())
    return _restore(folder, abstract_state)


def restore_weights(directory: Path, step: int, abstract_state: TrainState) -> TrainState:
    """Restores a training state for evaluation and export; see `restore`.

    The optimizer state is not restored, nor are averaged weights if `abstract_state.ema` is empty.
    """
    folder = directory / str(step)
    fields = abstract_state._asdict()
    del fields["opt_state"]
    if not abstract_state.ema:
        del fields["ema"]
    _check(folder, fields)
    return TrainState(**{"opt_state": {}, "ema": {}} | _restore(folder, fields, partial=True))


def _restore(folder: Path, abstract: Any, partial: bool = False) -> Any:
    args = ocp.args.PyTreeRestore(
        abstract,
        restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
        partial_restore=partial,
    )
    return ocp.PyTreeCheckpointHandler().restore(folder / "state", args=args)


def _check(folder: Path, fields: dict[str, Any]) -> None:
    """Compares the shapes in some fields of a training state with those in a checkpoint."""
    saved = ocp.PyTreeCheckpointHandler().metadata(folder / "state").tree
    if "ema" in fields and bool(saved["ema"]) != bool(fields["ema"]):
        problem = (
            "averaged weights, but config.ema_decay is 0: set it to the value of that run"
            if saved["ema"]
            else "no averaged weights, which config.ema_decay requires: set it to 0"
        )
        raise InputError(f"checkpoint {folder} has {problem}")
    for field in fields:
        ours, theirs = _shapes_by_name(fields[field]), _shapes_by_name(saved[field])
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                cause = "version of this package" if field == "opt_state" else "config.model"
                raise InputError(
                    f"checkpoint {folder} does not fit: first difference at "
                    f"{PARTS.get(field, 'weights')} {name!r}, {theirs.get(name, 'missing')} in the "
                    f"checkpoint, {ours.get(name, 'missing')} in the model. It was written with a "
                    f"different {cause}: use that one, or another --workdir"
                )


def _shapes_by_name(tree) -> dict[str, str]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): f"shape {list(leaf.shape)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """Drops failed writes that Orbax logs with a traceback and raises as well."""
    from_orbax = "orbax" in record.pathname or record.name == "asyncio"
    return not (from_orbax and record.exc_info and workdir.is_failed_write(record.exc_info[1]))
