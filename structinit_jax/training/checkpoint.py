"""Checkpoints with Orbax: the newest few and the best one, written while training continues.

`checkpoint_files` describes and checks the files of a checkpoint. Damaged checkpoints are skipped,
so a run that is killed at any moment can resume from an earlier checkpoint.

Orbax 0.12.8 writes only to disks and gs://. For object storage, each process writes its shards to
a temporary directory and copies them, which works for both gs:// and s3://.
"""

import contextlib
import logging
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath, epy
from jax.experimental import multihost_utils

from structinit_jax.errors import InputError, require
from structinit_jax.files import is_url
from structinit_jax.training import checkpoint_files, distributed
from structinit_jax.training.checkpoint_files import RUN_FILE, STATE, step_folders
from structinit_jax.training.state import TrainState

with epy.lazy_imports():  # takes 0.3 s, which a run spends at its first checkpoint
    import orbax.checkpoint as ocp


def _is_worth_showing(record: logging.LogRecord) -> bool:
    # At every checkpoint, Orbax warns that without OCDBT there is nothing to merge. It also logs
    # errors in its threads with tracebacks, although `Checkpoints.wait` raises them.
    raised = record.exc_info and "orbax" in record.pathname
    return not raised and "merge of OCDBT" not in record.getMessage()


