"""Checkpoints through orbax: the newest few and the best one, written beside the training."""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from structinit_jax.errors import InputError
from structinit_jax.training.state import TrainState

BEST_METRIC = "test/accuracy"


class Checkpoints:
    """The checkpoints of one run.

    Args:
      directory: an absolute path; made if it is missing.
      keep: how many of the newest to keep. The best by `BEST_METRIC` is kept besides.
    """

    def __init__(self, directory: Path, keep: int):
        # orbax's own `best_fn` with `max_to_keep` may drop the latest step, which resuming needs.
        policy = checkpoint_managers.AnyPreservationPolicy(
            [
                checkpoint_managers.LatestN(keep),
                checkpoint_managers.BestN(
                    get_metric_fn=lambda metrics: metrics[BEST_METRIC],
                    n=1,
                    keep_checkpoints_without_metrics=False,
                ),
            ]
        )
        self.directory = directory
        self._manager = ocp.CheckpointManager(
            directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=policy, cleanup_tmp_directories=True
            ),
            item_handlers={
                "state": ocp.StandardCheckpointHandler(),
                "run": ocp.JsonCheckpointHandler(),
            },
        )

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
        """
        if step in self._manager.all_steps():
            return
        self._manager.save(
            step,
            args=ocp.args.Composite(state=ocp.args.StandardSave(state), run=ocp.args.JsonSave(run)),
            metrics=metrics,
        )

    def run(self, step: int) -> dict[str, Any]:
        """The JSON object of a checkpoint alone."""
        args = ocp.args.Composite(run=ocp.args.JsonRestore())
        return self._manager.restore(step, args=args)["run"]

    def restore(self, step: int, abstract_state: TrainState) -> TrainState:
        """Restores a state into the shapes, types and shardings of an abstract one.

        Raises:
          InputError: if the checkpoint is of another architecture; names the first difference.
        """
        saved = self._manager.item_metadata(step)["state"]
        self._check_same_weights(step, saved["params"], abstract_state.params)
        self._check_same_weights(step, saved["model_state"], abstract_state.model_state)
        args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract_state))
        return self._manager.restore(step, args=args)["state"]

    def _check_same_weights(self, step, saved, expected):
        saved, expected = _shapes_by_name(saved), _shapes_by_name(expected)
        for name in sorted(saved.keys() | expected.keys()):
            if saved.get(name) != expected.get(name):
                raise InputError(
                    f"checkpoint {self.directory / str(step)} is of another architecture than "
                    f"config.model: first difference at weights {name!r}, "
                    f"{_describe(saved.get(name))} in the checkpoint, "
                    f"{_describe(expected.get(name))} in the model. Give the config that it was "
                    "trained with, or another --workdir"
                )

    def close(self) -> None:
        """Waits until everything is written."""
        self._manager.wait_until_finished()
        self._manager.close()


def _shapes_by_name(tree) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): tuple(leaf.shape)
        for path, leaf in leaves
    }


def _describe(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else f"shape {list(shape)}"
