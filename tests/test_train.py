import contextlib
import functools
import gzip
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import make_batch, read_metrics, set_up, small_files_only
from safetensors.numpy import load_file

from structinit_jax import export
from structinit_jax.data.datasets import open_dataset
from structinit_jax.data.loader import DeviceLoader, make_loader
from structinit_jax.data.source import digest
from structinit_jax.errors import FullDiskError, InputError, NotFiniteError
from structinit_jax.training import build, checkpoint, checkpoint_files, evaluation, train

pytestmark = pytest.mark.usefixtures("library_promotion")


@pytest.fixture
def longer_config(tiny_config):
    """Continues the finished run from step 12 to step 18, with fields that may change."""
    tiny_config.update(num_epochs=3.0, learning_rate=5e-4)
    tiny_config.clip_norm = 0.0  # keeps its place in the optimizer state
    tiny_config.loss = "test_train:own_loss"
    return tiny_config


def own_loss(logits, targets):
    """Ten times the cross-entropy, and NaN without a class."""
    losses = -10 * jnp.sum(targets * jax.nn.log_softmax(logits), axis=-1)
    return losses * jnp.where(targets.max(axis=-1) > 0.5, 1.0, jnp.nan)


def test_training_writes_the_documented_files_and_output(finished_run):
    for text in (
        "of the attention on target",
        "memory per device: ",
        "training on 384 examples for 12 steps (2.0 epochs), evaluating on 90 of digits test[:90]",
        "step 12/12",
        "digits test[:90]",
        "done: accuracy",
    ):
        assert text in finished_run.output
    assert "warning" not in finished_run.output
    names = {".lock", "checkpoints", "config.json", "metrics.jsonl", "per_class.csv", "tensorboard"}
    assert {path.name for path in finished_run.workdir.iterdir()} == names
    saved = json.loads((finished_run.workdir / "config.json").read_text())
    assert (saved["model"]["width"], saved["model"]["remat"]) == (16, "none")
    assert saved["attention_init"]["dilation"] == 1  # not set
    metrics = read_metrics(finished_run.workdir)
    assert [m["step"] for m in metrics] == [0, 4, 5, 6, 6, 8, 10, 12, 12]
    assert metrics[0].keys() == {
        *("step", "init/seconds", "init/compile_seconds"),
        *("init/loss", "init/target_mass", "init/wanted_mass", "init/hit_rate"),
    }
    assert metrics[1].keys() == {
        *("step", "train/loss", "train/accuracy", "train/learning_rate", "train/gradient_norm"),
        *("images_per_second", "data_wait", "checkpoint_wait", "evaluation_wait"),
    }
    results = finished_run.results
    assert results.keys() == {"eval/loss", "eval/accuracy"}
    assert metrics[-1] == {"step": 12, **results}
    # 90 examples, counted exactly: every accuracy is a multiple of 1/90.
    assert (results["eval/accuracy"] * 90) % 1 == pytest.approx(0, abs=1e-9)


def test_averaged_weights_are_resumed_evaluated_and_exported(tiny_config, tmp_path, capsys):
    tiny_config.attention_init = dict(name="default")
    tiny_config.update(seed=1, ema_decay=0.8, checkpoint_every_steps=100)

    def on_evaluation(step, results):
        # Hooks can use JAX as usual, although the training loop disallows implicit transfers.
        assert jax.numpy.mean(jax.numpy.asarray(list(results.values()))) > 0
        return step == 6

    stopped = train.train(tiny_config, tmp_path / "run", on_evaluation=on_evaluation)
    assert "note: the initial weights will still make up 7%" in capsys.readouterr().out  # 0.8**12
    assert [m["step"] for m in read_metrics(tmp_path / "run") if "eval/loss" in m] == [6]
    results = train.train(tiny_config, tmp_path / "run")
    assert stopped != results
    checkpoints = tmp_path / "run" / "checkpoints"
    assert checkpoint.find_step(checkpoints) == 12
    assert "averaged weights" in checkpoint_files.read_run(checkpoints / "12")["evaluation"]
    setup = set_up(tiny_config)
    resumed = jax.device_get(checkpoint.restore(checkpoints, 12, setup.abstract_state))
    assert resumed.step == 12
    # Repeats the run by hand with the config's seed.
    state = setup.initialize()
    source = build.open_split(tiny_config, build.open_data(tiny_config), "train_split")
    loader = make_loader(source, setup.model.mesh, build.make_crop(tiny_config))
    for batch in build.train_batches(tiny_config, loader, 0, 12):
        state, _ = setup.train_step(state, batch, np.uint32(1))
    jax.tree.map(np.testing.assert_array_equal, resumed, jax.device_get(state))

    found = evaluation.evaluate_checkpoint(tiny_config, tmp_path / "run")
    assert found == pytest.approx(results, rel=1e-6)
    export.export(tiny_config, tmp_path / "run", tmp_path)
    bias = load_file(tmp_path / "model.safetensors")["head.bias"]
    np.testing.assert_array_equal(bias, resumed.ema["params"]["head"]["bias"])
    tiny_config.ema_decay = 0.0  # the last step's weights, from the same checkpoint
    _, state, _ = evaluation.restore_model(tiny_config, tmp_path / "run")
    np.testing.assert_array_equal(state.params["head"]["bias"], resumed.params["head"]["bias"])
    assert np.any(state.params["head"]["bias"] != bias)


