"""Output directories in object storage: gs://BUCKET/RUN and s3://BUCKET/RUN.

A run writes to a local folder as usual, and process 0 copies its content to the bucket: checkpoints
once they are complete, their manifest last, and other files every few seconds. When a run starts or
resumes, on any machine, it first copies the bucket's checkpoints to a new local folder. Objects are
written whole or not at all, so nothing has to be renamed, appended to or locked there.
"""

import atexit
import contextlib
import errno
import functools
import shutil
import tempfile
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax

from structinit_jax.errors import InputError
from structinit_jax.training import lease, manifest
from structinit_jax.training import workdir as workdir_lib

BEAT_SECONDS = 15.0  # between copies of small files; each shows that the run is alive
EXTRAS = {"gs": "gcs", "gcs": "gcs", "s3": "s3"}
NUM_THREADS = 8


def readable(workdir: str | Path, only: str | None = None) -> Path:
    """Returns a directory to read a run from: the path itself, or a local copy, removed at exit.

    Args:
      workdir: Path or URL.
      only: Name of the single file to copy.

    Raises:
      InputError: The storage cannot be read.
    """
    if not workdir_lib.is_url(workdir):
        return workdir_lib.local_path(workdir)
    mirror = _local_mirror(str(workdir))
    mirror.pull_files([only or "config.json"])
    if not only:
        mirror.pull_checkpoints()
    return mirror.folder


