"""Checkpoints through Orbax: the newest few and the best one, written while training continues.

A checkpoint is a folder `STEP/`, on a disk or in object storage:

- `state/`: the training state, of which each process writes the shards on its devices (Orbax);
- `index_0.json`: checksums of the files of `state/`, since Orbax restores flipped bytes without an
  error. In object storage process K writes the checksums of its own files to `index_K.json`;
- `run.json`: the config, the data and the accuracy. It is written last.

The JSON files end with their own checksums. A checkpoint is intact if all files are there and match
their checksums. Others are skipped, so after a kill at any moment the earlier checkpoints are used.

Orbax 0.12.8 writes to disks and gs:// only. For object storage each process stages its shards in
a temporary directory and copies them, which serves gs:// and s3:// alike.
"""

import contextlib
import hashlib
import json
import logging
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath, epy
from jax.experimental import multihost_utils

from structinit_jax.errors import InputError
from structinit_jax.training.state import TrainState
from structinit_jax.training.workdir import is_url

with epy.lazy_imports():  # takes 0.4 s; training does it while the step compiles
    import orbax.checkpoint as ocp

# At every checkpoint, Orbax warns that without OCDBT there is nothing to merge.
logging.getLogger("absl").addFilter(lambda record: "merge of OCDBT" not in record.getMessage())

STATE, RUN = "state", "run.json"
PART = re.compile(r"state(\.orbax-checkpoint-tmp.*)?|index_\d+\.json|run\.json")


class DamagedError(Exception):
    """A file of a checkpoint is missing or not what was written; the message says which one."""


class Checkpoints:
    """The checkpoints of a run that is being trained: the newest `keep`, and the best one.

    Damaged checkpoints are reported and not used; `InputError` if there are several and none is
    intact. Those that a kill left unfinished are deleted, unless their folder holds other files
    too. `latest_step` is the step of the newest checkpoint, or None if there is none.
    """

    def __init__(self, directory: epath.PathLike, keep: int):
        self.directory = epath.Path(directory)
        self._keep = keep
        self._staged = is_url(directory)
        # Without a primary host every process prepares its own directory.
        options = ocp.options.MultiprocessingOptions(primary_host=None if self._staged else 0)
        self._saver = ocp.AsyncCheckpointer(
            _make_handler(options),
            multiprocessing_options=options,
            # In the background, Orbax waits minutes for a directory that cannot be created.
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
        )
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future | None = None
        self._runs: dict[int, dict[str, Any]] = {}  # of all intact checkpoints; on process 0
        if jax.process_index() == 0:
            self.directory.mkdir(parents=True, exist_ok=True)
            for folder in step_folders(self.directory):
                _remove_unfinished(folder)
            folders = step_folders(self.directory)
            self._runs = dict(_intact_runs(folders))
            # The first one may be incomplete, if a process ended while others had finished.
            if not self._runs and sum((folder / RUN).exists() for folder in folders) > 1:
                raise InputError(f"{self.directory} has no intact checkpoint: repair or delete it")
        self.latest_step = _from_process_0(max(self._runs, default=None))

    def save(self, step: int, state: TrainState, run: dict[str, Any]) -> None:
        """Starts to save a checkpoint in the background.

        Blocks until the previous one is written and the state is copied to host memory. If a write
        fails, the next call of `save`, `wait` or `close` raises the error.

        `run` is a JSON object that `read_run` reads. The best checkpoint has the highest 'accuracy'
        (None if this step was not evaluated) among those with the same 'evaluation' as the newest.
        """
        self.wait()
        num_indexes = jax.process_count() if self._staged else 1
        run = run | {"step": step, "num_indexes": num_indexes}
        folder = self.directory / str(step)
        if jax.process_index() == 0:
            if (folder / STATE).exists() and not _is_ours(folder):
                raise InputError(
                    f"{folder} has {STATE}/ next to files of another program: move the folder away "
                    "and run the same command again to resume"
                )
            (folder / RUN).unlink(missing_ok=True)  # of a damaged checkpoint of the same step
        _index(folder, jax.process_index()).unlink(missing_ok=True)
        # On TPUs, and between processes, Orbax makes implicit transfers.
        with jax.transfer_guard("allow"), contextlib.ExitStack() as stage:
            local = folder
            if self._staged:
                local = epath.Path(stage.enter_context(tempfile.TemporaryDirectory()))
            local.mkdir(parents=True, exist_ok=True)
            tree = ocp.args.PyTreeSave(_parts(state))
            self._saver.save(local / STATE, args=tree, force=True)
            self._writing = self._writer.submit(self._finish, folder, local, stage.pop_all(), run)
        self.latest_step = step

    def wait(self) -> None:
        """Waits until this process's part of the newest checkpoint is written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def wait_for_all(self) -> None:
        """Waits for the parts of all processes: JAX ends them soon after the first one exits."""
        self.wait()
        with jax.transfer_guard("allow"):
            multihost_utils.sync_global_devices("checkpoint")

    def close(self) -> None:
        """Waits until everything is written."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()
            self._saver.close()

    def _finish(self, folder, local, stage, run):
        """Waits for Orbax, and completes the checkpoint with its checksums and `run.json`."""
        with stage:
            self._saver.wait_until_finished()
            process = jax.process_index()
            if process < run["num_indexes"]:
                paths = [path for path in Path(local / STATE).rglob("*") if path.is_file()]
                if process > 0:  # process 0 lists the files that describe the whole
                    paths = [path for path in paths if path.parent.name != STATE]
                names = [path.relative_to(local).as_posix() for path in paths]
                files = {name: _digest_of(local / name) for name in names}
                if self._staged:
                    _copy(files, local, folder)
                _write_json(_index(folder, process), files)
            if process == 0:
                _write_json(folder / RUN, run)
                self._runs[run["step"]] = run
                self._remove_old()

    def _remove_old(self):
        # Another process may not have finished its part of the newest.
        finished = [s for s in sorted(self._runs, reverse=True) if self._is_finished(s)]
        best = _find_best({step: self._runs[step] for step in finished})
        for step in set(finished).difference(finished[: self._keep], [best]):
            del self._runs[step]
            folder = self.directory / str(step)
            (folder / RUN).unlink()  # first, so that the rest is not used
            _remove_unfinished(folder)

    def _is_finished(self, step):
        others = range(1, self._runs[step]["num_indexes"])
        return all(_index(self.directory / str(step), k).exists() for k in others)


