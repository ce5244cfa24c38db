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
    fields["attention_init"] = {"name": "os:system", "command": f"touch {trace}"}
    fields["loss"] = "strangers:loss"
    fields["optimizer"] = "strangers:optimizer"
    fields["data"] |= {"name": "os:system", "data_dir": f"touch {trace}"}
    (workdir / "config.json").write_text(json.dumps(fields))
    return workdir, trace


COMMANDS = [
    ("main", "--mode=eval"),
    ("main", "--dry_run"),
    ("analyse", "--num_images=2"),
    ("show", "--step=1"),
]


@pytest.mark.parametrize(("module", "argument"), COMMANDS)
def test_a_command_lists_what_it_would_import(strangers, tmp_path, module, argument):
    workdir, trace = strangers
    out = [] if module == "main" else [f"--out={tmp_path}/out"]
    arguments = [f"--workdir={workdir}", argument, *out]
    result = fork_main.run(*arguments, module=f"structinit_jax.{module}")
    assert result.returncode == 2, result.stderr
    assert "data.name='os:system'" in result.stderr
    assert "--trust_workdir" in result.stderr
    assert not trace.exists()


def test_evaluation_loads_neither_scheme_nor_loss_nor_optimizer(strangers, data_dir):
    workdir, trace = strangers
    data = ["--config.data.name=digits", f"--config.data.data_dir={data_dir}"]
    result = fork_main.run(f"--workdir={workdir}", "--mode=eval", *data)
    assert result.returncode == 0, result.stderr
    assert not trace.exists()


def test_export_and_classifier_load_the_model_only(strangers, tmp_path):
    workdir, trace = strangers
    out = f"--out={tmp_path}/model"
    result = fork_main.run(f"--workdir={workdir}", out, module="structinit_jax.export")
    assert result.returncode == 0, result.stderr
    Classifier(workdir)
    fields = json.loads((workdir / "config.json").read_text())
    fields["model"]["name"] = "strangers:Model"
    (workdir / "config.json").write_text(json.dumps(fields))
    with pytest.raises(InputError, match=r"model\.name='strangers:Model'"):
        Classifier(workdir)
    with pytest.raises(InputError, match="cannot be imported"):
        Classifier(workdir, trust=True)
    result = fork_main.run(f"--workdir={workdir}", out, module="structinit_jax.export")
    assert "model.name='strangers:Model'" in result.stderr
    assert not trace.exists()


def test_a_consent_runs_the_code(strangers):
    workdir, trace = strangers
    fork_main.run(f"--workdir={workdir}", "--mode=eval", "--trust_workdir")
    assert trace.exists()
