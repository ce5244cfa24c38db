"""Checksums that distinguish complete from damaged checkpoints.

Orbax restores flipped bytes without an error, and fails on a truncated file with errors of many
types. Therefore every finished checkpoint is sealed with a manifest: the size and the BLAKE2 digest
of each file. A checkpoint without a manifest is incomplete.
"""

import hashlib
import json
from pathlib import Path

from structinit_jax.training import workdir

MANIFEST = "manifest.json"


def step_folders(directory: Path) -> list[Path]:
    """Lists the checkpoints in a directory, newest step first."""
    folders = (path for path in directory.glob("*") if path.name.isdigit())
    return sorted(folders, key=lambda path: int(path.name), reverse=True)


def seal(folder: Path) -> None:
    """Writes the manifest of a finished checkpoint."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and not p.name.startswith(MANIFEST))
    files = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "blake2b": _digest(path)}
        for path in paths
    }
    workdir.write_atomically(folder / MANIFEST, json.dumps(files, indent=1) + "\n")


def find_damage(folder: Path) -> str | None:
    """Returns what is wrong with a checkpoint, naming a file, or None if it is intact."""
    try:
        files = json.loads((folder / MANIFEST).read_text()).items()
    except FileNotFoundError:
        return f"{MANIFEST} is missing: the run ended before the checkpoint was complete"
    except (OSError, ValueError, AttributeError) as error:
        return f"{MANIFEST} cannot be read: {error}"
    for name, expected in files:
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        try:
            size = path.stat().st_size
            if size != expected["size"]:
                return f"{name} has {size} bytes, expected {expected['size']}"
            if _digest(path) != expected["blake2b"]:
                return f"{name} does not match its checksum"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        except (KeyError, TypeError):
            return f"{MANIFEST} has no size or checksum for {name}"
    return None


def set_aside(folder: Path) -> Path:
    """Moves a damaged checkpoint to `damaged/` and returns its new path."""
    damaged = folder.parent / "damaged"
    damaged.mkdir(exist_ok=True)
    target, number = damaged / folder.name, 1
    while target.exists():  # the same step was damaged before
        number += 1
        target = damaged / f"{folder.name}.{number}"
    return folder.rename(target)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
