import importlib.util
import subprocess
import sys

import pytest

from structinit_jax.dry_run import dry_run, find_target
from structinit_jax.errors import InputError


@pytest.mark.usefixtures("library_promotion")
def test_a_step_is_compiled_for_a_tpu_slice(tiny_config, capsys):
    dry_run(tiny_config, "tpu-v5e:2x2")
    out = capsys.readouterr().out
    assert "4 × TPU v5 lite" in out
    assert "64 global, 16 per device, 64 per host" in out
    assert "16,128 MiB available" in out
    assert "FLOPs per step" in out


@pytest.mark.usefixtures("library_promotion")
def test_a_step_that_does_not_fit_is_refused_with_remedies(tiny_config):
    tiny_config.batch_size = 2**25
    message = (
        r"of 16,128 MiB .*remat none needs more than there is, dots needs more .*, full needs more"
    )
    with pytest.raises(InputError, match=message):
        dry_run(tiny_config, "tpu-v5e:2x2")


def test_slices_of_several_hosts_have_their_devices():
    target = find_target("tpu-v4:2x2x4")
    assert len(target.devices) == 16  # one a chip, not one a core
    assert {device.process_index for device in target.devices} == set(range(4))


def test_several_processes_compile_for_tpus_at_once():
    program = "from structinit_jax.dry_run import find_target; find_target('tpu-v5e:2x2')"
    find_target("tpu-v5e:2x2")
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("name", ["tpu-v5e:3x5", "a100", "h100:8"])
def test_unknown_targets_are_refused(name):
    with pytest.raises(InputError, match=f"--target='{name}' is"):
        find_target(name)


def test_a_missing_compiler_is_named_with_its_installation(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name, module in (("tpu-v5e:2x2", "libtpu"), ("h100", "jax_plugins.xla_cuda12")):
        with pytest.raises(InputError, match=rf"{module}.*\[targets\]"):
            find_target(name)
