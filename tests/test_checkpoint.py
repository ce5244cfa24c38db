import contextlib
import json
import os
import re
import shutil
from pathlib import Path

import fork_main
import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import small_files_only
from etils import epath

from structinit_jax.errors import InputError
from structinit_jax.training import checkpoint, checkpoint_files
from structinit_jax.training.sharding import make_mesh, replicated, shard_params
from structinit_jax.training.state import TrainState

# After a failed save or restore, TensorStore may call back into its closed event loop.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def make_state(step):
    values = jax.random.normal(jax.random.key(step), (200, 100))
    return TrainState(jnp.int32(step), {"kernel": values}, {}, {"mu": values})


def abstract(state):
    sharding = replicated(make_mesh())
    shapes = jax.eval_shape(lambda: state)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)


ABSTRACT = abstract(make_state(0))


def opened(directory):
    return contextlib.closing(checkpoint.Checkpoints(directory, keep=2))


def save(checkpoints, step, state=None, accuracy=None, evaluation="test"):
    run = {"config": {"seed": step}, "class_names": ["a"], "data_digest": "c0ffee"}
    run |= {"accuracy": accuracy, "evaluation": evaluation}
    checkpoints.save(step, state or make_state(step), run)


def save_one(directory, step, state=None, evaluation="test"):
    with opened(directory) as checkpoints:
        save(checkpoints, step, state, evaluation=evaluation)


def read_json(path):
    return json.loads(path.read_bytes().splitlines()[0])


def save_three(directory):
    """Saves three checkpoints; the first is the best."""
    with opened(directory) as checkpoints:
        for step in (4, 8, 12):
            save(checkpoints, step, accuracy=1 / step)
    return directory


def assert_restores(directory, step):
    state = checkpoint.restore(directory, step, ABSTRACT)
    jax.tree.map(np.testing.assert_array_equal, state, make_state(step))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_three(tmp_path_factory.mktemp("saved"))


@pytest.fixture
def directory(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "checkpoints")


@pytest.fixture(scope="module")
def s3():
    """A bucket on a local S3 server, which `pip install '.[emulators]'` installs."""
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
        yield epath.Path("s3://bucket/a")
    server.stop()


