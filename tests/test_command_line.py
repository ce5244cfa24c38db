"""Flags and fields on the command line: an error names what is wrong, and the exit code is 2."""

import json
import tempfile
import types
from pathlib import Path

import fork_main
import jax
import pytest

from structinit_jax import command_line
from structinit_jax.errors import FullDiskError, InputError, PreemptedError
from structinit_jax.training.evaluation import Classifier

CONFIG = "--config=configs/vit_t_digits.py"


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--config.model.widht=5", "config.model.widht did you mean 'model.width'"),
        ("--wrokdir=x", "'wrokdir' Did you mean: workdir --config.FIELD=VALUE"),
        ("config.seed=3", "unrecognized argument 'config.seed=3'"),
        ("--config.seed", "config.seed --config.FIELD=VALUE"),
        ("--flagfile=nothing", "nothing"),
        ("--flagfile=benchmarks/results/maps.png", "--flagfile UTF-8"),
        ("--mode=eval", "workdir= checkpoint"),
    ],
)
def test_the_command_names_what_is_wrong(tmp_path, argument, words):
    message = fork_main.error_of(CONFIG, f"--workdir={tmp_path}/run", argument)
    assert not [word for word in words.split() if word not in message], message


def test_a_mistake_is_named_where_no_device_works(tmp_path):
    script = tmp_path / "main.py"
    script.write_text(
        "import jax, runpy\n"
        "jax.config.update('jax_platforms', 'none')\n"
        "runpy.run_module('structinit_jax.main', run_name='__main__', alter_sys=True)\n"
    )
    assert "error: --workdir is required" in fork_main.error_of(CONFIG, module=str(script))


def test_an_import_defines_no_flags(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import importlib, pkgutil\n"
        "from absl import flags\n"
        "flags.DEFINE_string('workdir', None, 'My own.')\n"
        "before = set(flags.FLAGS)\n"
        "import structinit_jax\n"
        "for module in pkgutil.walk_packages(structinit_jax.__path__, 'structinit_jax.'):\n"
        "    importlib.import_module(module.name)\n"
        "assert not [name for name, found in flags.FLAGS.flags_by_module_dict().items()\n"
        "            if 'structinit' in name], set(flags.FLAGS) - before\n"
    )
    fork_main.run(module=str(script), timeout=60)


def test_a_cache_that_jax_has_is_kept_and_the_home_folder_found(monkeypatch):
    folder = jax.config.jax_compilation_cache_dir
    command_line.use_compilation_cache()
    assert jax.config.jax_compilation_cache_dir == folder
    monkeypatch.setattr(command_line, "FLAGS", types.SimpleNamespace(out="~/a"))
    assert command_line.out_path("b") == Path("~/a").expanduser()


def test_an_out_folder_that_is_not_writable_is_refused_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(command_line, "FLAGS", types.SimpleNamespace(out=f"{tmp_path}/new/folder"))
    assert command_line.out_folder("").is_dir()

    def refuse(dir):
        raise PermissionError(13, "Permission denied", str(dir))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)  # root can write to any folder
    with pytest.raises(InputError, match=r"^--out=.*Permission denied"):
        command_line.out_folder("")


def test_a_full_disk_ends_a_process_without_waiting_for_the_others(monkeypatch):
    stopped = [FullDiskError("no space left"), PreemptedError("stopped")]
    exits = []

    def run(*arguments, **options):
        raise stopped.pop(0)

    monkeypatch.setattr(command_line.app, "run", run)
    monkeypatch.setattr(command_line, "_exit_now", lambda status: exits.append(status) or exit())
    for status in (None, PreemptedError.exit_code):
        with pytest.raises(SystemExit) as caught:
            command_line.run(print, shared=())
        assert caught.value.code == status
    assert exits == [FullDiskError.exit_code]


def test_help_lists_the_flags_that_commands_share():
    assert "--workdir: Output directory." in fork_main.run("--help", exit_code=1).stdout


def test_fields_may_be_in_a_file_of_flags(tmp_path):
    (tmp_path / "flags").write_text(f"{CONFIG}\n-config.seed=x\n")
    message = fork_main.error_of("--flagfile", tmp_path / "flags", "--config.batch_size=32")
    assert "error: config.seed=x must be of type int" in message


def test_code_that_a_workdir_names_runs_only_with_consent(workdir, tmp_path):
    trace = tmp_path / "trace"
    fields = json.loads((workdir / "config.json").read_text())
    fields["data"] |= {"name": "os:system", "data_dir": f"touch {trace}"}
    (workdir / "config.json").write_text(json.dumps(fields))
    with pytest.raises(InputError, match="os:system"):
        Classifier(workdir)
    arguments = f"--workdir={workdir}", "--mode=eval"
    message = fork_main.error_of(*arguments)
    assert "data.name='os:system'" in message
    assert "--trust_workdir" in message
    assert not trace.exists()
    fork_main.run(*arguments, "--trust_workdir", exit_code=2)
    assert trace.exists()
