"""Checkpoints through Orbax: the newest few and the best one, written while training continues.

A checkpoint is a folder `STEP/`, on a disk or in object storage:

- `state/`: the training state, for which Orbax has each process write the shards of its devices;
- `index_K.json`: the files of `state/` with their checksums, since Orbax restores flipped bytes
  without an error;
- `run.json`: the config, the data and the accuracy. It is written last.

Both JSON files end with their own checksum. A checkpoint is intact if everything is there and
matches. Others are not used, so a kill at any moment leaves the earlier checkpoints.

Orbax 0.12.8 writes to disks and gs:// only. For object storage each process stages its shards in
a temporary directory and copies them, which serves gs:// and s3:// alike.
"""

import contextlib
import hashlib
import json
import logging
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from structinit_jax.errors import InputError
from structinit_jax.training import workdir
from structinit_jax.training.state import TrainState

STATE, RUN = "state", "run.json"
CHUNK = 2**24  # bytes that are read at once


class DamagedError(Exception):
    """A file of a checkpoint is missing or not what was written; the message says which one."""


class Checkpoints:
    """The checkpoints of a run that is being trained.

    Damaged checkpoints are reported and moved to `damaged/`; those that a kill left unfinished are
    deleted.

    Args:
      directory: Created if it does not exist.
      keep: Number of newest checkpoints to keep, in addition to the one of the highest accuracy.
      evaluation: What accuracies are measured on. Only those on the same are compared; after a
        resume that changes it, the best checkpoint of each evaluation is kept.

    Attributes:
      latest_step: Step of the newest checkpoint, or None if there is no checkpoint.
    """

    def __init__(self, directory: epath.PathLike, keep: int, evaluation: str = ""):
        self.directory = epath.Path(directory)
        self._keep, self._evaluation = keep, evaluation
        self._staged = workdir.is_url(directory)
        self._saver = _make_saver(self._staged)
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future | None = None
        self._runs: dict[int, dict[str, Any]] = {}  # of all checkpoints; on process 0
        if jax.process_index() == 0:
            self.directory.mkdir(parents=True, exist_ok=True)
            for folder in step_folders(self.directory):
                if damage := find_damage(folder):
                    _set_aside(folder, damage)
                else:
                    self._runs[int(folder.name)] = _read_json(folder / RUN)
        newest = np.int32(max(self._runs, default=-1))
        newest = int(multihost_utils.broadcast_one_to_all(newest))
        self.latest_step = None if newest < 0 else newest

    def save(
        self, step: int, state: TrainState, run: dict[str, Any], accuracy: float | None
    ) -> None:
        """Starts to save a checkpoint; blocks only for the copy to host memory.

        Args:
          step: Number of the checkpoint.
          state: Training state after this step.
          run: JSON object to save with it; `read_run` reads it.
          accuracy: Accuracy at this step if it was evaluated; it determines the best checkpoint.

        Raises:
          InputError: The directory is full or not writable, now or at the previous save.
        """
        self.wait()
        run = run | {
            "step": step,
            "num_indexes": jax.process_count() if self._staged else 1,
            "evaluation": self._evaluation,
            "accuracy": accuracy,
        }
        folder = self.directory / str(step)
        with self._explain_failure():
            local = epath.Path(tempfile.mkdtemp()) if self._staged else folder
            local.mkdir(parents=True, exist_ok=True)
            tree = ocp.args.PyTreeSave(_with_key_data(state._asdict()))
            self._saver.save(local / STATE, args=tree, force=True)
        self._writing = self._writer.submit(self._finish, folder, local, run)
        self.latest_step = step

    def wait(self) -> None:
        """Waits until this process's part of the newest checkpoint is written.

        Raises:
          InputError: It could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            with self._explain_failure():
                writing.result()

    def close(self) -> None:
        """Waits until everything is written."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()
            self._saver.close()

    def _finish(self, folder, local, run):
        """Waits for Orbax, and completes the checkpoint with its checksums and `run.json`."""
        try:
            self._saver.wait_until_finished()
            process = jax.process_index()
            if process < run["num_indexes"]:
                paths = list(_files(local / STATE))
                if process > 0:  # files that describe the whole are those of process 0
                    paths = [path for path in paths if path.parent.name != STATE]
                files = {p.relative_to(local).as_posix(): _digest_of(p) for p in paths}
                if self._staged:
                    for name in files:
                        (folder / name).parent.mkdir(parents=True, exist_ok=True)
                        (local / name).copy(folder / name, overwrite=True)
                _write_json(folder / f"index_{process}.json", {"files": files})
            if process == 0:
                _write_json(folder / RUN, run)
                self._runs[run["step"]] = run
                self._remove_old()
        finally:
            if self._staged:
                local.rmtree()

    def _explain_failure(self):
        return workdir.explain_failed_write(
            "a checkpoint", self.directory, self._what_is_safe, Exception
        )

    def _remove_old(self):
        # Another process may not have finished its part of the newest.
        finished = [s for s in sorted(self._runs, reverse=True) if self._is_finished(s)]
        runs = {step: self._runs[step] for step in finished}
        kept = set(finished[: self._keep])
        for evaluation in {run["evaluation"] for run in runs.values()}:
            kept.update(_best_first(runs, evaluation)[:1])
        for step in set(finished) - kept:
            del self._runs[step]
            _delete(self.directory / str(step))

    def _is_finished(self, step):
        others = range(1, self._runs[step]["num_indexes"])
        return all((self.directory / f"{step}/index_{k}.json").exists() for k in others)

    def _what_is_safe(self) -> str:
        for folder in step_folders(self.directory):
            if not find_damage(folder):
                return f"the checkpoint of step {folder.name} is intact, later steps are lost"
        return "there is no earlier checkpoint"