def step_folders(directory: epath.PathLike) -> list[epath.Path]:
    """Lists the checkpoints in a directory, newest step first."""
    directory = epath.Path(directory)
    paths = directory.iterdir() if directory.is_dir() else ()
    names = [path.name for path in paths if path.name.isascii() and path.name.isdigit()]
    return [directory / name for name in sorted(names, key=int, reverse=True)]


def find_step(directory: epath.PathLike, wanted: str | int = "newest") -> int | None:
    """Returns the step of an intact checkpoint, or None if there is none.

    Changes nothing, so it can be called while a run writes to the directory. `wanted` is 'newest',
    'best' (of the highest accuracy on the split that training evaluated last, among those that are
    kept), or the number of a step; raises `InputError` for anything else.
    """
    wanted, step = str(wanted), None
    if wanted not in ("newest", "best") and not wanted.isdecimal():
        raise InputError(f"--step={wanted} must be 'newest', 'best' or the number of a step")
    if jax.process_index() == 0:
        folders = step_folders(directory)
        if wanted.isdecimal():
            folders = [folder for folder in folders if int(folder.name) == int(wanted)]
        intact = _intact_runs(folders)
        step = _find_best(dict(intact)) if wanted == "best" else next(intact, (None,))[0]
    return _from_process_0(step)


def read_run(directory: epath.PathLike, step: int) -> dict[str, Any]:
    """Reads the JSON object that was saved with a checkpoint."""
    return _read_json(epath.Path(directory) / str(step) / RUN)


def restore(
    directory: epath.PathLike, step: int, abstract_state: TrainState, *, weights_only: bool = False
) -> TrainState:
    """Restores a training state with the shapes, types and shardings of an abstract one.

    Parts that are None there are not restored. With `weights_only`, no optimizer state is restored:
    for evaluation and export. Raises `InputError` if the checkpoint does not fit; the message names
    the first difference.
    """
    folder = epath.Path(directory) / str(step)
    expected = _parts(abstract_state)
    if weights_only:
        del expected["opt_state"]
    with _on_disk(folder) as path, contextlib.closing(_make_handler()) as handler:
        _check_fits(folder, handler.metadata(path).tree, expected)
        args = ocp.args.PyTreeRestore(
            expected,
            restore_args=ocp.checkpoint_utils.construct_restore_args(expected),
            partial_restore=True,  # `expected` may lack parts
        )
        restored = handler.restore(path, args=args)
    return TrainState(**dict.fromkeys(TrainState._fields) | {"opt_state": {}} | restored)


# -- parts of the format ---------------------------------------------------------------------------


