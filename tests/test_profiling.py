import re

import jax
import jax.numpy as jnp
import pytest

from structinit_jax.errors import InputError
from structinit_jax.training import metrics as profiling


@pytest.mark.parametrize(("text", "steps"), [(None, None), ("10:13", (10, 13)), ("1:1", (1, 1))])
def test_steps_are_parsed(text, steps):
    assert profiling.parse_steps(text) == steps


@pytest.mark.parametrize("text", ["", "10", "13:10", "0:3", "a:b", "1:2:3", "-1:3"])
def test_other_texts_are_refused(text):
    with pytest.raises(InputError, match=rf"--profile_steps={text} must be"):
        profiling.parse_steps(text)


def test_steps_outside_the_run_are_not_traced(capsys):
    assert profiling.steps_to_trace(None, 12, 18) is None
    assert profiling.steps_to_trace((13, 18), 12, 18) == (13, 18)
    assert profiling.steps_to_trace((12, 13), 12, 18) is None
    note = "note: --profile_steps=12:13: nothing is traced, since the run resumes after step 12"
    assert note in capsys.readouterr().out
    with pytest.raises(InputError, match=r"--profile_steps=18:19: .* 13 to 18"):
        profiling.steps_to_trace((18, 19), 12, 18)


def test_recompilations_are_counted_by_name():
    @jax.jit
    def doubled(x):
        return 2 * x

    with profiling.RecompilationWatch() as watch:
        doubled(jnp.zeros(2))
        watch.start()
        assert watch.report() is None
        for size in (3, 4, 4):
            doubled(jnp.zeros(size))
        assert re.match(r"warning: \d recompilations, of .*jit\(doubled\)", watch.report())
        assert watch.report() is None
    doubled(jnp.zeros(5))
    assert watch.report() is None


def test_memory_is_described_if_it_is_known(monkeypatch):
    class Device:
        def __init__(self, stats):
            self.stats = stats

        def memory_stats(self):
            return self.stats

    stats = {"bytes_in_use": 2**30, "peak_bytes_in_use": 3 * 2**30, "bytes_limit": 80 * 2**30}
    for value, text in (
        (None, ""),
        (stats, ", device memory 1.00 GiB in use, peak 3.00 of 80.0 GiB"),
    ):
        monkeypatch.setattr(jax, "local_devices", lambda value=value: [Device(value)])
        assert profiling.describe_memory() == text