def step_folders(directory: epath.PathLike) -> list[epath.Path]:
    """Lists the checkpoints in a directory, newest step first."""
    directory = epath.Path(directory)
    paths = directory.iterdir() if directory.is_dir() else ()
    names = [path.name for path in paths if path.name.isascii() and path.name.isdigit()]
    return [directory / name for name in sorted(names, key=int, reverse=True)]


def find_damage(folder: epath.Path) -> str | None:
    """Returns what is wrong with a checkpoint, naming a file, or None if it is intact."""
    try:
        run = _read_json(folder / RUN)
        if str(run["step"]) != folder.name:
            return f"{RUN} is that of step {run['step']}"
        for process in range(run["num_indexes"]):
            for name, digest in _read_json(folder / f"index_{process}.json")["files"].items():
                path = folder / name
                if _digest_of(path) != digest:
                    return f"{name} does not match its checksum"
    except DamagedError as error:
        return str(error)
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"it cannot be read ({error})"
    return None


def find_step(directory: epath.PathLike, wanted: str | int = "newest") -> int | None:
    """Returns the step of an intact checkpoint, or None if there is none.

    Changes nothing, so it can be called while a run writes to the directory.

    Args:
      directory: Directory of the checkpoints.
      wanted: 'newest', 'best' (of the highest accuracy on the split that training evaluated last,
        see `evaluate.deciding_accuracy`, among those that are kept), or the number of a step.

    Raises:
      InputError: `wanted` is none of these.
    """
    wanted = str(wanted)
    if wanted not in ("newest", "best") and not wanted.isdecimal():
        raise InputError(f"--step={wanted} must be 'newest', 'best' or the number of a step")
    step = -1
    if jax.process_index() == 0:
        intact = _intact_steps(directory, int(wanted) if wanted.isdecimal() else None)
        if wanted == "best":
            runs = {step: read_run(directory, step) for step in intact}
            evaluated = [run["evaluation"] for run in runs.values() if run["accuracy"] is not None]
            intact = iter(_best_first(runs, evaluated[0]) if evaluated else ())
        step = next(intact, -1)
    step = int(multihost_utils.broadcast_one_to_all(np.int32(step)))
    return None if step < 0 else step


def read_run(directory: epath.PathLike, step: int) -> dict[str, Any]:
    """Reads the JSON object that was saved with a checkpoint."""
    return _read_json(epath.Path(directory) / str(step) / RUN)


def restore(
    directory: epath.PathLike, step: int, abstract_state: TrainState, *, weights_only: bool = False
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
    folder = epath.Path(directory) / str(step)
    expected = abstract_state._asdict()
    if weights_only:
        del expected["opt_state"]
    if weights_only and not expected["ema"]:
        del expected["ema"]
    numbers = _with_key_data(expected)
    with _on_disk(folder) as path, contextlib.closing(_make_handler()) as handler:
        _check_fits(folder, handler.metadata(path).tree, numbers)
        args = ocp.args.PyTreeRestore(
            numbers,
            restore_args=ocp.checkpoint_utils.construct_restore_args(numbers),
            partial_restore=weights_only,
        )
        restored = handler.restore(path, args=args)
    restored = jax.tree.map(
        lambda leaf, value: jax.random.wrap_key_data(value) if _is_key(leaf) else value,
        expected,
        restored,
    )
    return TrainState(**{"opt_state": {}, "ema": {}} | restored)


# -- parts of the format ---------------------------------------------------------------------------


def _make_handler(staged: bool = False) -> ocp.PyTreeCheckpointHandler:
    # OCDBT would merge the files of all processes, and looks for them with a glob that takes a path
    # with [ or ] for a pattern.
    return ocp.PyTreeCheckpointHandler(
        use_ocdbt=False, multiprocessing_options=_multiprocessing(staged)
    )


def _make_saver(staged: bool) -> ocp.AsyncCheckpointer:
    # Whatever Orbax logs of a failed write, with a traceback, it raises as well.
    logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)
    return ocp.AsyncCheckpointer(
        _make_handler(staged),
        multiprocessing_options=_multiprocessing(staged),
        # In the background, Orbax waits minutes for a directory that cannot be created.
        async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
    )


