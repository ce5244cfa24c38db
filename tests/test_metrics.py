import json

from tensorboardX import proto

from structinit_jax.training.metrics import MetricsLog


def lines(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def test_every_write_is_one_json_line_and_tensorboard_scalars(tmp_path):
    log = MetricsLog(tmp_path, 0)
    log.write(2, {"train/loss": 1.5})
    log.write(4, {"train/loss": 1.0, "test/accuracy": 0.5})
    log.close()
    assert lines(tmp_path) == [
        {"step": 2, "train/loss": 1.5},
        {"step": 4, "train/loss": 1.0, "test/accuracy": 0.5},
    ]
    (events,) = (tmp_path / "tensorboard").iterdir()
    data, scalars = events.read_bytes(), []
    while data:  # TFRecord framing: length, its checksum, content, its checksum
        length = int.from_bytes(data[:8], "little")
        event = proto.event_pb2.Event.FromString(data[12 : 12 + length])
        scalars += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
        data = data[16 + length :]
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
