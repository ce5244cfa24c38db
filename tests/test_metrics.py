import contextlib
import json

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX import proto

from structinit_jax.errors import InputError
from structinit_jax.training.metrics import MetricsLog, PendingMetrics


def lines(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def read_events(path):
    """Events in TFRecord's framing: length, its checksum, content, its checksum."""
    data, events = path.read_bytes(), []
    while data:
        length = int.from_bytes(data[:8], "little")
        events.append(proto.event_pb2.Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    return events


def test_every_write_is_one_json_line_and_tensorboard_scalars(tmp_path):
    log = MetricsLog(tmp_path, 0)
    log.write(2, {"train/loss": 1.5})
    log.write(4, {"train/loss": 1.0, "test/accuracy": 0.5})
    log.close()
    assert lines(tmp_path) == [
        {"step": 2, "train/loss": 1.5},
        {"step": 4, "train/loss": 1.0, "test/accuracy": 0.5},
    ]
    (path,) = (tmp_path / "tensorboard").iterdir()
    scalars = [(e.step, v.tag, v.simple_value) for e in read_events(path) for v in e.summary.value]
    assert scalars == [(2, "train/loss", 1.5), (4, "train/loss", 1.0), (4, "test/accuracy", 0.5)]


def test_resuming_removes_the_steps_that_will_be_repeated(tmp_path):
    log = MetricsLog(tmp_path, 0)
    for step in (2, 4, 6):
        log.write(step, {"train/loss": float(step)})
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "train/l')  # what a kill leaves
    resumed = MetricsLog(tmp_path, 4)
    resumed.write(6, {"train/loss": 6.0})
    resumed.close()
    assert [line["step"] for line in lines(tmp_path)] == [2, 4, 6]
    events = [e for p in (tmp_path / "tensorboard").iterdir() for e in read_events(p)]
    restarts = [e.step for e in events if e.session_log.status == proto.event_pb2.SessionLog.START]
    assert restarts == [5]  # TensorBoard drops what the killed run wrote from there on


@pytest.mark.parametrize("limit", [100, 3000, 3200, 3400])
def test_a_full_disk_ends_the_run_with_a_message_and_does_not_hang_it(
    tmp_path, small_files_only, limit
):
    message = rf"the metrics could not be written to {tmp_path}: File too large"

    def write_until_full():
        with contextlib.closing(MetricsLog(tmp_path, 0)) as log:
            for step in range(1000):
                log.write(step, {"train/loss": 1.0, "train/accuracy": 0.5})

    with small_files_only(limit), pytest.raises(InputError, match=message):
        write_until_full()
    resumed = MetricsLog(tmp_path, 10)  # with room again
    resumed.write(11, {"train/loss": 1.0})
    resumed.close()
    *kept, last = [line["step"] for line in lines(tmp_path)]
    assert last == 11
    assert kept == list(range(len(kept)))  # no truncated line, none after step 10
    assert len(kept) == (1 if limit == 100 else 11)


def test_pending_metrics_are_averaged_over_finite_steps_also_after_a_resume():
    def metrics(step):
        return {
            "loss": jnp.float32(np.nan if step == 3 else 0.1 * step),
            "learning_rate": jnp.float32(0.01 * step),
            "layer_gradient_norms": {"head": jnp.float32(step)},
            "nonfinite": jnp.float32(step == 3),
        }

    whole, first = PendingMetrics(), PendingMetrics()
    for step in range(1, 7):
        whole.add(step, metrics(step))
    for step in range(1, 4):
        first.add(step, metrics(step))
    fetched = first.fetch()
    assert list(fetched) == [1, 2, 3]
    assert fetched[2]["layer_gradient_norms"] == {"head": 2}
    assert first.fetch() == {}

    saved = json.loads(json.dumps(first.to_json()))
    assert saved[1].keys() == {"loss", "learning_rate", "nonfinite"}
    resumed = PendingMetrics(saved)
    for step in range(4, 7):
        resumed.add(step, metrics(step))
    assert list(whole.fetch()) == [1, 2, 3, 4, 5, 6]
    assert list(resumed.fetch()) == [4, 5, 6]
    values = whole.average()
    assert values == resumed.average()
    assert values == {
        "train/loss": pytest.approx(0.36),
        "train/learning_rate": pytest.approx(0.06),
        "train/nonfinite_steps": 1,
    }
    assert whole.to_json() == []
