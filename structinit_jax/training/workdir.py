"""The output directory of a run: one run at a time uses it, and only the same run resumes from it.

Which fields of the config may change depends on what a checkpoint is used for: see `DECIDES`.
"""

import contextlib
import fcntl
import functools
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from etils import epath
from flax.traverse_util import flatten_dict
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

from structinit_jax.config import to_fields
from structinit_jax.data.source import ImageSource, digest
from structinit_jax.errors import InputError, InUseError, require
from structinit_jax.files import is_url, open_path, read_file
from structinit_jax.training import distributed
from structinit_jax.training.checkpoint_files import digest_of

LOCK = ".lock"
COMPARISON = "compare.json"  # in the workdir of `structinit_jax.compare`, which holds run workdirs
SCHEME = "attention_init."  # prefix of the fields in this section
# What a field of the config decides, most severe first. What decides one of these also decides
# those below it.
WEIGHTS = 1  # how trained weights must be used
START = 2  # the initial weights
RUN = 3  # which run it is
RESULTS = 4  # the results of the run
NOTHING = 5  # rounding at most
# By field, or by section with a dot; all other fields decide the results.
DECIDES = {
    **dict.fromkeys(("model.", "data.mean", "data.std"), WEIGHTS),
    **dict.fromkeys((SCHEME, "start_from", "seed"), START),
    **dict.fromkeys(("batch_size", "optimizer", "data.image_size", "data.channels"), RUN),
    **dict.fromkeys(("data.name", "data.train_split"), RUN),
    **dict.fromkeys(("data.repeats", "data.drop_remainder"), RUN),
    **dict.fromkeys(("model.drop_path", "model.dtype"), RESULTS),
    **dict.fromkeys(("checkpoint_every_steps", "keep_checkpoints", "log_every_steps"), NOTHING),
    **dict.fromkeys(("fsdp", "model.remat"), NOTHING),
    "data.data_dir": NOTHING,  # data are compared by digests
}


# -- use by one run at a time ----------------------------------------------------------------------


@contextlib.contextmanager
def open_workdir(workdir: epath.PathLike) -> Iterator[epath.Path]:
    """Creates the output directory of a run, and locks it within the context.

    There is no lock in object storage: make sure that only one run at a time uses a directory.
    """
    if is_url(workdir):
        yield open_path(workdir)
        return
    with contextlib.ExitStack() as locked:
        with distributed.shared_errors():
            path = prepare_workdir(workdir)
            needs = "the directory of a run, such as a comparison's SETTING/seed_K"
            require("workdir", str(workdir), needs, not (path / COMPARISON).exists())
            if jax.process_index() == 0:
                locked.enter_context(lock_workdir(path))
        yield epath.Path(path)


def prepare_workdir(workdir: epath.PathLike) -> Path:
    """Creates the output directory and returns its absolute path."""
    require("workdir", workdir, "a directory, not a URL, for this command", not is_url(workdir))
    path = Path(workdir).expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / LOCK).open("a").close()
    except OSError as error:
        raise InputError(f"workdir={workdir} cannot be written to: {error}") from error
    return path


@contextlib.contextmanager
def lock_workdir(workdir: Path, patience: float = 0.0) -> Iterator[None]:
    """Holds an exclusive lock on the directory within the context.

    The operating system releases the lock when the process ends, even after a SIGKILL. Between
    hosts the lock works only if the network file system supports it, which can hold the lock of a
    lost host for minutes. Raises `InUseError` if another process still has the lock after
    `patience` seconds.
    """
    deadline = time.monotonic() + patience
    # filelock does not record which process holds a lock.
    with (workdir / LOCK).open("a+") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(0.05)
                    continue
                file.seek(0)
                raise InUseError(
                    f"workdir={workdir} is in use by another run ({file.read().strip()}): wait "
                    "until it ends, stop it, or choose another directory; if its host is lost, "
                    f"delete {LOCK}"
                ) from None
            except OSError:
                print(f"note: {workdir} cannot be locked: make sure that no other run uses it")
            break
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        os.fsync(file.fileno())  # for `identify` on other hosts
        yield


