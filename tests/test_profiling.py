import gzip
import json

import jax
import jax.numpy as jnp
import pytest

from structinit_jax import train
from structinit_jax.errors import InputError
from structinit_jax.training import compilations, memory, profiling


@pytest.mark.parametrize(
    ("text", "steps"), [(None, (None, None)), ("10:13", (10, 13)), ("1:1", (1, 1))]
)
def test_steps_are_read(text, steps):
    assert profiling.parse_steps(text) == steps


@pytest.mark.parametrize("text", ["", "10", "13:10", "0:3", "a:b", "1:2:3", "-1:3"])
def test_other_steps_are_refused(text):
    with pytest.raises(InputError, match=rf"--profile_steps={text} needs to be the first and"):
        profiling.parse_steps(text)


@pytest.mark.usefixtures("library_promotion")
def test_a_run_traces_the_steps_asked_for_and_warns_of_no_compilation(
    tiny_config, tmp_path, capsys
):
    train.train(tiny_config, tmp_path, (3, 4))
    out = capsys.readouterr().out
    assert f"traced steps 3 to 4: {tmp_path / 'profile'}" in out
    assert "warning: " not in out
    (perfetto,) = (tmp_path / "profile").rglob("perfetto_trace.json.gz")
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
    events = json.loads(gzip.decompress(perfetto.read_bytes()))["traceEvents"]
    assert len(events) > 10
    with pytest.raises(InputError, match=r"--profile_steps=3:4: this run takes the steps 13 to 12"):
        train.train(tiny_config, tmp_path, (3, 4))


@pytest.mark.usefixtures("library_promotion")
def test_a_function_that_compiles_anew_is_told(tiny_config, tmp_path, capsys, monkeypatch):
    write = train.MetricsLog.write

    def write_and_compile(log, step, values):
        with jax.transfer_guard("allow"):
            jax.jit(lambda x: x + step)(jnp.zeros(()))
        write(log, step, values)

    monkeypatch.setattr(train.MetricsLog, "write", write_and_compile)
    train.train(tiny_config, tmp_path)
    out = capsys.readouterr().out
    assert "compilations where all should be compiled, of" in out
    assert "step 6/12" in out.split("warning: ")[0]  # the first evaluation is at step 6


def test_compilations_are_counted_by_name():
    @jax.jit
    def doubled(x):
        return 2 * x

    compilations.take()
    for size in (3, 4, 4):
        doubled(jnp.zeros(size))
    assert compilations.take().count("jit(doubled)") == 2
    assert compilations.take() == []
    assert "2 compilations" in compilations.warning(["jit(f)", "jit(f)"])


def test_memory_is_told_where_it_is_known(monkeypatch):
    class Device:
        def __init__(self, stats):
            self.stats = stats

        def memory_stats(self):
            return self.stats

    stats = {"bytes_in_use": 2**30, "peak_bytes_in_use": 3 * 2**30, "bytes_limit": 80 * 2**30}
    for value, text in (
        (None, ""),
        (stats, ", device memory 1.00 GiB in use, at most 3.00 of 80.0 GiB"),
    ):
        monkeypatch.setattr(jax, "local_devices", lambda value=value: [Device(value)])
        assert memory.describe() == text