class Checkpoints:
    """The checkpoints of a training run: the newest `keep` and the best one.

    Damaged checkpoints are skipped and reported; raises `InputError` if all are damaged.
    Checkpoints that a killed run left unfinished are deleted. `latest_step` is the step of the
    newest checkpoint, or None if there is none.
    """

    def __init__(self, directory: epath.PathLike, keep: int):
        logging.getLogger("absl").addFilter(_is_worth_showing)
        self.directory = epath.Path(directory)
        self._keep = keep
        self._staged = is_url(directory)
        self._saver: ocp.AsyncCheckpointer | None = None  # made by the first `save`
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future | None = None
        self._runs: dict[int, dict[str, Any]] = {}  # intact checkpoints by step; only on process 0
        with distributed.shared_errors():
            if jax.process_index() == 0:
                self._read()
        self.latest_step = _from_process_0(max(self._runs, default=None))

    def _read(self):
        """Finds the intact checkpoints, and deletes unfinished ones."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for folder in step_folders(self.directory):
            if checkpoint_files.remove_unfinished(folder):
                print(f"note: deleted incomplete checkpoint {folder}")
        folders = step_folders(self.directory)
        self._runs = dict(checkpoint_files.intact_runs(folders))
        if not self._runs and any(map(self._is_damaged, folders)):
            raise InputError(
                f"{self.directory} has no intact checkpoint: move it away to start over"
            )

    def _is_damaged(self, folder):
        """Whether a checkpoint that is not intact was once finished."""
        finished = (folder / RUN_FILE).exists()
        if finished and self._staged:
            # A killed run can leave an upload that process 0 has finished, but others have not.
            finished = _has_indexes(folder, checkpoint_files.read_run(folder))
        return finished

    def save(self, step: int, state: TrainState, run: dict[str, Any]) -> None:
        """Starts saving a checkpoint in the background.

        Blocks until the previous one is written and the state is copied to host memory. If a write
        fails, the next call to `save`, `wait` or `close` raises the error.

        `run` has the fields of `checkpoint_files.read_run` except the first three. The best
        checkpoint has the highest 'accuracy' among those with the same 'evaluation' as the newest.
        """
        self.wait()
        num_indexes = jax.process_count() if self._staged else 1
        run = run | {"version": checkpoint_files.VERSION, "step": step, "num_indexes": num_indexes}
        folder = self.directory / str(step)
        if not self._staged:
            folder.mkdir(exist_ok=True)
        if jax.process_index() == 0:
            if (folder / STATE).exists() and not checkpoint_files.is_ours(folder):
                raise InputError(
                    f"{folder} has {STATE}/ next to files of another program: move it elsewhere"
                )
            # A damaged checkpoint of the same step may have left it.
            (folder / RUN_FILE).unlink(missing_ok=True)
        checkpoint_files.index_path(folder, jax.process_index()).unlink(missing_ok=True)
        # On TPUs, and between processes, Orbax makes implicit transfers.
        with jax.transfer_guard("allow"), contextlib.ExitStack() as cleanup:
            local = folder
            if self._staged:
                local = epath.Path(cleanup.enter_context(tempfile.TemporaryDirectory()))
            self._saver = self._saver or _make_saver(self._staged)
            tree = ocp.args.PyTreeSave(_parts(state))
            self._saver.save(local / STATE, args=tree, force=True)
            self._writing = self._writer.submit(self._finish, folder, local, cleanup.pop_all(), run)
        self.latest_step = step

    def wait(self) -> None:
        """Waits until this process's part of the newest checkpoint is written."""
        writing = self._writing
        self._writing = None
        if writing is not None:
            writing.result()

    def wait_for_all(self) -> None:
        """Waits for the parts of all processes: once one exits, JAX soon ends the others."""
        self.wait()
        with jax.transfer_guard("allow"):
            multihost_utils.sync_global_devices("checkpoint")

    def close(self) -> None:
        """Waits until everything is written."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()
            if self._saver:
                self._saver.close()

    def _finish(self, folder, local, cleanup, run):
        """Waits for Orbax, then completes the checkpoint with its checksums and `run.json`."""
        with cleanup:
            self._saver.wait_until_finished()
            process = jax.process_index()
            if process < run["num_indexes"]:
                paths = [path for path in Path(local / STATE).rglob("*") if path.is_file()]
                if process > 0:  # process 0 lists the metadata directly in `state/`
                    paths = [path for path in paths if path.parent.name != STATE]
                names = [path.relative_to(local).as_posix() for path in paths]
                files = {name: checkpoint_files.digest_of(local / name) for name in names}
                if self._staged:
                    checkpoint_files.copy(files, local, folder)
                checkpoint_files.write_index(folder, process, run, files)
            if process == 0:
                checkpoint_files.write_json(folder / RUN_FILE, run)
                self._runs[run["step"]] = run
                self._remove_old()

    def _remove_old(self):
        # Another process may not have finished its part of the newest checkpoint.
        finished = [
            step
            for step, run in sorted(self._runs.items(), reverse=True)
            if _has_indexes(self.directory / str(step), run)
        ]
        best = _find_best({step: self._runs[step] for step in finished})
        for step in set(finished).difference(finished[: self._keep], [best]):
            del self._runs[step]
            folder = self.directory / str(step)
            (folder / RUN_FILE).unlink()  # first, so that the rest is not used
            checkpoint_files.remove_unfinished(folder)


def find_step(directory: epath.PathLike, wanted: str | int = "newest") -> int | None:
    """Returns the step of an intact checkpoint, or None if there is none.

    Changes nothing, so it can be called while a run writes to the directory. `wanted` is 'newest',
    'best' (the highest accuracy on the split that training evaluated last, among the checkpoints
    kept), or the number of a step; raises `InputError` for anything else.
    """
    wanted = str(wanted)
    is_step = wanted in ("newest", "best") or wanted.isdecimal()
    require("step", wanted, "'newest', 'best' or a step number", is_step)
    step = None
    with distributed.shared_errors():
        if jax.process_index() == 0:
            folders = step_folders(directory)
            if wanted.isdecimal():
                folders = [folder for folder in folders if folder.name == wanted]
            intact = checkpoint_files.intact_runs(folders)
            if wanted == "best":
                step = _find_best(dict(intact))
            else:
                step, _ = next(intact, (None, None))  # reads no older checkpoint than this one
    return _from_process_0(step)


def restore(directory: epath.PathLike, step: int, abstract_state: TrainState) -> TrainState:
    """Restores a training state with the shapes, types and shardings of an abstract one.

    Parts that are None in `abstract_state` are not restored. If the checkpoint does not fit, raises
    an `InputError` that names the first difference.
    """
    folder = epath.Path(directory) / str(step)
    expected = _parts(abstract_state)
    with _on_disk(folder) as path, contextlib.closing(_make_handler()) as handler:
        saved = dict(handler.metadata(path).tree)
        _check_fits(folder, saved, expected)
        args = ocp.args.PyTreeRestore(
            expected,
            restore_args=ocp.checkpoint_utils.construct_restore_args(expected),
            partial_restore=True,  # `expected` may lack parts
        )
        restored = handler.restore(path, args=args)
    return abstract_state._replace(**jax.tree.map(_restore_key, restored, expected))


# -- parts of the format ---------------------------------------------------------------------------


def _make_saver(staged: bool) -> "ocp.AsyncCheckpointer":
    # Without a primary host, every process prepares its own directory.
    options = ocp.options.MultiprocessingOptions(primary_host=None if staged else 0)
    return ocp.AsyncCheckpointer(
        _make_handler(options),
        multiprocessing_options=options,
        # In the background, Orbax would wait minutes for a directory that cannot be created.
        async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
    )


def _make_handler(
    options: "ocp.options.MultiprocessingOptions | None" = None,
) -> "ocp.PyTreeCheckpointHandler":
    options = options or ocp.options.MultiprocessingOptions()
    # By default, each device would write its own slice of every replicated array.
    arrays = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
    # OCDBT would merge the files of all processes. It finds them with a glob, which treats [ and ]
    # in a path as a pattern.
    return ocp.PyTreeCheckpointHandler(
        use_ocdbt=False, multiprocessing_options=options, type_handler_registry=registry
    )


@contextlib.contextmanager
def _on_disk(folder: epath.Path) -> Iterator[Path]:
    """Yields the path of a checkpoint's state; in object storage, that of a temporary copy."""
    if not is_url(folder):
        yield Path(folder) / STATE
        return
    with tempfile.TemporaryDirectory() as copy:
        names = checkpoint_files.read_indexes(folder, checkpoint_files.read_run(folder))
        checkpoint_files.copy(names, folder, epath.Path(copy))
        yield Path(copy) / STATE


