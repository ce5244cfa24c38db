import contextlib
import errno
import gc
import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from structinit_jax.errors import InputError
from structinit_jax.training import checkpoint, manifest
from structinit_jax.training.state import TrainState


def make_state(step):
    values = jax.random.normal(jax.random.key(step), (200, 100))
    return TrainState(jnp.int32(step), {"kernel": values}, {}, {"mu": values}, {})


ABSTRACT = jax.eval_shape(lambda: make_state(0))


def opened(directory, evaluation="digits test"):
    return contextlib.closing(checkpoint.Checkpoints(directory, 3, None, evaluation))


@pytest.fixture
def directory(tmp_path):
    """Three checkpoints; the first is the best."""
    path = tmp_path / "checkpoints"
    with opened(path) as checkpoints:
        for step in (4, 8, 12):
            checkpoints.save(step, make_state(step), {"config": {"seed": 0}}, 1 / step)
    return path


def largest_file(folder):
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def truncate(folder):
    path = largest_file(folder)
    os.truncate(path, path.stat().st_size // 2)
    return f"{path.relative_to(folder)} has"


def flip_byte(folder):
    path = largest_file(folder)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)
    return f"{path.relative_to(folder)} does not match its checksum"


def delete_file(folder):
    path = largest_file(folder)
    path.unlink()
    return f"{path.relative_to(folder)} is missing"


def truncate_metrics(folder):  # orbax's manager does not start with one of these
    path = max((folder / "metrics").iterdir(), key=lambda p: p.stat().st_size)
    os.truncate(path, path.stat().st_size - 3)
    return f"metrics/{path.name} has"


def delete_manifest(folder):
    (folder / "manifest.json").unlink()
    return "manifest.json is missing: the run ended"


def truncate_manifest(folder):
    os.truncate(folder / "manifest.json", 50)
    return "manifest.json cannot be read"


def empty_manifest_entry(folder):
    files = json.loads((folder / "manifest.json").read_text())
    name = next(iter(files))
    (folder / "manifest.json").write_text(json.dumps({name: {}}))
    return f"manifest.json has no size or checksum for {name}"


