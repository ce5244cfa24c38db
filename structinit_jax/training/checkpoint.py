"""Checkpoints through orbax: the newest few and the best one, written beside the training."""

import contextlib
import logging
import re
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers

from structinit_jax.errors import InputError
from structinit_jax.training import manifest
from structinit_jax.training.state import TrainState

BEST_METRIC = "test/accuracy"
# Never the best. Orbax would warn of missing metrics at every save without an evaluation.
NOT_EVALUATED = {BEST_METRIC: -1.0}


class Checkpoints:
    """The checkpoints of one run.

    A checkpoint counts once its manifest is written (see `training.manifest`). Before a run goes
    on, all are verified, and damaged ones are named and moved to `damaged/`, so that the one before
    them is the newest.

    Args:
      directory: an absolute path; made if it is missing.
      keep: how many of the newest to keep. The best by `BEST_METRIC` is kept besides.
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

        def accuracy(metrics):
            return metrics[BEST_METRIC]

        # orbax's own `best_fn` with `max_to_keep` may drop the latest step, which resuming needs.
        policy = checkpoint_managers.AnyPreservationPolicy(
            [
                checkpoint_managers.LatestN(keep),
                checkpoint_managers.BestN(
                    get_metric_fn=accuracy,
                    n=1,
                    keep_checkpoints_without_metrics=False,
                ),
            ]
        )
        self._manager = _open_manager(
            directory,
            preservation_policy=policy,
            best_fn=accuracy,  # orbax writes metrics only where this is given
            cleanup_tmp_directories=True,
            # Made in the background, a folder that cannot be made is waited for for minutes.
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
        )
        self._sealer = ThreadPoolExecutor(1, "seal_checkpoint")
        self._sealing: Future | None = None  # of the newest step, while it is being written

    @property
    def latest_step(self) -> int | None:
        """The step of the newest checkpoint, or None where there is none."""
        return self._manager.latest_step()

    def save(
        self, step: int, state: TrainState, run: dict[str, Any], metrics: dict[str, float] | None
    ) -> None:
        """Starts to save; only the copy off the devices is waited for.

        Args:
          step: names the checkpoint. One that exists already is left as it is.
          state: the state at this step.
          run: a JSON object to save beside it.
          metrics: evaluation results at this step, if there are any.

        Raises:
          InputError: if the folder cannot be written to, now or since the save before.
        """
        self.wait()
        if step in self._manager.all_steps():
            return
        with self._explain_failure():
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state), run=ocp.args.JsonSave(run)
                ),
                metrics=metrics or NOT_EVALUATED,
            )
        self._sealing = self._sealer.submit(self._seal, step)

    def _seal(self, step: int) -> None:
        self._manager.wait_until_finished()
        if jax.process_index() == 0:
            manifest.seal(self.directory / str(step))

    def wait(self) -> None:
        """Waits until the newest checkpoint is whole and sealed.

        Raises:
          InputError: if it could not be written.
        """
        sealing, self._sealing = self._sealing, None
        if sealing is not None:
            with self._explain_failure():
                # It raises once in each thread: in this one here, so not in `close`.
                self._manager.wait_until_finished()
                sealing.result()

    @contextlib.contextmanager
    def _explain_failure(self):
        """Tells a full or read-only disk, in orbax's many types of errors, as what it is."""
        try:
            yield
        except (OSError, ValueError) as error:
            if not _is_failed_write(error):
                raise
            reason = re.sub(r"\s*\[os_error_code.*", "", str(error).rsplit(": ", 1)[-1])
            if isinstance(error, OSError):
                reason = error.strerror
            whole = [
                p for p in manifest.step_folders(self.directory) if not manifest.find_damage(p)
            ]
            safe = (
                f"the checkpoint of step {whole[0].name} is whole, and the steps since are lost"
                if whole
                else "there is no earlier checkpoint"
            )
            raise InputError(
                f"a checkpoint could not be written to {self.directory}: {reason}. The run stops; "
                f"{safe}. Make room there, or make it writable, and give the same command again"
            ) from error

    def run(self, step: int) -> dict[str, Any]:
        """The JSON object of a checkpoint alone."""
        args = ocp.args.Composite(run=ocp.args.JsonRestore())
        return self._manager.restore(step, args=args)["run"]

    def restore(self, step: int, abstract_state: TrainState) -> TrainState:
        """Restores a state into the shapes, types and shardings of an abstract one.

        Raises:
          InputError: if the checkpoint is of another architecture; names the first difference.
        """
        return _restore(self._manager, step, abstract_state)

    def close(self) -> None:
        """Waits until everything is written."""
        try:
            self.wait()
        finally:
            self._sealer.shutdown()
            self._manager.close()


