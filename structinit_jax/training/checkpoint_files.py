"""The checkpoint files that Orbax does not write, and the integrity checks of all files.

A checkpoint is a folder `STEP/`, on a disk or in object storage:

- `state/`: the training state, written by Orbax. Each process writes the shards on its devices;
- `index_0.json`: checksums of the files in `state/`, because Orbax restores flipped bytes without
  an error. In object storage, process K writes the checksums of its own files to `index_K.json`;
- `run.json`: the config, the data and the accuracy. Process 0 writes it last.

Each JSON file ends with its own checksum. An index also holds the checksum of its `run.json`, so
that files from another run or step are detected. A checkpoint is intact if `state/` has the files
listed in the indexes and all files match their checksums.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from etils import epath
from flax.traverse_util import flatten_dict

from structinit_jax.errors import InputError
from structinit_jax.files import PARTIAL, is_url, read_file, write_atomically

STATE = "state"
RUN_FILE = "run.json"
VERSION = 2
_PART = re.compile(rf"state(\.orbax-checkpoint-tmp.*)?|index_\d+\.json|run\.json|{PARTIAL}.*")
_STEP = re.compile(r"[1-9][0-9]{0,8}")  # fits int32


# -- folders ---------------------------------------------------------------------------------------


def step_folders(directory: epath.PathLike) -> list[epath.Path]:
    """Lists the checkpoints in a directory, newest step first."""
    directory = epath.Path(directory)
    paths = directory.iterdir() if directory.is_dir() else ()
    names = [path.name for path in paths if _STEP.fullmatch(path.name)]
    return [directory / name for name in sorted(names, key=int, reverse=True)]


def remove_unfinished(folder: epath.Path) -> bool:
    """Deletes a half-written or half-deleted checkpoint (no `run.json`); returns whether it did."""
    unfinished = not (folder / RUN_FILE).exists() and folder.is_dir() and is_ours(folder)
    if unfinished:
        folder.rmtree()
    return unfinished


def is_ours(folder: epath.Path) -> bool:
    """Whether a folder holds only parts of a checkpoint written by this program."""
    return all(_PART.fullmatch(path.name) for path in folder.iterdir())


def index_path(folder: epath.Path, process: int) -> epath.Path:
    """Returns the path of a process's `index_K.json`."""
    return folder / f"index_{process}.json"


# -- reading ---------------------------------------------------------------------------------------


class OtherVersionError(InputError):
    """A checkpoint was written by another version of this package; it is not damaged."""


def intact_runs(folders: Iterable[epath.Path]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the step and `run.json` of each intact checkpoint; reports the others."""
    for folder in folders:
        try:
            yield int(folder.name), _read_intact(folder)
        except OtherVersionError:
            raise
        except (OSError, InputError) as error:  # for missing files and for damaged ones
            finished = (folder / RUN_FILE).exists()
            reason = error if finished else f"not finished (no {RUN_FILE})"
            print(f"note: skipping checkpoint {folder}: {reason}")


def read_run(folder: epath.PathLike) -> dict[str, Any]:
    """Reads `run.json`; raises `InputError` if it is damaged or from another package version.

    Its fields are 'version', 'step', 'num_indexes', 'config', 'class_names' (by label),
    'data_digest' (of the training split), 'accuracy' (None if the step was not evaluated) and
    'evaluation' (how the accuracy was measured).
    """
    run = _read_json(epath.Path(folder) / RUN_FILE)
    if (version := run.get("version", 1)) != VERSION:
        raise OtherVersionError(
            f"{folder} has format version {version}, but this package reads version {VERSION}: "
            "use the package version that wrote it, or another workdir"
        )
    if str(run["step"]) != folder.name:
        raise InputError(f"{RUN_FILE} belongs to step {run['step']}")
    return run


def read_indexes(folder: epath.Path, run: dict[str, Any]) -> dict[str, Any]:
    """Returns the checksums of `state/` by file name; raises `InputError` for a damaged index."""
    files = {}
    for process in range(run["num_indexes"]):
        path = index_path(folder, process)
        index = _read_json(path)
        if index["run"] != _identity(run):
            raise InputError(f"{path.name} belongs to another {RUN_FILE}")
        for name in index["files"]:
            # An untrusted index could make `copy` write files elsewhere.
            if not name.startswith(f"{STATE}/") or ".." in name.split("/"):
                raise InputError(f"{path.name} names {name!r}, which is not a file in {STATE}/")
        files |= index["files"]
    return files


def _read_intact(folder):
    """Returns `run.json` of a checkpoint; raises `InputError` or `OSError` if a file is damaged."""

    def check(name, digest):
        if digest_of(folder / name) != digest:
            raise InputError(f"{name} does not match its checksum")

    run = read_run(folder)
    files = read_indexes(folder, run)
    if not is_url(folder):  # from object storage, only the files in the indexes are copied
        for path in Path(folder / STATE).rglob("*"):
            # .zarray is Zarr's only hidden file; file managers leave others behind.
            needed = path.name == ".zarray" or not path.name.startswith(".")
            name = path.relative_to(folder).as_posix()
            if needed and name not in files and not path.is_dir():
                raise InputError(f"{name} is not listed in any index")
    in_threads(check, files.keys(), files.values())
    return run


def _read_json(path):
    """Reads a file written by `write_json`; raises `InputError` if it is anything else."""
    line, _, checksum = read_file(path).partition(b"\n")
    if checksum != f"{_new_digest(line).hexdigest()}\n".encode():
        raise InputError(f"{path.name} does not match its checksum")
    return json.loads(line)


# -- writing ---------------------------------------------------------------------------------------


def write_index(folder: epath.Path, process: int, run: dict[str, Any], files: dict) -> None:
    """Writes the checksums of a process's files, by name."""
    write_json(index_path(folder, process), {"run": _identity(run), "files": files})


def write_json(path: epath.Path, content: dict[str, Any]) -> None:
    """Writes a JSON object on one line and its checksum on the next."""
    line = json.dumps(content).encode()
    write_atomically(path, line + f"\n{_new_digest(line).hexdigest()}\n".encode())


def _identity(run):
    """Returns the checksum of `run.json` without `data_dir`, which may differ between hosts."""
    config = flatten_dict(run["config"], sep=".")
    config.pop("data.data_dir", None)
    return _new_digest(json.dumps(run | {"config": config}).encode()).hexdigest()


def _new_digest(content: bytes = b""):
    return hashlib.blake2b(content, digest_size=16)


def digest_of(path: epath.PathLike) -> str:
    """Returns the checksum of a file."""
    with epath.Path(path).open("rb") as file:
        return hashlib.file_digest(file, _new_digest).hexdigest()


def in_threads(function: Callable[..., None], *arguments: Iterable[Any]) -> None:
    """Calls a function for each file, in threads: calls wait for requests to object storage."""
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(function, *arguments))


def copy(names: Iterable[str], source: epath.Path, target: epath.Path) -> None:
    """Copies files from or to object storage."""

    def copy_one(name):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).copy(target / name, overwrite=True)

    in_threads(copy_one, names)
