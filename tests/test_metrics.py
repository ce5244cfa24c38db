import contextlib
import json

import pytest
from tensorboardX import proto

from structinit_jax.errors import InputError
from structinit_jax.training.metrics import MetricsLog


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


def test_resuming_takes_out_the_steps_that_will_be_done_again(tmp_path):
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
    assert restarts == [5]  # from there on TensorBoard forgets what the killed run wrote


@pytest.mark.parametrize("limit", [100, 3000, 3200, 3400])
def test_a_full_disk_ends_the_run_with_a_message_and_does_not_hang_it(
    tmp_path, small_files_only, limit
):
    message = rf"the metrics could not be written to {tmp_path}: File too large\. The run stops and"

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
    assert kept == list(range(len(kept)))  # what is cut short is gone, and what comes after step 10
    assert len(kept) == (1 if limit == 100 else 11)