DAMAGES = [
    truncate,
    flip_byte,
    delete_file,
    truncate_metrics,
    delete_manifest,
    truncate_manifest,
    empty_manifest_entry,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_used(directory, damage, capsys):
    message = damage(directory / "12")
    content = sorted(p.name for p in (directory / "12").rglob("*"))

    assert checkpoint.find_step(directory) == 8  # only reads
    state = checkpoint.restore(directory, 8, ABSTRACT)
    np.testing.assert_array_equal(state.params["kernel"], make_state(8).params["kernel"])
    assert f"note: skipping checkpoint {directory / '12'}: {message}" in capsys.readouterr().out

    with opened(directory) as checkpoints:
        assert checkpoints.latest_step == 8
        state = checkpoint.restore(directory, 8, ABSTRACT)
        jax.tree.map(np.testing.assert_array_equal, state, make_state(8))
        assert f"note: checkpoint {directory / '12'} is damaged: {message}" in (
            capsys.readouterr().out
        )
        assert sorted(p.name for p in (directory / "damaged" / "12").rglob("*")) == content
        checkpoints.save(12, make_state(12), {}, 0.1)
    damage(directory / "12")
    with opened(directory) as checkpoints:  # the same step, damaged once more
        assert checkpoints.latest_step == 8
    assert {p.name for p in (directory / "damaged").iterdir()} == {"12", "12.2"}


@pytest.mark.parametrize("damage", [truncate, truncate_metrics, delete_manifest])
def test_a_damaged_checkpoint_that_cannot_be_moved_is_ignored(
    directory, damage, capsys, monkeypatch
):
    def fail(folder):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(manifest, "set_aside", fail)
    message = damage(directory / "12")
    with opened(directory) as checkpoints:
        assert checkpoints.latest_step == 8
        assert f"note: checkpoint {directory / '12'} is damaged: {message}" in (
            output := capsys.readouterr().out
        )
        assert "It cannot be moved (Permission denied) and is ignored" in output
        checkpoints.save(16, make_state(16), {}, None)
    assert checkpoint.find_step(directory) == 16
    assert (directory / "12").is_dir()


def test_intact_checkpoints_pass_and_every_file_counts(directory):
    folder = directory / "12"
    assert [p.name for p in manifest.step_folders(directory)] == ["12", "8", "4"]
    assert manifest.find_damage(folder) is None
    names = json.loads((folder / "manifest.json").read_text()).keys()
    files = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert names == files - {"manifest.json"}
    for name in names:
        kept = (folder / name).read_bytes()
        (folder / name).write_bytes(kept + b" ")
        assert name in manifest.find_damage(folder)
        (folder / name).write_bytes(kept)
    assert manifest.find_damage(folder) is None


def test_if_all_are_damaged_there_is_none(directory, capsys):
    for folder in manifest.step_folders(directory):
        delete_file(folder)
    assert checkpoint.find_step(directory) is None
    with opened(directory) as checkpoints:
        assert checkpoints.latest_step is None
    assert capsys.readouterr().out.count("Moved to") == 3


def test_the_best_checkpoint_is_kept_after_a_resume_too(directory):
    for step in (16, 20, 24, 28):
        with opened(directory) as checkpoints:
            checkpoints.save(step, make_state(step), {}, 1 / step if step == 16 else None)
    assert [p.name for p in manifest.step_folders(directory)] == ["28", "24", "20", "4"]


def test_accuracies_on_other_images_are_not_compared(directory):
    assert checkpoint.find_step(directory, "best") == 4  # with 0.25
    for step, accuracy in ((16, 0.1), (20, 0.05), (24, None), (28, 0.02), (32, None)):
        with opened(directory, "digits train[90%:]") as checkpoints:
            checkpoints.save(step, make_state(step), {}, accuracy)
    assert checkpoint.find_step(directory, "best") == 16
    # The best on the other images is not deleted.
    assert [p.name for p in manifest.step_folders(directory)] == ["32", "28", "24", "16", "4"]


def test_the_newest_the_best_or_any_checkpoint_is_found(directory, capsys):
    steps = {wanted: checkpoint.find_step(directory, wanted) for wanted in ("newest", "best", "8")}
    assert steps == {"newest": 12, "best": 4, "8": 8}
    assert checkpoint.find_step(directory, "5") is None
    with pytest.raises(InputError, match=r"--step=last must be 'newest', 'best' or the number"):
        checkpoint.find_step(directory, "last")
    message = truncate_metrics(directory / "4")
    assert checkpoint.find_step(directory, "best") == 8
    assert f"note: skipping checkpoint {directory / '4'}: {message}" in capsys.readouterr().out


def test_the_best_needs_an_evaluation(tmp_path):
    with opened(tmp_path) as checkpoints:
        checkpoints.save(4, make_state(4), {}, None)
    assert checkpoint.find_step(tmp_path, "best") is None
    assert checkpoint.find_step(tmp_path) == 4


def test_the_best_of_an_older_run_is_found(directory):
    for step, accuracy in ((4, 0.1), (8, 0.3), (12, 0.2)):
        path = directory / str(step) / "metrics" / "metrics"
        path.write_text(json.dumps({"test/loss": 1.0, "test/accuracy": accuracy}))
        manifest.seal(directory / str(step))
    assert checkpoint.find_step(directory, "best") == 8
    for step in (16, 20, 24):
        with opened(directory) as checkpoints:
            checkpoints.save(step, make_state(step), {}, None)
    assert [p.name for p in manifest.step_folders(directory)] == ["24", "20", "16", "8"]


# Orbax leaves futures of its own behind when a write fails.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk_stops_the_run_and_says_what_is_safe(directory, small_files_only, caplog):
    message = (
        rf"could not be written to {directory}: File too large\. .* the checkpoint of step 12 is "
        r"intact, later steps are lost"
    )
    with opened(directory) as checkpoints, small_files_only(4096):
        checkpoints.save(16, make_state(16), {}, None)
        with pytest.raises(InputError, match=message):
            checkpoints.save(20, make_state(20), {}, None)
    with pytest.raises(InputError, match=message), small_files_only(4096):  # noqa: SIM117
        with opened(directory) as checkpoints:  # closing waits for what is under way
            checkpoints.save(16, make_state(16), {}, None)
    with opened(directory) as checkpoints:
        assert checkpoints.latest_step == 12
        state = checkpoint.restore(directory, 12, ABSTRACT)
        jax.tree.map(np.testing.assert_array_equal, state, make_state(12))
    assert not [record for record in caplog.records if record.exc_info]  # orbax's own tracebacks
    gc.collect()  # coroutines that orbax never awaited: they would warn in some later test


def test_a_folder_that_cannot_be_written_to_stops_the_run(tmp_path):
    directory = tmp_path / "checkpoints"
    message = r"(Not a|No such file or) directory\. .* there is no earlier checkpoint"
    with opened(directory) as checkpoints:
        shutil.rmtree(directory)
        directory.write_text("")
        with pytest.raises(InputError, match=message):
            checkpoints.save(4, make_state(4), {}, None)


def test_averaged_weights_must_fit_the_config(tmp_path):
    state, averaged = make_state(4), ABSTRACT._replace(ema=ABSTRACT.params)
    with opened(tmp_path) as checkpoints:
        checkpoints.save(4, state, {"seed": 1}, None)
        checkpoints.save(8, state._replace(ema=state.params), {}, None)
    assert checkpoint.read_run(tmp_path, 4) == {"seed": 1}
    with pytest.raises(InputError, match=r"8 has averaged weights, but config\.ema_decay is 0"):
        checkpoint.restore(tmp_path, 8, ABSTRACT)
    for weights_only in (False, True):
        with pytest.raises(InputError, match=r"4 has no averaged weights, but config\.ema_decay"):
            checkpoint.restore(tmp_path, 4, averaged, weights_only=weights_only)
    # Evaluation may leave them out.
    restored = checkpoint.restore(tmp_path, 8, ABSTRACT, weights_only=True)
    assert restored.ema == restored.opt_state == {}
    np.testing.assert_array_equal(restored.params["kernel"], state.params["kernel"])
    restored = checkpoint.restore(tmp_path, 8, averaged, weights_only=True)
    np.testing.assert_array_equal(restored.ema["kernel"], state.params["kernel"])


def test_random_keys_in_the_state_are_restored(tmp_path):
    state = make_state(4)._replace(opt_state={"rng": jax.random.key(7)})
    with opened(tmp_path) as checkpoints:
        checkpoints.save(4, state, {}, None)
    abstract = jax.eval_shape(lambda: state)
    restored = checkpoint.restore(tmp_path, 4, abstract)
    assert jax.random.normal(restored.opt_state["rng"]) == jax.random.normal(jax.random.key(7))
    weights = checkpoint.restore(tmp_path, 4, abstract, weights_only=True)
    np.testing.assert_array_equal(weights.params["kernel"], state.params["kernel"])


def test_another_optimizer_state_is_refused(directory):
    other = ABSTRACT._replace(opt_state={"mu": ABSTRACT.opt_state["mu"], "nu": ABSTRACT.step})
    with pytest.raises(InputError, match=r"12 .* opt_state 'nu' is missing in the checkpoint"):
        checkpoint.restore(directory, 12, other)
    checkpoint.restore(directory, 12, other, weights_only=True)  # does not need it