@functools.cache
def _local_mirror(url):
    folder = tempfile.mkdtemp(prefix="structinit_jax_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Mirror(url, Path(folder))


@contextlib.contextmanager
def open_workdir(workdir: str | Path) -> Iterator[tuple[Path, "Mirror | None"]]:
    """Prepares and locks the output directory of a run within the context.

    Args:
      workdir: A path, or a URL of object storage.

    Yields:
      The local directory, and for a URL the mirror that copies it to the storage.

    Raises:
      InputError: It cannot be used, or another run uses it.
    """
    with contextlib.ExitStack() as on_exit:
        if workdir_lib.is_url(workdir):
            mirror = on_exit.enter_context(open_mirror(str(workdir)))
            yield mirror.folder, mirror
        else:
            path = workdir_lib.prepare_workdir(workdir)
            if jax.process_index() == 0:
                on_exit.enter_context(workdir_lib.lock_workdir(path))
            yield path, None


@contextlib.contextmanager
def open_mirror(url: str) -> Iterator["Mirror"]:
    """Copies a run from object storage to a new local folder; keeps the storage up to date.

    Only process 0 locks the run and writes to the storage.

    Raises:
      InputError: The storage cannot be used, or another run writes there.
    """
    with tempfile.TemporaryDirectory(prefix="structinit_jax_") as folder:
        mirror = Mirror(url, Path(folder))
        with contextlib.ExitStack() as on_exit:
            if jax.process_index() == 0:
                on_exit.enter_context(mirror.hold())
            mirror.pull_files(["config.json", "metrics.jsonl"])
            mirror.pull_checkpoints()
            yield mirror


class Mirror:
    """A run in object storage and its copy in a local folder.

    Args:
      url: Where the run is stored.
      folder: The local folder.

    Attributes:
      lease: The run's lock.

    Raises:
      InputError: The URL is not supported, or its package is not installed.
    """

    def __init__(self, url: str, folder: Path):
        import fsspec

        self.url, self.folder = url, folder
        try:
            options = dict(use_listings_cache=False, skip_instance_cache=True)
            self._storage, self._root = fsspec.core.url_to_fs(url, **options)
        except ImportError as error:
            extra = EXTRAS.get(url.partition("://")[0], "gcs,s3")
            raise InputError(f"--workdir={url} needs pip install '.[{extra}]': {error}") from error
        except ValueError as error:
            raise InputError(f"--workdir={url}: use a path, gs://… or s3://…: {error}") from error
        self._copied: dict[str, tuple[int, float]] = {}
        self.lease = lease.Lease(self._storage, self._path(lease.NAME), url)
        self._copying = threading.Lock()

    # -- From the storage --------------------------------------------------------------------------

    def pull_files(self, names: Iterable[str]) -> None:
        """Copies files that exist."""
        with self._explain():
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    self._get(name)
                    self._copied[name] = _state(self.folder / name)

    def pull_checkpoints(self) -> None:
        """Copies all complete checkpoints that are not here yet."""
        with self._explain():
            here = {folder.name for folder in self._local_checkpoints()} | self._damaged_steps()
            for step in sorted(self._stored_steps(complete=True) - here, key=int):
                names = self._names(f"checkpoints/{step}")
                names.sort(key=lambda name: name.endswith(f"/{manifest.MANIFEST}"))  # last
                for name in names:
                    (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                self._each(self._get, names[:-1])
                self._get(names[-1])

    def _get(self, name):
        self._storage.get_file(self._path(name), str(self.folder / name))

    # -- To the storage ----------------------------------------------------------------------------

    def push_files(self) -> None:
        """Copies all files that have changed, except checkpoints."""
        with self._copying:
            for path in sorted(self.folder.rglob("*")):
                name = path.relative_to(self.folder).as_posix()
                if name.startswith("checkpoints/") or not path.is_file():
                    continue
                with contextlib.suppress(FileNotFoundError):  # a temporary file may be gone
                    if (state := _state(path)) != self._copied.get(name):
                        self._put(path)
                        self._copied[name] = state

    def push_checkpoints(self) -> None:
        """Makes the complete checkpoints of the storage equal to those of the folder.

        Raises:
          OSError: The storage cannot be written to.
        """
        try:
            self._push_checkpoints()
        except Exception as error:  # each storage has its own errors
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error

    def _push_checkpoints(self):
        if self.lease.lost:
            raise RuntimeError(self.lease.lost)
        # First, since a run that resumes from the checkpoint needs the metrics before it.
        self.push_files()
        folders = {folder.name: folder for folder in self._local_checkpoints()}
        stored, complete = self._stored_steps(), self._stored_steps(complete=True)
        for step in sorted(folders.keys() - complete, key=int):
            if step in stored:
                self._remove(step)
            paths = [path for path in folders[step].rglob("*") if path.is_file()]
            paths.sort(key=lambda path: path.name == manifest.MANIFEST)  # last
            self._each(self._put, paths[:-1])
            self._put(paths[-1])
        for step in stored - folders.keys() - self._damaged_steps():
            self._remove(step)

    def _local_checkpoints(self):
        folders = manifest.step_folders(self.folder / "checkpoints")
        return [folder for folder in folders if (folder / manifest.MANIFEST).exists()]

    def _damaged_steps(self):
        return {path.name.split(".")[0] for path in self.folder.glob("checkpoints/damaged/*")}

    def _put(self, path):
        name = path.relative_to(self.folder).as_posix()
        self._storage.put_file(str(path), self._path(name))

    def _remove(self, step):
        path = self._path(f"checkpoints/{step}")
        with contextlib.suppress(FileNotFoundError):  # first, so that the rest is not used
            self._storage.rm_file(f"{path}/{manifest.MANIFEST}")
        with contextlib.suppress(FileNotFoundError):
            self._storage.rm(path, recursive=True)

    # -- Lock --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Within the context, holds the run's lock, and copies changed files now and then.

        Raises:
          InputError: Another run holds the lock, or the storage cannot be written to.
        """
        with self._explain():
            self.lease.take()
        stopped = threading.Event()
        thread = threading.Thread(target=self._beat, args=(stopped,), daemon=True)
        thread.start()
        try:
            yield
        except BaseException:
            try:
                self._release(stopped, thread)
            except InputError as error:  # must not replace the reason why the run ends
                print(f"note: {error}")
            raise
        self._release(stopped, thread)

    def _release(self, stopped, thread):
        stopped.set()
        thread.join()
        if self.lease.lost is None:
            with self._explain():
                self.push_files()
                self.lease.release()

    def _beat(self, stopped):
        failed = False
        while not stopped.wait(BEAT_SECONDS):
            try:
                self.lease.renew()
                if self.lease.lost:
                    return
                self.push_files()
                failed = False
            except Exception as error:  # tried again; a checkpoint that fails ends the run
                if not failed:
                    print(f"note: {self.url} cannot be written to now: {error}")
                failed = True

    # -- Parts -------------------------------------------------------------------------------------

    def _path(self, name):
        return f"{self._root.rstrip('/')}/{name}"

    def _names(self, folder):
        """Names of all objects in a folder."""
        start = len(self._path(""))
        return [path[start:] for path in self._storage.find(self._path(folder))]

    def _stored_steps(self, complete=False):
        parts = [name.split("/") for name in self._names("checkpoints")]
        return {
            part[1]
            for part in parts
            if part[1].isdigit() and (part[-1] == manifest.MANIFEST or not complete)
        }

    def _each(self, function, items):
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            list(pool.map(function, items))

    @contextlib.contextmanager
    def _explain(self):
        try:
            yield
        except InputError:
            raise
        except Exception as error:  # each storage has its own errors
            raise InputError(
                f"--workdir={self.url} cannot be used ({type(error).__name__}: {error}): check the "
                "bucket's name, the credentials and the network"
            ) from error


def _state(path):
    status = path.stat()
    return status.st_size, status.st_mtime