def test_a_hook_that_cannot_be_called_is_refused_at_the_start(tiny_config, tmp_path):
    with pytest.raises(InputError, match=r"^on_evaluation=<lambda> .* of \(step, results\)$"):
        train.train(tiny_config, tmp_path / "run", on_evaluation=lambda results: None)
    assert not (tmp_path / "run").exists()


def test_a_finished_run_started_again_is_evaluated(tiny_config, finished_run, workdir, capsys):
    tiny_config.log_every_steps += 1  # is not recorded, because nothing is trained
    again = train.train(tiny_config, workdir)
    assert again == pytest.approx(finished_run.results, rel=1e-6)
    assert "resumed from step 12" in capsys.readouterr().out
    for name in ("metrics.jsonl", "config.json"):
        assert (workdir / name).read_text() == (finished_run.workdir / name).read_text()


def test_a_run_continues_with_fields_that_may_change(longer_config, workdir, capsys, monkeypatch):
    traced, make_train_step = [], train.make_train_step

    def make(*args, **options):
        step = make_train_step(*args, **options)
        # Under its own name, so that the next tests find the program in the compilation cache.
        return functools.wraps(step)(lambda *arguments: traced.append(1) or step(*arguments))

    monkeypatch.setattr(train, "make_train_step", make)
    monkeypatch.setattr(train.state_lib, "make_initializer", None)  # A resumed run needs none.
    uploaded = []
    monkeypatch.setattr(train.MetricsLog, "upload", lambda log: uploaded.append(log))
    longer_config.update(checkpoint_every_steps=3, eval_every_epochs=0.5)
    live = len(jax.live_arrays())
    train.train(longer_config, workdir)
    assert len(traced) == 1
    assert len(uploaded) == 3  # with checkpoints 15 and 18, and at the end
    # Without a garbage collection, which may come too late for the next run in the process.
    assert len(jax.live_arrays()) <= live
    out = capsys.readouterr().out
    assert "config changed since the checkpoint:\n  checkpoint_every_steps: 4 -> 3\n" in out
    assert "  num_epochs: 2.0 -> 3.0\nresumed from step 12" in out
    assert json.loads((workdir / "config.json").read_text())["clip_norm"] == 0
    metrics = read_metrics(workdir)
    assert metrics[-1]["step"] == 18
    assert metrics[-2]["train/loss"] > 10 > metrics[-1]["eval/loss"]  # only the first is the user's
    best = checkpoint.find_step(workdir / "checkpoints", "best")
    record = checkpoint_files.read_run(workdir / "checkpoints" / str(best))
    dataset = open_dataset("digits")
    digests = [digest(dataset.split(x), dataset.class_names) for x in ("train[:384]", "test[:90]")]
    assert record["data_digest"] == digests[0]
    assert record["evaluation"] == f"digits test[:90], crop_fraction 1.0, digest {digests[1]}"
    # The two newest checkpoints and the best one are kept.
    kept = {int(p.name) for p in (workdir / "checkpoints").iterdir() if p.name.isdigit()}
    name = "eval/accuracy"
    evaluated = {m["step"]: m[name] for m in metrics if name in m}
    assert evaluated.keys() == {6, 12, 15, 18}
    assert {15, 18} <= kept
    assert len(kept) <= 3
    assert max(evaluated.values()) in {evaluated[step] for step in kept}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("data.eval_split", "validation", r"^config\.data\.eval_split: split="),
        ("model.num_classes", 100, r"^config\.model\.num_classes=100"),
        ("accumulate_steps", 3, r"config\.batch_size=64 must be a multiple of 24"),
        ("attention_init.kernel_size", 9, r"^config\.attention_init: grid=\(4, 4\)"),
        ("optimizer", "test_train:nothing", r"config\.optimizer='test_train:nothing'"),
    ],
)
def test_mistakes_are_refused_before_training(tiny_config, tmp_path, field, value, message):
    tiny_config.update_from_flattened_dict({field: value})
    with pytest.raises(InputError, match=message):
        train.train(tiny_config, tmp_path)