def _multiprocessing(staged: bool) -> ocp.options.MultiprocessingOptions:
    # Without a primary host every process prepares its own directory.
    return ocp.options.MultiprocessingOptions(primary_host=None if staged else 0)


@contextlib.contextmanager
def _on_disk(folder: epath.Path) -> Iterator[Path]:
    """Yields the saved state of a checkpoint, or a temporary copy of one in object storage."""
    if not workdir.is_url(folder):
        yield Path(folder) / STATE
        return
    with tempfile.TemporaryDirectory() as copy:
        for process in range(_read_json(folder / RUN)["num_indexes"]):
            for name in _read_json(folder / f"index_{process}.json")["files"]:
                target = Path(copy) / name
                target.parent.mkdir(parents=True, exist_ok=True)
                (folder / name).copy(target, overwrite=True)
        yield Path(copy) / STATE


def _check_fits(folder: epath.Path, saved: dict[str, Any], expected: dict[str, Any]) -> None:
    if "ema" in expected and bool(saved["ema"]) != bool(expected["ema"]):
        has, rate = ("has", "is 0") if saved["ema"] else ("has no", "is not 0")
        raise InputError(
            f"checkpoint {folder} {has} averaged weights, but config.ema_decay {rate}: set it to "
            "the value that the run was trained with"
        )
    old = _shapes_by_name({part: saved[part] for part in expected})
    new = _shapes_by_name(expected)
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            raise InputError(
                f"checkpoint {folder} does not fit: {name!r} is {old.get(name, 'missing')} in the "
                f"checkpoint, {new.get(name, 'missing')} in the model of this config. Use the "
                "config.model of the checkpoint, or another --workdir"
            )


def _shapes_by_name(tree) -> dict[str, str]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): f"shape {list(leaf.shape)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _is_key(leaf):
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _with_key_data(tree):
    """Converts PRNG keys, or their shapes, to raw key data."""

    def convert(leaf):
        if not _is_key(leaf):
            return leaf
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.random.key_data(leaf)
        data = jax.eval_shape(jax.random.key_data, leaf)
        return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)

    return jax.tree.map(convert, tree)


def _best_first(runs: dict[int, dict[str, Any]], evaluation: str) -> list[int]:
    """Sorts the steps that were measured on an evaluation by accuracy; of equals, newest first."""
    measured = {
        step: run["accuracy"]
        for step, run in runs.items()
        if run["evaluation"] == evaluation and run["accuracy"] is not None
    }
    return sorted(measured, key=lambda step: (measured[step], step), reverse=True)


def _intact_steps(directory: epath.PathLike, step: int | None) -> Iterator[int]:
    """Yields intact checkpoints, newest first, and prints a note about each other one."""
    for folder in step_folders(directory):
        if step not in (None, int(folder.name)):
            continue
        if damage := find_damage(folder):
            print(f"note: skipping checkpoint {folder}: {damage}")
        else:
            yield int(folder.name)


def _set_aside(folder: epath.Path, damage: str) -> None:
    names = {path.name.split("_")[0].split(".")[0] for path in folder.iterdir()}
    if names <= {STATE, "index"}:  # a kill while it was written or deleted
        folder.rmtree()
        print(f"note: checkpoint {folder} was not finished and is removed")
        return
    target, number = folder.parent / "damaged" / folder.name, 1
    while target.exists():  # the same step was damaged before
        number += 1
        target = target.with_name(f"{folder.name}.{number}")
    target.parent.mkdir(exist_ok=True)
    if workdir.is_url(folder):  # where folders cannot be renamed
        for path in _files(folder):
            path.copy(target / path.relative_to(folder))
        _delete(folder)
    else:
        folder.rename(target)
    print(f"note: checkpoint {folder} is damaged: {damage}. Moved to {target}")


def _files(folder: epath.Path) -> Iterator[epath.Path]:
    for path in folder.iterdir():
        yield from _files(path) if path.is_dir() else (path,)


def _delete(folder: epath.Path) -> None:
    (folder / RUN).unlink(missing_ok=True)  # first, so that the rest is not used
    folder.rmtree()


def _new_digest():
    return hashlib.blake2b(digest_size=16)


def _digest_of(path: epath.PathLike) -> str:
    digest = _new_digest()
    with epath.Path(path).open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _write_json(path: epath.Path, content: Any) -> None:
    """Writes a JSON object in one line, and its checksum in the next."""
    line = json.dumps(content).encode()
    digest = _new_digest()
    digest.update(line)
    path.write_bytes(line + f"\n{digest.hexdigest()}\n".encode())


def _read_json(path: epath.Path) -> Any:
    """Reads what `_write_json` wrote; raises `DamagedError` if it is anything else."""
    try:
        line, _, checksum = path.read_bytes().partition(b"\n")
    except FileNotFoundError:
        raise DamagedError(f"{path.name} is missing") from None
    digest = _new_digest()
    digest.update(line)
    if checksum != f"{digest.hexdigest()}\n".encode():
        raise DamagedError(f"{path.name} does not match its checksum")
    return json.loads(line)