def _make_handler(
    options: "ocp.options.MultiprocessingOptions | None" = None,
) -> "ocp.PyTreeCheckpointHandler":
    options = options or ocp.options.MultiprocessingOptions()
    # By default, each device would write a slice of its own of every replicated array.
    arrays = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
    # OCDBT would merge the files of all processes, and looks for them with a glob that takes a path
    # with [ or ] for a pattern.
    return ocp.PyTreeCheckpointHandler(
        use_ocdbt=False, multiprocessing_options=options, type_handler_registry=registry
    )


@contextlib.contextmanager
def _on_disk(folder: epath.Path) -> Iterator[Path]:
    """Yields the saved state of a checkpoint, or a temporary copy of one in object storage."""
    if not is_url(folder):
        yield Path(folder) / STATE
        return
    with tempfile.TemporaryDirectory() as copy:
        for process in range(_read_json(folder / RUN)["num_indexes"]):
            _copy(_read_json(_index(folder, process)), folder, epath.Path(copy))
        yield Path(copy) / STATE


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
                "config of the checkpoint, or another --workdir"
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


def _find_best(runs: dict[int, dict[str, Any]]) -> int | None:
    """Returns the step of the highest accuracy on the images that were evaluated last.

    Of equal accuracies, the newest step counts.
    """
    measured = [step for step in sorted(runs, reverse=True) if runs[step]["accuracy"] is not None]
    comparable = [s for s in measured if runs[s]["evaluation"] == runs[measured[0]]["evaluation"]]
    return max(comparable, key=lambda step: runs[step]["accuracy"], default=None)


def _from_process_0(step: int | None) -> int | None:
    step = int(multihost_utils.broadcast_one_to_all(np.int32(-1 if step is None else step)))
    return None if step < 0 else step


def _intact_runs(folders: Iterable[epath.Path]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields step and `run.json` of the intact checkpoints; reports the others."""
    for folder in folders:
        try:
            yield int(folder.name), _read_intact(folder)
        except DamagedError as error:
            print(f"note: skipping checkpoint {folder}: {error}")


def _read_intact(folder: epath.Path) -> dict[str, Any]:
    """Returns `run.json` of a checkpoint; raises `DamagedError` if any of its files is damaged."""

    def check(name, digest):
        if _digest_of(folder / name) != digest:
            raise DamagedError(f"{name} does not match its checksum")

    try:
        run = _read_json(folder / RUN)
        if str(run["step"]) != folder.name:
            raise DamagedError(f"{RUN} belongs to step {run['step']}")
        for process in range(run["num_indexes"]):
            files = _read_json(_index(folder, process))
            _in_threads(check, files.keys(), files.values())
    except OSError as error:
        raise DamagedError(f"it cannot be read ({error})") from error
    return run


def _remove_unfinished(folder: epath.Path) -> None:
    """Deletes a checkpoint without `run.json`: half written, or half deleted."""
    if not (folder / RUN).exists() and _is_ours(folder):
        folder.rmtree()


def _is_ours(folder: epath.Path) -> bool:
    """Whether a folder holds nothing but parts of a checkpoint of this program."""
    return all(PART.fullmatch(path.name) for path in folder.iterdir())


def _index(folder: epath.Path, process: int) -> epath.Path:
    return folder / f"index_{process}.json"


def _copy(names: Iterable[str], source: epath.Path, target: epath.Path) -> None:
    def copy(name):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).copy(target / name, overwrite=True)

    _in_threads(copy, names)


def _in_threads(function: Callable[..., None], *arguments: Iterable[Any]) -> None:
    """Calls a function for each file: in object storage, each waits for several requests."""
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(function, *arguments))


def _new_digest(content: bytes = b""):
    return hashlib.blake2b(content, digest_size=16)


def _digest_of(path: epath.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, _new_digest).hexdigest()


def _write_json(path: epath.Path, content: Any) -> None:
    """Writes a JSON object in one line, and its checksum in the next."""
    line = json.dumps(content).encode()
    path.write_bytes(line + f"\n{_new_digest(line).hexdigest()}\n".encode())


def _read_json(path: epath.Path) -> Any:
    """Reads what `_write_json` wrote; raises `DamagedError` if it is anything else."""
    if not path.exists():
        raise DamagedError(f"{path.name} is missing")
    line, _, checksum = path.read_bytes().partition(b"\n")
    if checksum != f"{_new_digest(line).hexdigest()}\n".encode():
        raise DamagedError(f"{path.name} does not match its checksum")
    return json.loads(line)
