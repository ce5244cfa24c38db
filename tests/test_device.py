import os
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from structinit_jax.data.device import DeviceExamples
from structinit_jax.data.examples import ArrayExamples
from structinit_jax.data.stream import eval_batches, place_batches, train_batches


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


@pytest.fixture(scope="module")
def array_examples():
    rng = np.random.default_rng(0)
    return ArrayExamples(
        rng.integers(0, 256, (37, 3, 5, 2), dtype=np.uint8), np.arange(37, dtype=np.int32)
    )


@pytest.fixture(scope="module")
def device_examples(array_examples, mesh):
    return DeviceExamples(array_examples, mesh)


def assert_same(ours, theirs, number):
    ours, theirs = list(ours), list(theirs)
    assert len(ours) == number
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        for key in one:
            assert one[key].dtype == other[key].dtype
            assert one[key].sharding == other[key].sharding
            np.testing.assert_array_equal(jax.device_get(one[key]), jax.device_get(other[key]))


# 37 examples: batches that straddle an epoch, several, and more than one at once.
@pytest.mark.parametrize("batch_size", [8, 40, 88])
@pytest.mark.parametrize("start_step", [0, 4, 11, 12])
def test_training_batches_equal_the_hosts(
    array_examples, device_examples, mesh, batch_size, start_step
):
    args = dict(batch_size=batch_size, seed=3, start_step=start_step, num_steps=12)
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    right = place_batches(train_batches(array_examples, **args), sharding)
    assert_same(device_examples.train_batches(**args), right, 12 - start_step)


@pytest.mark.parametrize("batch_size", [8, 16, 40])
def test_evaluation_batches_equal_the_hosts(array_examples, device_examples, mesh, batch_size):
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    right = place_batches(eval_batches(array_examples, batch_size=batch_size), sharding)
    assert_same(device_examples.eval_batches(batch_size=batch_size), right, -(-37 // batch_size))


def test_no_implicit_transfers_and_one_send_per_epoch(device_examples, monkeypatch):
    sent = []
    send = DeviceExamples._send
    monkeypatch.setattr(
        DeviceExamples, "_send", lambda self, array: sent.append(array.shape) or send(self, array)
    )
    with jax.transfer_guard("disallow"):
        batches = device_examples.train_batches(
            batch_size=8, seed=0, start_step=0, num_steps=5 * 37 // 8
        )
        for _ in batches:
            pass
        list(device_examples.eval_batches(batch_size=16))
    orders = [shape for shape in sent if shape]
    assert len(orders) == 5 + 1


def test_each_device_gathers_its_own_part(device_examples):
    examples = device_examples
    arguments = (
        examples._images,
        examples._labels,
        examples._send(np.zeros(53, np.int32)),
        examples._send(np.zeros((), np.int32)),
    )
    text = examples._gather.lower(*arguments, batch_size=16).compile().as_text()
    assert "gather" in text
    assert not any(word in text for word in ("all-gather", "all-reduce", "all-to-all"))


ONE_OF_TWO_PROCESSES = """
import sys
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))
from structinit_jax.data.device import DeviceExamples
from structinit_jax.data.examples import ArrayExamples
from structinit_jax.data.stream import train_batches
images = np.random.default_rng(0).integers(0, 256, (13, 2, 2, 1), dtype=np.uint8)
examples = ArrayExamples(images, np.arange(13, dtype=np.int32))
mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
args = dict(batch_size=8, seed=1, start_step=2, num_steps=7)
ours = DeviceExamples(examples, mesh).train_batches(**args)
mine = train_batches(examples, **args, process_index=jax.process_index(), process_count=2)
for one, other in zip(ours, mine, strict=True):
    for key in one:
        shards = sorted(one[key].addressable_shards, key=lambda shard: shard.index[0].start)
        local = np.concatenate([np.asarray(shard.data) for shard in shards])
        np.testing.assert_array_equal(local, other[key])
print("equal")
"""


def test_two_processes_share_each_batch():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", ONE_OF_TWO_PROCESSES, address, str(number)],
            env={**environment, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(2)
    ]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=300)
            assert output.endswith("equal\n"), output
    finally:
        for process in processes:
            process.kill()