@pytest.fixture
def bad_config(longer_config, monkeypatch):
    """Gives step 15 a label of -1, which makes its loss NaN."""
    train_batches = DeviceLoader.train_batches
    spoil = jax.jit(lambda labels: jnp.where(jnp.arange(len(labels)) == 3, -1, labels))

    def batches_with_a_bad_one(self, *, start_step, **options):
        batches = train_batches(self, start_step=start_step, **options)
        for step, batch in enumerate(batches, start=start_step + 1):
            yield batch | {"label": spoil(batch["label"])} if step == 15 else batch

    monkeypatch.setattr(DeviceLoader, "train_batches", batches_with_a_bad_one)
    return longer_config


def test_a_nonfinite_step_stops_the_run_and_its_trace_is_kept(bad_config, workdir, capsys):
    bad_config.update(log_every_steps=100, checkpoint_every_steps=2)
    with pytest.raises(NotFiniteError) as caught:
        train.train(bad_config, workdir, profile_step=3)  # after resuming from step 12
    assert caught.value.exit_code == 2
    command = f"structinit_jax.show --step=15 --workdir={workdir} --trust_workdir."  # for its loss
    assert command in str(caught.value)
    out = capsys.readouterr().out
    assert f"wrote a trace, starting at step 15, to {workdir / 'profile'}: " in out
    (perfetto,) = (workdir / "profile").rglob("perfetto_trace.json.gz")
    assert len(json.loads(gzip.decompress(perfetto.read_bytes()))["traceEvents"]) > 10


def forgiving_adamw(learning_rate):
    return optax.apply_if_finite(optax.adamw(learning_rate), max_consecutive_errors=2)


def test_your_own_optimizer_may_leave_out_nonfinite_steps(tiny_config):
    tiny_config.attention_init = dict(name="default")
    tiny_config.optimizer = "test_train:forgiving_adamw"
    tiny_config.loss = "test_train:own_loss"
    setup = set_up(tiny_config, jax.devices()[:1])
    batch = make_batch(label=np.full(64, -1, np.int32))
    metrics = setup.train_step(setup.initialize(), batch, np.uint32(0))[1]
    assert np.isnan(metrics["loss"])
    assert metrics["finite"]


# After a failed save, TensorStore may call back into Orbax's event loop, which is already closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_ends_the_run_and_leaves_its_checkpoints(longer_config, workdir, monkeypatch):
    longer_config.update(log_every_steps=1, eval_every_epochs=0.5)
    write = train.MetricsLog.write
    with contextlib.ExitStack() as full, monkeypatch.context() as patch:

        def write_and_fill(log, step, values):
            write(log, step, values)
            if "eval/loss" in values:
                full.enter_context(small_files_only(4096))

        patch.setattr(train.MetricsLog, "write", write_and_fill)
        message = r"File too large.*the same command again"
        with pytest.raises(FullDiskError, match=message):
            train.train(longer_config, workdir)
    assert checkpoint.find_step(workdir / "checkpoints") == 12
    train.train(longer_config, workdir)
    assert [m["step"] for m in read_metrics(workdir) if "train/loss" in m][-6:] == [*range(13, 19)]
