import os
import subprocess
import sys

import pytest

from structinit_jax.errors import InputError
from structinit_jax.training.lock import lock_workdir

HOLDER = """
import sys
from pathlib import Path
from structinit_jax.training.lock import lock_workdir
with lock_workdir(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_run_is_refused_until_the_first_is_dead(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout.readline() == "held\n"
        message = rf"--workdir={tmp_path} is in use by another run \(process {holder.pid} on "
        with pytest.raises(InputError, match=message), lock_workdir(tmp_path):
            pass
        holder.kill()
        holder.wait()
        with lock_workdir(tmp_path):
            assert f"process {os.getpid()} on" in (tmp_path / ".lock").read_text()


def test_the_lock_is_given_back(tmp_path):
    for _ in range(2):
        with (
            lock_workdir(tmp_path),
            pytest.raises(InputError, match="in use"),
            lock_workdir(tmp_path),
        ):
            pass
