import os
from pathlib import Path

import pytest

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
    with pytest.raises(InputError, match="workdir="):
        open_path("nothing://x")