def identify(workdir: epath.Path) -> str:
    """Returns the lock file's text, or the URL: equal in all processes that share a directory."""
    multihost_utils.sync_global_devices("workdir")  # waits until process 0 has written the lock
    if is_url(workdir):
        return str(workdir)
    return read_file(workdir / LOCK).decode(errors="replace")


# -- record of a run, and resuming -----------------------------------------------------------------


def make_record(
    config: ConfigDict, train_source: ImageSource, eval_source: ImageSource, names: list[str]
) -> dict[str, Any]:
    """Returns the record saved with each checkpoint; see `checkpoint_files.read_run`."""
    data = config.data
    split = f"{data.name} {data.eval_split}, crop_fraction {data.crop_fraction}"
    if config.ema_decay:
        split += ", averaged weights"
    return {
        "config": to_fields(config),
        "evaluation": f"{split}, digest {digest(eval_source, names)}",
        "class_names": names,
        "data_digest": digest(train_source, names),
    }


def check_processes(record: Mapping[str, Any], workdir: epath.Path) -> None:
    """Checks that all processes have the same config, data and workdir."""
    fields = flatten_dict(record["config"], sep=".")
    del fields["data.data_dir"]  # Each host may have its own copy of the data.
    own = {"config": fields, "workdir": identify(workdir)}
    path = Path(fields.get("start_from", "")).expanduser()
    if path.is_file():  # A resumed run does not need it.
        own["file config.start_from"] = digest_of(path)
    distributed.check_equal(record | own)


def decides(field: str) -> int:
    """Returns what the value of a config field decides, from `WEIGHTS` to `NOTHING`."""
    section = field.partition(".")[0] + "."
    return DECIDES.get(field, DECIDES.get(section, RESULTS))


def check_resume(
    saved: Mapping[str, Any],
    record: Mapping[str, Any],
    config: ConfigDict,
    num_steps: int,
    place: str,
) -> None:
    """Checks that a run of `num_steps` can resume from a checkpoint; prints changed fields.

    `saved` is the record of the checkpoint, `record` that of the run. `place` names the checkpoint
    in messages, for example 'step 400 in /tmp/digits'.
    """
    if changed := check_config(saved["config"], config, RUN, place):
        print(f"config changed since the checkpoint:\n{changed}")
    if saved["data_digest"] != record["data_digest"]:
        raise InputError(
            f"config.data.train_split={config.data.train_split!r} does not hold the examples and "
            f"classes that {place} was trained on: restore the data, or use another workdir"
        )
    if saved["evaluation"] != record["evaluation"]:
        print(f"note: {place} was evaluated in another way, so accuracies cannot be compared")
    if saved["step"] > num_steps:
        field = "num_steps" if config.num_steps else "num_epochs"
        raise InputError(
            f"{place} is beyond the last step of the config, {num_steps}: raise config.{field}, or "
            "use another workdir"
        )


def check_config(old: Mapping[str, Any], config: ConfigDict, level: int, place: str) -> str:
    """Lists the fields that differ from an old config, as read from JSON, one per line.

    Fields that only one config has are skipped: they belong to another scheme, or to another
    version of this package. If the scheme is the same, options that one config lacks count as None.
    Raises an `InputError` that names `place` if a listed field `decides` the level, for example
    `RUN`.
    """
    # A field of a custom model or scheme can be a dict.
    flatten = functools.partial(flatten_dict, sep=".", is_leaf=lambda path, _: len(path) == 2)
    new = flatten(to_fields(config))
    same_scheme = old["attention_init"].get("name") == config.attention_init.get("name")
    # `to_fields` imports the scheme. Another one than the config's may be a stranger's code.
    old = flatten(to_fields(ConfigDict(old)) if same_scheme else old)
    if same_scheme:
        options = dict.fromkeys(field for field in old | new if field.startswith(SCHEME))
        old = options | old
        new = options | new
    changed = [field for field in sorted(old.keys() & new.keys()) if old[field] != new[field]]

    def describe(fields):
        return "\n".join(f"  {field}: {old[field]!r} -> {new[field]!r}" for field in fields)

    if refused := [field for field in changed if decides(field) <= level]:
        raise InputError(
            f"these config fields must be the same as in {place}:\n{describe(refused)}\n"
            "Restore the old values, or use another workdir"
        )
    return describe(changed)
