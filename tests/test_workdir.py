import os
from pathlib import Path

import pytest

from structinit_jax import files
from structinit_jax.errors import InputError
from structinit_jax.files import open_path
from structinit_jax.training.workdir import lock_workdir, prepare_workdir


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
        lambda: files.open_to_append(workdir / "log.txt"),
        lambda: files.make_folder(workdir / "tensorboard"),
    ):
        with pytest.raises(InputError, match=r"run/[.\w]+ is a symbolic link"):
            write()
    files.write_atomically(workdir / "config.json", "config")
    assert (workdir / "config.json").read_text() == "config"
    assert not (workdir / "config.json").is_symlink()
    assert thesis.read_text() == "thesis"
    assert not list(photos.iterdir())