def _restore_key(array: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Converts the numbers that Orbax restores to a random key if `like` is one."""
    if not jax.dtypes.issubdtype(like.dtype, jax.dtypes.prng_key):
        return array
    impl = jax.random.key_impl(jnp.zeros((), like.dtype))
    return jax.random.wrap_key_data(array, impl=impl)


def _parts(state: TrainState) -> dict[str, Any]:
    return {name: part for name, part in state._asdict().items() if part is not None}


def _check_fits(folder: epath.Path, saved: dict[str, Any], expected: dict[str, Any]) -> None:
    old = _shapes_by_name({part: saved.get(part, {}) for part in expected})
    new = _shapes_by_name(expected)
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            raise InputError(
                f"checkpoint {folder} does not fit: {name!r} is {old.get(name, 'missing')} in the "
                f"checkpoint, {new.get(name, 'missing')} in the model of this config. Use the "
                "config of the checkpoint, or another workdir"
            )


def _shapes_by_name(tree) -> dict[str, str]:
    def describe(leaf):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):  # stored as numbers
            leaf = jax.eval_shape(jax.random.key_data, leaf)
        return f"shape {list(leaf.shape)}"

    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): describe(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _has_indexes(folder, run) -> bool:
    """Whether all processes have finished their part of a checkpoint."""
    processes = range(run["num_indexes"])
    return all(checkpoint_files.index_path(folder, process).exists() for process in processes)


def _find_best(runs: dict[int, dict[str, Any]]) -> int | None:
    """Returns the step with the highest accuracy on the images that were evaluated last.

    Ties go to the newest step.
    """
    measured = [step for step in sorted(runs, reverse=True) if runs[step]["accuracy"] is not None]
    last = runs[measured[0]]["evaluation"] if measured else ""
    comparable = [step for step in measured if runs[step]["evaluation"] == last]
    return max(comparable, key=lambda step: runs[step]["accuracy"], default=None)


def _from_process_0(step: int | None) -> int | None:
    step = int(multihost_utils.broadcast_one_to_all(np.int32(-1 if step is None else step)))
    return None if step < 0 else step
