import json
import os
import socket
import sys
from pathlib import Path

import pytest
from test_config import make_config

from structinit_jax.attention_init import SCHEMES
from structinit_jax.config import load_run_config, to_fields
from structinit_jax.errors import InputError
from structinit_jax.files import open_path
from structinit_jax.training import workdir

PLACE = "step 400 in /runs/digits"


def test_a_second_run_is_refused_until_the_first_has_ended(tmp_path):
    process = f"process {os.getpid()} on {socket.gethostname()}"
    holder = rf"workdir={tmp_path} is in use by another run \({process}\): "
    for _ in range(2):
        with workdir.lock_workdir(tmp_path), pytest.raises(InputError, match=holder):
            workdir.lock_workdir(tmp_path).__enter__()


def test_unusable_directories_are_refused(tmp_path, monkeypatch):
    assert open_path("~/run") == Path("~/run").expanduser()
    assert open_path("run") == Path.cwd() / "run"
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"workdir=.*file cannot be written to"):
        workdir.prepare_workdir(tmp_path / "file")
    (tmp_path / "compare.json").touch()
    with (
        pytest.raises(InputError, match=r"^workdir=.*SETTING/seed_K"),
        workdir.open_workdir(tmp_path),
    ):
        pass
    with pytest.raises(InputError, match=r"workdir='gs://bucket/run'"):
        workdir.prepare_workdir("gs://bucket/run")
    with pytest.raises(InputError, match="workdir="):
        open_path("nothing://x")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(InputError, match=r"s3:// needs pip install '\.\[s3\]'"):
        open_path("s3://bucket/run")


def saved(**fields):
    """The record of a checkpoint."""
    config = json.loads(make_config(**fields).to_json())
    return {"config": config, "data_digest": "c0ffee", "evaluation": "milk", "step": 400}


def check(saved, data_digest="c0ffee", evaluation="milk", last_step=400, **fields):
    record = {"data_digest": data_digest, "evaluation": evaluation}
    workdir.check_resume(saved, record, make_config(**fields), last_step, PLACE)


def test_fields_that_may_change_are_listed(capsys):
    fields = {"num_epochs": 90.0, "loss": "m:f", "data.data_dir": "/moved"}
    fields |= {"model.remat": "full", "model.drop_path": 0.5, "model.dtype": "bfloat16"}
    check(saved(), **fields)
    assert capsys.readouterr().out.splitlines() == [
        "config changed since the checkpoint:",
        "  data.data_dir: '' -> '/moved'",
        "  loss: 'softmax_cross_entropy' -> 'm:f'",
        "  model.drop_path: 0.0 -> 0.5",
        "  model.dtype: 'float32' -> 'bfloat16'",
        "  model.remat: 'none' -> 'full'",
        "  num_epochs: 30.0 -> 90.0",
    ]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("seed", 1), ("batch_size", 256), ("optimizer", "optax:lion"), ("model.depth", 6)),
        *(("data.name", "cifar10"), ("data.train_split", "test"), ("data.image_size", 32)),
        *(("data.repeats", 3), ("data.drop_remainder", True), ("data.channels", 1)),
        *(("data.mean", (0.5,) * 3), ("data.std", (0.5,) * 3), ("start_from", "b.safetensors")),
        *(("attention_init.name", "mimetic"), ("attention_init.target_mass", 0.5)),
    ],
)
def test_fields_that_must_not_change_are_refused_by_name(field, value):
    with pytest.raises(InputError, match=f"{PLACE}:\n  {field}: .* -> .*\n") as caught:
        check(saved(), **{field: value, "learning_rate": 0.5})
    assert "learning_rate" not in str(caught.value)


def test_a_field_of_a_custom_model_may_be_a_dict():
    old = saved()["config"]
    old["model"]["options"] = None
    config = make_config()
    config.model.options = {"scale": 2.0}
    with pytest.raises(InputError, match=r"\n  model\.options: None -> \{'scale': 2\.0\}\n"):
        workdir.check_config(old, config, workdir.RUN, PLACE)


def test_fields_of_another_version_do_not_count(capsys):
    run = saved()
    del run["config"]["clip_norm"], run["config"]["model"]["layer_scale"]
    run["config"] |= {"gone": 1, "section": {"a": 3}}
    check(run)
    assert not capsys.readouterr().out
    run["config"]["attention_init"]["gone"] = 1
    with pytest.raises(InputError, match=r"attention_init\.gone: 1 -> None"):
        check(run)


def my_scheme(kernel_size=(3, 3)):
    return lambda rng, site: kernel_size


@pytest.mark.parametrize(("name", "size"), [("impulse", 3), (f"{__name__}:my_scheme", (3, 3))])
def test_an_option_of_the_scheme_that_is_not_set_has_its_default(name, size, capsys):
    default = {"attention_init.name": name}
    given = default | {"attention_init.kernel_size": size}
    for old, new in ((default, given), (given, default)):
        check(saved(**old), **new)
    gone = {"attention_init.name": "gone:my_scheme"}  # trained weights do not need it
    check(saved(**gone), **gone)
    assert not capsys.readouterr().out


def test_another_scheme_that_a_checkpoint_names_is_not_imported(tmp_path, monkeypatch):
    (tmp_path / "strangers_scheme.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    run = saved(**{"attention_init.name": "strangers_scheme:scheme"})
    with pytest.raises(InputError, match=r"name: 'strangers_scheme:scheme' -> 'impulse'"):
        check(run)


def test_a_run_keeps_the_options_that_a_later_version_has_other_defaults_for(tmp_path, monkeypatch):
    config = make_config(**{"attention_init.name": "mimetic"})
    record = to_fields(config)
    (tmp_path / "config.json").write_text(json.dumps(record))
    assert load_run_config(tmp_path).to_dict() == config.to_dict()  # with today's defaults
    monkeypatch.setitem(SCHEMES, "mimetic", lambda *, value_scale=2.0: None)
    assert to_fields(load_run_config(tmp_path)) == record
    with pytest.raises(InputError, match=r"\n  attention_init\.value_scale: 1\.0 -> 2\.0\n"):
        workdir.check_config(record, config, workdir.START, PLACE)


def test_other_training_data_are_refused_and_other_evaluation_data_noted(capsys):
    check(saved(), evaluation="cream")
    assert capsys.readouterr().out.startswith(f"note: {PLACE} was evaluated in another way")
    with pytest.raises(InputError, match=r"train_split='train' does not hold .* step 400 in"):
        check(saved(), data_digest="decaf")


def test_a_run_that_is_past_its_last_step_is_not_resumed():
    with pytest.raises(InputError, match=r"the config, 399: raise config\.num_epochs, "):
        check(saved(), last_step=399)
    with pytest.raises(InputError, match=r"raise config\.num_steps, "):
        check(saved(), last_step=399, num_steps=399)