@pytest.fixture(scope="module")
def gs():
    """A bucket on a local Cloud Storage server, also from '.[emulators]'."""
    pytest.importorskip("gcsfs")
    emulator = pytest.importorskip("gcp_storage_emulator.server")

    class Parser(emulator.BytesParser):
        def parsebytes(self, data):
            # A carriage return at the end of a file would be read as part of the next line ending.
            return super().parsebytes(data.replace(b"\r\n--==0==", b"\r\r\n--==0=="))

    port = fork_main.free_port()
    server = emulator.create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket")
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulator, "BytesParser", Parser)
        patch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        yield epath.Path("gs://bucket/a")
    server.stop()


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def flip_byte(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


ARRAY = "state/params.kernel/0.0"


@pytest.mark.parametrize("name", [ARRAY, "index_0.json", "run.json"])
@pytest.mark.parametrize("damage", [truncate, flip_byte, Path.unlink])
def test_a_damaged_checkpoint_is_skipped_and_overwritten(directory, damage, name, capsys):
    damage(directory / "12" / name)
    assert checkpoint.find_step(directory) == 8  # only reads
    note = re.escape(f"note: skipping checkpoint {directory / '12'}: ")
    assert re.search(f"{note}.*{name}", (said := capsys.readouterr().out))
    assert ("not finished" in said) == ((name, damage) == ("run.json", Path.unlink))
    with opened(directory) as checkpoints:
        assert checkpoints.latest_step == 8
        assert_restores(directory, 8)
        # A process killed while writing or deleting a checkpoint leaves no run.json.
        assert (directory / "12").exists() == ((name, damage) != ("run.json", Path.unlink))
        save(checkpoints, 12)
    assert checkpoint.find_step(directory) == 12


def test_a_run_without_an_intact_checkpoint_does_not_start_anew(directory):
    for step in (4, 8, 12):
        flip_byte(directory / str(step) / "index_0.json")
    with pytest.raises(InputError, match="has no intact checkpoint"), opened(directory):
        pass
    assert all((directory / str(step) / checkpoint.RUN_FILE).exists() for step in (4, 8, 12))


def test_a_first_upload_that_one_process_has_not_finished_is_no_damage(tmp_path, monkeypatch):
    save_one(tmp_path, 4)
    (tmp_path / "4" / "index_0.json").unlink()
    with pytest.raises(InputError, match="has no intact checkpoint"), opened(tmp_path):
        pass
    monkeypatch.setattr(checkpoint, "is_url", lambda path: True)  # a folder stands in for a bucket
    with opened(tmp_path) as checkpoints:
        assert checkpoints.latest_step is None
        save(checkpoints, 3)
    (tmp_path / "3" / "index_0.json").unlink()  # once more
    for _ in range(2):
        with opened(tmp_path) as checkpoints:
            assert checkpoints.latest_step is None
    save_one(tmp_path, 2)
    (tmp_path / "2" / "state" / "_METADATA").write_text("")
    with pytest.raises(InputError, match="has no intact checkpoint"), opened(tmp_path):
        pass


def test_nothing_of_another_program_is_deleted(directory, capsys):
    (directory / "12" / checkpoint.RUN_FILE).unlink()
    for name in ("state.orbax-checkpoint-tmp-1", ".partial-1"):  # left by a killed process
        (directory / "12" / name).mkdir()
    names = ("16/notes.txt", "20/state_dict", "24/state/a", "24/b", "28")
    for path in (others := [directory / name for name in names]):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    with opened(directory) as checkpoints:
        assert checkpoints.latest_step == 8
        assert not (directory / "12").exists()
        for step in (16, 17, 18, 19):
            save(checkpoints, step)
        with pytest.raises(InputError, match="24 has state/ next to"):
            save(checkpoints, 24)
    assert all(path.exists() for path in others)
    said = capsys.readouterr().out
    assert f"note: deleted incomplete checkpoint {directory / '12'}\n" in said
    assert f"note: skipping checkpoint {directory / '24'}: " in said


def test_a_renamed_checkpoint_and_one_without_a_part_of_a_process_are_damaged(directory, capsys):
    (directory / "12").rename(directory / "17")
    run = checkpoint_files.read_run(epath.Path(directory / "8")) | {"num_indexes": 2}
    checkpoint_files.write_index(epath.Path(directory / "8"), 0, run, files_of(directory / "8"))
    checkpoint_files.write_json(epath.Path(directory / "8" / "run.json"), run)
    assert checkpoint.find_step(directory) == 4
    notes = capsys.readouterr().out
    assert "17: run.json belongs to step 12\n" in notes
    assert "8/index_1.json cannot be read" in notes


def files_of(folder):
    return read_json(folder / "index_0.json")["files"]


def test_parts_of_another_run_or_step_are_noticed(directory, tmp_path, capsys):
    save_one(tmp_path / "other", 12, evaluation="another run")
    for source in (directory / "8", tmp_path / "other" / "12"):
        shutil.copytree(source / "state", directory / "12" / "state", dirs_exist_ok=True)
        shutil.copy(source / "index_0.json", directory / "12")
        assert checkpoint.find_step(directory) == 8
        assert "index_0.json belongs to another run.json" in capsys.readouterr().out


def test_the_data_may_be_elsewhere_for_another_process(directory):
    run = checkpoint_files.read_run(epath.Path(directory / "12"))
    run["config"]["data"] = {"data_dir": "/elsewhere"}
    checkpoint_files.write_index(epath.Path(directory / "12"), 0, run, files_of(directory / "12"))
    assert checkpoint.find_step(directory) == 12


@pytest.mark.parametrize("name", ["../8/run.json", "/etc/passwd", "state/../run.json", "run.json"])
def test_an_index_names_files_of_the_state_alone(directory, name, capsys):
    index = directory / "12" / "index_0.json"
    content = read_json(index)
    content["files"][name] = content["files"][ARRAY]
    checkpoint_files.write_json(epath.Path(index), content)
    assert checkpoint.find_step(directory) == 8
    assert f"index_0.json names {name!r}" in capsys.readouterr().out


def test_files_of_the_state_that_no_index_names_are_noticed(directory, capsys):
    (directory / "12" / "state" / ".DS_Store").touch()  # left by a file manager
    assert checkpoint.find_step(directory) == 12
    index = directory / "12" / "index_0.json"
    content = read_json(index)
    for name in (ARRAY, "state/params.kernel/.zarray"):
        rest = {file: digest for file, digest in content["files"].items() if file != name}
        checkpoint_files.write_json(epath.Path(index), content | {"files": rest})
        assert checkpoint.find_step(directory) == 8
        assert f"{name} is not listed in any index" in capsys.readouterr().out


def test_a_checkpoint_of_another_version_is_not_damaged(directory):
    path = directory / "12" / "run.json"
    run = read_json(path) | {"version": checkpoint_files.VERSION + 1}
    checkpoint_files.write_json(epath.Path(path), run)
    with pytest.raises(InputError, match="version 3"):
        checkpoint.find_step(directory)
    with pytest.raises(InputError, match="version 3"):
        checkpoint.Checkpoints(directory, keep=2)


@pytest.mark.filterwarnings("ignore")  # from the emulators and clients
@pytest.mark.parametrize("storage", ["tmp_path", "s3", "gs"])
def test_checkpoints_are_kept_at_odd_paths_and_in_object_storage(request, storage):
    name = "[a] b*" if storage == "tmp_path" else "run"
    directory = save_three(epath.Path(request.getfixturevalue(storage)) / name / "checkpoints")
    (directory / "²").mkdir()
    save_one(directory, 16)
    flip_byte(directory / "16" / ARRAY)
    assert checkpoint.find_step(directory, "best") == 4
    kept = [folder.name for folder in checkpoint.step_folders(directory)]
    assert kept == ["16", "12", "4"]
    with opened(directory) as checkpoints:
        assert checkpoints.latest_step == 12
    assert_restores(directory, 12)


def test_arrays_are_restored_on_other_meshes(tmp_path):
    kernel = jnp.arange(2.0**16, dtype=jnp.bfloat16).reshape(256, 256)
    for fsdp in (1, 2, 4):
        state = TrainState(jnp.int32(fsdp), {"kernel": kernel}, {}, {"number": jnp.int32(7)})
        placed = shard_params(jax.eval_shape(lambda state=state: state), make_mesh(fsdp), stacks=())
        shardings = jax.tree.map(lambda leaf: leaf.sharding, placed)
        if fsdp > 1:
            restored = checkpoint.restore(tmp_path, fsdp // 2, placed)
            jax.tree.map(np.testing.assert_array_equal, restored[1:], state[1:])
            assert restored.params["kernel"].sharding.spec == shardings.params["kernel"].spec
        save_one(tmp_path, fsdp, jax.device_put(state, shardings))


def test_random_keys_and_4_bit_arrays_are_saved_without_implicit_transfers(tmp_path):
    # On a CPU only 4-bit arrays are copied, as all arrays are on a TPU; others share memory.
    rng = jax.random.key(7)
    state = TrainState(jnp.int32(4), {"kernel": jnp.arange(8).astype(jnp.int4)}, {}, {"rng": rng})
    with opened(tmp_path) as checkpoints, jax.transfer_guard("disallow"):
        save(checkpoints, 4, state)
    wanted = abstract(state)
    for restored in (
        checkpoint.restore(tmp_path, 4, x) for x in (wanted, wanted._replace(opt_state=None))
    ):
        np.testing.assert_array_equal(restored.params["kernel"], state.params["kernel"])
    assert checkpoint.restore(tmp_path, 4, wanted).opt_state["rng"] == rng


def test_an_error_of_a_save_is_raised_and_not_logged_as_well(directory, caplog):
    def save_to_full_disk():
        with opened(directory) as checkpoints, small_files_only(4096):
            save(checkpoints, 16)
            checkpoints.wait()

    with pytest.raises(Exception, match="File too large"):
        save_to_full_disk()
    assert not [record for record in caplog.records if record.exc_info]
    assert checkpoint.find_step(directory) == 12


def test_accuracies_on_other_images_are_not_compared(directory):
    with opened(directory) as checkpoints:
        for step, accuracy in ((16, 0.1), (20, 0.1), (24, None), (28, 0.02), (32, None)):
            save(checkpoints, step, accuracy=accuracy, evaluation="train[90%:]")
    assert checkpoint.find_step(directory, "best") == 20  # the newer of two equally good ones
    assert [p.name for p in checkpoint.step_folders(directory)] == ["32", "28", "20"]


def test_the_newest_the_best_or_any_checkpoint_is_found(directory, capsys):
    steps = {wanted: checkpoint.find_step(directory, wanted) for wanted in ("newest", "best", "8")}
    assert steps == {"newest": 12, "best": 4, "8": 8}
    assert checkpoint.find_step(directory, "5") is None
    with pytest.raises(InputError, match=r"step='last' must be 'newest', 'best' or a step number"):
        checkpoint.find_step(directory, "last")
    flip_byte(directory / "4" / "run.json")  # its accuracy counts only if it is intact
    assert checkpoint.find_step(directory, "best") == 8
    assert f"note: skipping checkpoint {directory / '4'}: run.json" in capsys.readouterr().out


def test_a_state_must_fit_the_config(tmp_path):
    state = make_state(4)
    save_one(tmp_path, 4, state)
    assert checkpoint_files.read_run(epath.Path(tmp_path / "4"))["config"] == {"seed": 4}
    with pytest.raises(InputError, match=r"4 does .* 'opt_state/mu' is .* missing in the mo"):
        checkpoint.restore(tmp_path, 4, ABSTRACT._replace(opt_state={}))
    biased = ABSTRACT._replace(params=ABSTRACT.params | {"bias": ABSTRACT.step})
    for wanted in (biased, biased._replace(opt_state=None)):
        with pytest.raises(InputError, match=r"'params/bias' is missing in the checkpoint"):
            checkpoint.restore(tmp_path, 4, wanted)
    other = ABSTRACT._replace(opt_state={"mu": ABSTRACT.opt_state["mu"], "nu": ABSTRACT.step})
    with pytest.raises(InputError, match=r"4 .* 'opt_state/nu' is missing in the checkpoint"):
        checkpoint.restore(tmp_path, 4, other)
    restored = checkpoint.restore(tmp_path, 4, other._replace(opt_state=None))
    assert restored.opt_state is None
    np.testing.assert_array_equal(restored.params["kernel"], state.params["kernel"])
