"""Checksums that tell a whole checkpoint from a damaged one.

Orbax restores flipped bytes without a word, and fails on a truncated file with errors of many
types. So every finished checkpoint is sealed: a manifest with the size and BLAKE2 digest of each
of its files is written into its folder, last of all. A folder that is not as its manifest says, or
that has none because the run was killed before the save was complete, is no checkpoint.
"""

import hashlib
import json
from pathlib import Path

from structinit_jax.training import files

MANIFEST = "manifest.json"


def step_folders(directory: Path) -> list[Path]:
    """The folders of a run's checkpoints, newest step first."""
    if not directory.is_dir():
        return []
    return sorted((p for p in directory.iterdir() if p.name.isdigit()), key=_step, reverse=True)


def seal(folder: Path) -> None:
    """Writes the manifest of a finished checkpoint, whole or not at all.

    Raises:
      OSError: if a file cannot be read or the manifest cannot be written.
    """
    files.write_whole(folder / MANIFEST, json.dumps(_describe_files(folder), indent=1) + "\n")


def find_damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, naming a file; None if it is as it was sealed."""
    try:
        expected = json.loads((folder / MANIFEST).read_text())
        names = expected.keys()
    except FileNotFoundError:
        return f"it has no {MANIFEST}: the run ended before the save was complete"
    except (OSError, ValueError, AttributeError) as error:
        return f"{MANIFEST} cannot be read: {error}"
    for name in names:
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        try:
            if path.stat().st_size != expected[name]["size"]:
                return (
                    f"{name} has {path.stat().st_size} bytes in place of {expected[name]['size']}"
                )
            if _digest(path) != expected[name]["blake2b"]:
                return f"{name} does not match its checksum"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        except (KeyError, TypeError):
            return f"{MANIFEST} has no size and checksum for {name}"
    return None


def set_aside(folder: Path) -> Path:
    """Moves a checkpoint to `damaged/`, out of the run's way; returns its new path."""
    damaged = folder.parent / "damaged"
    damaged.mkdir(exist_ok=True)
    target, number = damaged / folder.name, 1
    while target.exists():  # the same step was damaged before
        number += 1
        target = damaged / f"{folder.name}.{number}"
    folder.rename(target)
    return target


def _step(folder: Path) -> int:
    return int(folder.name)


def _describe_files(folder: Path) -> dict[str, dict]:
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and not p.name.startswith(MANIFEST))
    return {
        p.relative_to(folder).as_posix(): {"size": p.stat().st_size, "blake2b": _digest(p)}
        for p in paths
    }


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
