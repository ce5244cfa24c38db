"""A workdir from somebody else: reading it runs no code that its files name."""

import json

import fork_main
import pytest

from structinit_jax.errors import InputError
from structinit_jax.evaluate import Classifier


@pytest.fixture
def strangers(workdir, tmp_path):
    """A workdir whose config.json names code, and the file that the code would write."""
    trace = tmp_path / "trace"
    fields = json.loads((workdir / "config.json").read_text())
    fields["data"] |= {"name": "os:system", "data_dir": f"touch {trace}"}
    (workdir / "config.json").write_text(json.dumps(fields))
    return workdir, trace


@pytest.mark.parametrize(
    ("module", "arguments"),
    [("main", ["--dry_run"]), ("analyse", []), ("show", []), ("export", [])],
)
def test_a_command_lists_what_it_would_import(strangers, module, arguments):
    workdir, trace = strangers
    result = fork_main.run(f"--workdir={workdir}", *arguments, module=f"structinit_jax.{module}")
    assert result.returncode == 2, result.stderr
    assert "data.name='os:system'" in result.stderr
    assert "--trust_workdir" in result.stderr
    assert not trace.exists()


def test_a_consent_runs_the_code(strangers):
    workdir, trace = strangers
    with pytest.raises(InputError, match="os:system"):
        Classifier(workdir)
    fork_main.run(f"--workdir={workdir}", "--mode=eval", "--trust_workdir")
    assert trace.exists()
