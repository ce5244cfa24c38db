import contextlib
import os
from pathlib import Path

import pytest

from structinit_jax.errors import InputError, StoppedError
from structinit_jax.training import workdir as workdir_lib
from structinit_jax.training.workdir import lock_workdir, open_path, prepare_workdir


def test_a_second_run_is_refused_until_the_first_has_ended(tmp_path):
    holder = rf"workdir={tmp_path} is in use by another run \(process {os.getpid()} on "
    for _ in range(2):
        with lock_workdir(tmp_path), pytest.raises(InputError, match=holder):
            lock_workdir(tmp_path).__enter__()


def test_unusable_directories_are_refused(tmp_path):
    assert open_path("~/run") == Path("~/run").expanduser()
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"workdir=.*file cannot be written to"):
        prepare_workdir(tmp_path / "file")
    with pytest.raises(InputError, match=r"workdir=gs://bucket/run is a URL"):
        prepare_workdir("gs://bucket/run")
    for url in ("nothing://x", "gs://bucket/[a]"):
        with pytest.raises(InputError, match="workdir="):
            open_path(url)


def test_the_holder_of_a_lock_is_printed_as_text(tmp_path):
    with lock_workdir(tmp_path):
        (tmp_path / ".lock").write_text("\x1b]0;title\x07\nerror: false")
        with pytest.raises(InputError, match=r"\(\\x1b\]0;title\\x07\\nerror: false\)"):
            lock_workdir(tmp_path).__enter__()


def test_nothing_is_written_through_a_link(tmp_path):
    thesis, photos, run = (tmp_path / name for name in ("thesis.tex", "photos", "run"))
    thesis.write_text("thesis")
    photos.mkdir()
    (tmp_path / "scratch").mkdir()
    run.symlink_to(tmp_path / "scratch")  # the user's own choice
    workdir = prepare_workdir(run)
    for name in (".lock", "config.json", "log.txt"):
        (workdir / name).unlink(missing_ok=True)
        (workdir / name).symlink_to(thesis)
    (workdir / "tensorboard").symlink_to(photos)
    for write in (
        lambda: prepare_workdir(run),
        lambda: lock_workdir(workdir).__enter__(),
        lambda: workdir_lib.open_to_append(workdir / "log.txt"),
        lambda: workdir_lib.make_folder(workdir / "tensorboard"),
    ):
        with pytest.raises(InputError, match=r"run/[.\w]+ is a symbolic link"):
            write()
    workdir_lib.write_atomically(workdir / "config.json", "config")
    assert (workdir / "config.json").read_text() == "config"
    assert not (workdir / "config.json").is_symlink()
    assert thesis.read_text() == "thesis"
    assert not list(photos.iterdir())


def test_files_are_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    workdir_lib.write_atomically(path, "old")
    umask = os.umask(0o022)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask  # others may read it
    with contextlib.suppress(RuntimeError), workdir_lib.replace_files(tmp_path) as folder:
        (folder / "file").write_text("new")
        raise RuntimeError
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "old"


def test_what_cannot_be_read_or_is_not_json_is_named(tmp_path):
    path = tmp_path / "config.json"
    with pytest.raises(InputError, match=rf"{path} cannot be read"):
        workdir_lib.read_json(path)
    for content in (b"", b"{", b"\xff\xfe", b"[" * 100_000, b"9" * 5000):
        path.write_bytes(content)
        with pytest.raises(InputError, match=rf"{path} is not JSON"):
            workdir_lib.read_json(path)


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        OSError(122, "Disk quota exceeded"),
        ValueError("RESOURCE_EXHAUSTED: Error writing 'x': No space left on device; data loss"),
    ],
)
def test_a_full_disk_is_one_sentence(tmp_path, error):
    with pytest.raises(StoppedError) as caught, workdir_lib.report_full_disk(tmp_path):
        raise error
    assert caught.value.exit_code == 1
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(OSError, match="permitted"), workdir_lib.report_full_disk(tmp_path):
        raise PermissionError("not permitted")


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero", "."):
        with pytest.raises(InputError, match="not a regular file"):
            workdir_lib.read_file(tmp_path / name)
    with pytest.raises(InputError, match="pipe is not a regular file"):
        workdir_lib.open_to_append(tmp_path / "pipe")
    with pytest.raises(InputError, match=r"missing cannot be read"):
        workdir_lib.read_file(tmp_path / "missing")