def restore_newest(directory: Path, abstract_state: TrainState) -> tuple[int, TrainState] | None:
    """The step and state of the newest whole checkpoint, or None where there is none.

    Changes nothing, so that it may read from a run that is under way.

    Raises:
      InputError: if the checkpoint is of another architecture; names the first difference.
    """
    step = -1
    if jax.process_index() == 0:
        for folder in manifest.step_folders(directory):
            if damage := manifest.find_damage(folder):
                print(f"note: checkpoint {folder} is not used: {damage}")
            else:
                step = int(folder.name)
                break
    if jax.process_count() > 1:
        step = int(multihost_utils.broadcast_one_to_all(np.int32(step)))
    if step < 0:
        return None
    # Metrics, which may be damaged in other checkpoints, are not read, and nothing is written.
    manager = _open_manager(directory, create=False, lightweight_initialize=True)
    with contextlib.closing(manager):
        return step, _restore(manager, step, abstract_state)


def read_run(directory: Path, step: int) -> dict[str, Any]:
    """The JSON object of a checkpoint alone; changes nothing."""
    manager = _open_manager(directory, create=False, lightweight_initialize=True)
    with contextlib.closing(manager):
        return manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore()))["run"]


def _is_failed_write(error: BaseException | None) -> bool:
    """Whether an error is the disk's, in the types that orbax and TensorStore give it."""
    return isinstance(error, OSError) or (
        isinstance(error, ValueError) and "os_error_code" in str(error)
    )


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """False for failed writes that orbax logs from its threads and tasks, and raises besides.

    Their tracebacks would bury what `Checkpoints` says of them.
    """
    from_orbax = "orbax" in record.pathname or record.name == "asyncio"
    return not (from_orbax and record.exc_info and _is_failed_write(record.exc_info[1]))


def _open_manager(directory: Path, **options) -> ocp.CheckpointManager:
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_is_worth_logging)
    return ocp.CheckpointManager(
        directory,
        options=ocp.CheckpointManagerOptions(**options),
        item_handlers={
            "state": ocp.StandardCheckpointHandler(),
            "run": ocp.JsonCheckpointHandler(),
        },
    )


def _restore(manager: ocp.CheckpointManager, step: int, abstract_state: TrainState) -> TrainState:
    saved = manager.item_metadata(step)["state"]
    folder = Path(manager.directory) / str(step)
    other = "of another architecture than config.model"
    _check_same(folder, other, "weights", saved["params"], abstract_state.params)
    _check_same(folder, other, "weights", saved["model_state"], abstract_state.model_state)
    if saved["ema"] and not abstract_state.ema:
        raise InputError(
            f"checkpoint {folder} holds averaged weights, which config.ema_decay=0 has no place "
            "for: give the rate that it was trained with"
        )
    if abstract_state.ema and not saved["ema"]:
        raise InputError(
            f"checkpoint {folder} holds no averaged weights, which config.ema_decay asks for: set "
            "it to 0"
        )
    other = "by another version of this package"
    _check_same(folder, other, "averaged weights", saved["ema"], abstract_state.ema)
    _check_same(folder, other, "optimizer state", saved["opt_state"], abstract_state.opt_state)
    args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract_state))
    return manager.restore(step, args=args)["state"]


def _check_same(folder: Path, other: str, part: str, saved, expected) -> None:
    saved, expected = _shapes_by_name(saved), _shapes_by_name(expected)
    for name in sorted(saved.keys() | expected.keys()):
        if saved.get(name) != expected.get(name):
            raise InputError(
                f"checkpoint {folder} is {other}: first difference at {part} {name!r}, "
                f"{_describe(saved.get(name))} in the checkpoint, {_describe(expected.get(name))} "
                "in the model. Give what it was trained with, or another --workdir"
            )


def _shapes_by_name(tree) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): tuple(leaf.shape)
        for path, leaf in leaves
    }


def _describe(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else f"shape {list(shape)}"
