"""A workdir from somebody else: reading it runs no code that its files name."""

import json

import fork_main
import pytest

from structinit_jax.errors import InputError
from structinit_jax.predict import Classifier


def test_code_that_a_workdir_names_runs_only_with_consent(workdir, tmp_path):
    trace = tmp_path / "trace"
    fields = json.loads((workdir / "config.json").read_text())
    fields["data"] |= {"name": "os:system", "data_dir": f"touch {trace}"}
    (workdir / "config.json").write_text(json.dumps(fields))
    with pytest.raises(InputError, match="os:system"):
        Classifier(workdir)
    arguments = f"--workdir={workdir}", "--mode=eval"
    result = fork_main.run(*arguments)
    assert result.returncode == 2, result.stderr
    assert "data.name='os:system'" in result.stderr
    assert "--trust_workdir" in result.stderr
    assert not trace.exists()
    fork_main.run(*arguments, "--trust_workdir")
    assert trace.exists()
