import json

import jax.numpy as jnp
import optax
import pytest
from conftest import read_metrics, small_files_only
from tensorboardX import proto

from structinit_jax.training import metrics as metrics_lib
from structinit_jax.training.metrics import MetricsLog, Progress, StepTrace, average
from structinit_jax.training.optimizer import Schedule


def read_events(path):
    """Events in TFRecord's framing: length, its checksum, content, its checksum."""
    data, events = path.read_bytes(), []
    while data:
        length = int.from_bytes(data[:8], "little")
        events.append(proto.event_pb2.Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    return events


def write_steps(workdir):
    log = MetricsLog(workdir, 0)
    for step in (2, 4, 6):
        log.write(step, {"train/loss": float(step)})
    log.close()


def test_every_write_is_one_json_line_and_tensorboard_scalars(tmp_path):
    log = MetricsLog(tmp_path, 0)
    log.write(2, {"train/loss": 1.5})
    log.write(4, {"train/loss": 1.0, "eval/accuracy": 0.5})
    log.write(5, {"train/loss": float("nan")})
    log.close()
    assert read_metrics(tmp_path) == [
        {"step": 2, "train/loss": 1.5},
        {"step": 4, "train/loss": 1.0, "eval/accuracy": 0.5},
        {"step": 5, "train/loss": None},
    ]
    (path,) = (tmp_path / "tensorboard").iterdir()
    scalars = [(e.step, v.tag, v.simple_value) for e in read_events(path) for v in e.summary.value]
    assert scalars[:3] == [
        (2, "train/loss", 1.5),
        (4, "train/loss", 1.0),
        (4, "eval/accuracy", 0.5),
    ]


@pytest.mark.parametrize("is_url", [False, True])
def test_resuming_removes_the_steps_that_will_be_repeated(is_url, tmp_path, monkeypatch):
    monkeypatch.setattr(metrics_lib, "is_url", lambda path: is_url)  # a folder acts as the bucket
    (tmp_path / "tensorboard").mkdir()
    write_steps(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "train/l')  # as a killed run can leave it
    resumed = MetricsLog(tmp_path, 4)
    resumed.write(6, {"train/loss": 6.0})
    resumed.close()
    assert [line["step"] for line in read_metrics(tmp_path)] == [2, 4, 6]
    events = [e for p in (tmp_path / "tensorboard").iterdir() for e in read_events(p)]
    restarts = [e.step for e in events if e.session_log.status == proto.event_pb2.SessionLog.START]
    assert sorted(restarts) == [0, 5]  # TensorBoard drops older events from that step on


def test_a_full_disk_delays_only_the_events(tmp_path):
    # An event takes about 40 bytes, and a line of JSON half as many.
    log = MetricsLog(tmp_path, 0)
    with small_files_only(600):
        for step in range(20):
            log.write(step, {"a": 1.0})
    (path,) = (tmp_path / "tensorboard").iterdir()
    assert path.stat().st_size == 600
    log.close()  # there is room again
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(20))
    assert [e.step for e in read_events(path) if e.summary.value] == list(range(20))


@pytest.mark.parametrize("damage", [b"", b"3", b"\xff\xfe", b'{"x": 1}'])
def test_a_damaged_line_is_left_out_and_named(damage, tmp_path, capsys):
    write_steps(tmp_path)
    path = tmp_path / "metrics.jsonl"
    before = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([before[0], damage + b"\n", *before[1:]]))
    assert metrics_lib.read_metrics(path, 4) == [json.loads(x) for x in before[:2]]
    MetricsLog(tmp_path, 6).close()
    assert path.read_bytes() == b"".join(before)
    assert f"{path}: line 2 cannot be read\n" in capsys.readouterr().out


def test_metrics_are_averaged_over_steps():
    steps = {n: {"loss": 0.1 * n, "learning_rate": 0.01 * n, "finite": True} for n in range(1, 7)}
    expected = {"train/loss": 0.35, "train/learning_rate": 0.06}  # the last step's rate
    assert average(steps) == pytest.approx(expected)


def test_speed_and_time_left_are_those_of_training_alone(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(metrics_lib.time, "perf_counter", lambda: now[0])
    schedule = Schedule(1_000_100, 10.0, frozenset(), optax.constant_schedule(1e-3))
    progress = Progress(50, schedule, 64)
    now[0] += 6
    for kind, seconds in (("data", 2), ("evaluation", 4), ("checkpoint", 3), ("checkpoint", 5)):
        with progress.wait(kind):
            now[0] += seconds
    values = progress.measure(150)
    waits = {"data_wait": 0.1, "checkpoint_wait": 0.4, "evaluation_wait": 0.2}
    assert values == {"images_per_second": 800.0, **waits}
    progress.show(100, values | {"train/loss": 0.5, "train/learning_rate": 1e-3})
    assert capsys.readouterr().out == (
        "step 100/1000100  epoch 10.0  loss 0.5000  lr 1.00e-03  800 images/s  22:13:20 left\n"
    )
    now[0] += 1
    assert progress.measure(152) == {"images_per_second": 128.0, **dict.fromkeys(waits, 0.0)}


def test_a_trace_ends_after_four_steps(tmp_path, capsys):
    trace = StepTrace(tmp_path, first_step=2)
    for step in range(1, 6):
        assert not capsys.readouterr().out
        trace.after(step, jnp.ones(1))
    assert capsys.readouterr().out.startswith("wrote a trace, starting at step 2, to")
    trace.close()
    assert not capsys.readouterr().out
    StepTrace(tmp_path, first_step=9).close()
    assert "ended before step 9" in capsys.readouterr().out
