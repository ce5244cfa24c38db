"""Output directories in object storage: in memory, and on emulators of S3 and Cloud Storage.

The emulators come with `pip install '.[emulators]'`; `.ci/run` has them.
"""

import contextlib
import json
import os
import socket
import threading
import time

import fork_main
import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from structinit_jax import evaluate, export, train
from structinit_jax.errors import InputError, StoppedError
from structinit_jax.training import checkpoint, lease, manifest, remote
from structinit_jax.training.state import TrainState


def make_state(step):
    values = jax.random.normal(jax.random.key(step), (200, 100))
    return TrainState(jnp.int32(step), {"kernel": values}, {}, {"mu": values}, {})


ABSTRACT = jax.eval_shape(lambda: make_state(0))


@pytest.fixture(autouse=True)
def short_times(monkeypatch):
    monkeypatch.setattr(remote, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(lease, "STALE_SECONDS", 2.0)
    monkeypatch.setattr(lease, "SETTLE_SECONDS", 0.05)


@pytest.fixture(scope="module")
def s3():
    """An S3 server on this machine with an empty bucket."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        fsspec.filesystem("s3").mkdir("bucket")
        yield "s3://bucket"
    server.stop()


@pytest.fixture(scope="module")
def gs():
    """A Cloud Storage server on this machine with an empty bucket."""
    pytest.importorskip("gcsfs")
    emulator = pytest.importorskip("gcp_storage_emulator.server")

    class Parser(emulator.BytesParser):
        def parsebytes(self, data):
            # A carriage return at the end of a file would be taken for a part of the next line end.
            return super().parsebytes(data.replace(b"\r\n--==0==", b"\r\r\n--==0=="))

    port = fork_main.free_port()
    server = emulator.create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket")
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulator, "BytesParser", Parser)
        patch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        yield "gs://bucket"
    server.stop()


@pytest.fixture
def memory():
    yield "memory://bucket"
    fsspec.filesystem("memory").store.clear()


def save(url, steps):
    """Saves checkpoints as a run does, with metrics beside them."""
    with remote.open_mirror(url) as mirror:
        directory = mirror.folder / "checkpoints"
        with contextlib.closing(checkpoint.Checkpoints(directory, 1, mirror)) as checkpoints:
            start = checkpoints.latest_step
            for step in steps:
                with (mirror.folder / "metrics.jsonl").open("a") as file:
                    file.write(f"{step}\n")
                checkpoints.save(step, make_state(step), {}, 1 / step)
    return start


@pytest.mark.filterwarnings("ignore")  # of the emulators and clients
@pytest.mark.parametrize("storage", ["memory", "s3", "gs"])
def test_checkpoints_are_kept_in_the_storage(request, storage):
    url = f"{request.getfixturevalue(storage)}/a/run"
    assert save(url, [4, 8, 12]) is None
    with remote.open_mirror(url) as mirror:
        directory = mirror.folder / "checkpoints"
        kept = [path.name for path in manifest.step_folders(directory)]
        assert kept == ["12", "4"]  # the newest and the best
        state = checkpoint.restore(directory, 12, ABSTRACT)
        np.testing.assert_array_equal(state.params["kernel"], make_state(12).params["kernel"])
        assert (mirror.folder / "metrics.jsonl").read_text() == "4\n8\n12\n"
        # A kill while a checkpoint was copied: it has no manifest yet.
        mirror._storage.rm_file(mirror._path(f"checkpoints/12/{manifest.MANIFEST}"))
    assert save(url, [12]) == 4
    assert mirror._stored_steps() == mirror._stored_steps(complete=True) == {"4", "12"}


def test_a_kill_at_any_moment_leaves_whole_checkpoints_and_their_metrics(memory, monkeypatch):
    monkeypatch.setattr(remote, "BEAT_SECONDS", 60)  # checkpoints copy the metrics themselves
    lock, whole, numbers = threading.Lock(), {}, []

    def checked(method):
        def change_and_check(storage, *args, **kwargs):
            with lock:
                method(storage, *args, **kwargs)
                for folder in mirror._local_checkpoints():
                    paths = [path for path in folder.rglob("*") if path.is_file()]
                    whole[folder.name] = {
                        path.relative_to(mirror.folder).as_posix() for path in paths
                    }
                complete = mirror._stored_steps(complete=True)
                for step in complete:
                    assert set(mirror._names(f"checkpoints/{step}")) == whole[step]
                    metrics = storage.cat_file(mirror._path("metrics.jsonl")).decode().split()
                    assert step in metrics
                numbers.append(len(complete))

        return change_and_check

    with remote.open_mirror(f"{memory}/run") as mirror:
        for name in ("put_file", "rm_file"):  # `rm` removes one file after the other
            monkeypatch.setattr(
                type(mirror._storage), name, checked(getattr(type(mirror._storage), name))
            )
        directory = mirror.folder / "checkpoints"
        with contextlib.closing(checkpoint.Checkpoints(directory, 1, mirror)) as checkpoints:
            for step in (4, 8, 12):
                with (mirror.folder / "metrics.jsonl").open("a") as file:
                    file.write(f"{step}\n")
                checkpoints.save(step, make_state(step), {}, 1 / step)
                checkpoints.wait()
        monkeypatch.undo()
    assert max(numbers) == 3


def test_a_locked_run_is_refused_until_it_is_dead(memory, capsys):
    url = f"{memory}/run"
    with remote.open_mirror(url) as mirror:
        message = rf"--workdir={url} is in use by another run \(process {os.getpid()} on "
        with pytest.raises(InputError, match=message), remote.open_mirror(url):
            pass
        assert "waiting for a sign of life" in capsys.readouterr().out
        # Another run takes over: this one must not write any more.
        other = {"id": "other", "host": "elsewhere", "process": 7, "beat": 3}
        mirror._storage.pipe_file(mirror._path(lease.NAME), json.dumps(other).encode())
        while mirror.lease.lost is None:
            time.sleep(0.05)
        with pytest.raises(OSError, match="process 7 on elsewhere has taken over"):
            mirror.push_checkpoints()
    with remote.open_mirror(url) as mirror:  # after a while without a sign of the other
        assert mirror.lease.read()["process"] == os.getpid()
    dead = {"id": "dead", "host": socket.gethostname(), "process": 2**22 + 1}
    mirror._storage.pipe_file(mirror._path(lease.NAME), json.dumps(dead).encode())
    capsys.readouterr()
    with remote.open_mirror(url):
        assert capsys.readouterr().out == ""  # at once
    assert mirror.lease.read() is None


def test_a_storage_that_fails_stops_the_run_with_a_message(memory, monkeypatch):
    url = f"{memory}/run"

    def fail(self, *args, **kwargs):
        raise RuntimeError("503 Slow Down")

    message = rf"a checkpoint could not be written to {url}: RuntimeError: 503 Slow Down"
    with remote.open_mirror(url) as mirror:
        monkeypatch.setattr(type(mirror._storage), "put_file", fail)
        with contextlib.closing(
            checkpoint.Checkpoints(mirror.folder / "checkpoints", 2, mirror)
        ) as checkpoints:
            checkpoints.save(4, make_state(4), {}, None)
            with pytest.raises(InputError, match=message):
                checkpoints.wait()
    with pytest.raises(InputError, match=r"--workdir=nothing://x: use a path, gs://… or s3://…"):
        remote.readable("nothing://x")


def test_a_storage_that_fails_at_the_end_does_not_hide_why_the_run_ended(
    memory, monkeypatch, capsys
):
    def fail(self, *args, **kwargs):
        raise RuntimeError("503 Slow Down")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "rm_file", fail)
    with pytest.raises(StoppedError, match="preempted"), remote.open_mirror(f"{memory}/run"):
        raise StoppedError("preempted", exit_code=75)
    assert "note: --workdir=memory://" in capsys.readouterr().out
    with pytest.raises(InputError, match="503 Slow Down"), remote.open_mirror(f"{memory}/other"):
        pass


def test_a_file_that_is_gone_when_it_is_copied_is_left_out(memory, monkeypatch):
    with remote.open_mirror(f"{memory}/run") as run:
        (run.folder / "config.json").write_text("{}")
        (run.folder / "metrics.jsonl.partial").write_text("")
        put = type(run._storage).put_file

        def put_unless_renamed(self, path, name, **kwargs):
            if path.endswith(".partial"):
                raise FileNotFoundError(path)
            put(self, path, name, **kwargs)

        monkeypatch.setattr(type(run._storage), "put_file", put_unless_renamed)
        run.push_files()
        assert sorted(run._names("")) == [lease.NAME, "config.json"]


@pytest.mark.usefixtures("library_promotion")
def test_a_run_resumes_from_the_storage_bit_by_bit(run_config, finished_run, memory, tmp_path):
    url = f"{memory}/run"
    run_config.num_epochs = 2.0
    storage = fsspec.filesystem("memory")
    storage.put(f"{finished_run.workdir}/", "/bucket/run/", recursive=True)
    storage.rm("/bucket/run/checkpoints/12", recursive=True)
    steps = manifest.step_folders(remote.readable(url) / "checkpoints")
    assert "12" not in {path.name for path in steps}

    results = train.train(run_config, url)
    assert results == finished_run.results
    lines = storage.cat_file("/bucket/run/metrics.jsonl").decode().splitlines()
    assert [json.loads(line)["step"] for line in lines][-1] == 12
    assert not storage.exists(f"/bucket/run/{lease.NAME}")
    assert evaluate.evaluate_checkpoint(run_config, url) == pytest.approx(results)
    assert export.export(run_config, url, tmp_path / "x.safetensors")[0] == 12  # of this moment
