import os
import subprocess
import sys
from pathlib import Path

import pytest

from structinit_jax.errors import InputError
from structinit_jax.training.workdir import (
    local_path,
    lock_workdir,
    open_path,
    prepare_workdir,
)

# Holds the lock as another run does. An interpreter without this package starts at once.
HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "a+")
fcntl.flock(file, fcntl.LOCK_EX)
file.write("process 7 on another host")
file.flush()
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_run_is_refused_until_the_first_is_dead(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / ".lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout.readline() == "held\n"
        message = rf"--workdir={tmp_path} is in use by another run \(process 7 on another host\)"
        with pytest.raises(InputError, match=message), lock_workdir(tmp_path):
            pass
        holder.kill()
        holder.wait()
        with lock_workdir(tmp_path):
            assert (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} on ")


def test_unusable_directories_are_refused(tmp_path, small_files_only):
    assert local_path("~/run") == Path("~/run").expanduser()
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"--workdir=.*file cannot be written to"):
        prepare_workdir(tmp_path / "file")
    with small_files_only(1000), pytest.raises(InputError, match=r"--workdir=.*File too large"):
        prepare_workdir(tmp_path / "full")
    with pytest.raises(InputError, match=r"--workdir=gs://bucket/run is a URL"):
        prepare_workdir("gs://bucket/run")
    for url in ("nothing://x", "gs://bucket/[a]"):
        with pytest.raises(InputError, match="--workdir="):
            open_path(url)
